"""What `plan` prints: the assumptions first, then the recommendation, then why, why not, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator

from strategist.document.estimate import MEMORY_TERMS, StageMemory
from strategist.document.plan import Costed, Plan, Strategy
from strategist.document.verification import Verification
from strategist.facts.hardware import Node
from strategist.facts.model import LOOKED_UP
from strategist.facts.parameters import count, without_adapters
from strategist.facts.profile import engine_of
from strategist.reports.lines import HELD, Line, Span, Style, bar, line, phrases, table, wrapped
from strategist.rulebook.rule import load_families
from strategist.units import counted, format_count, format_duration, format_gib, format_rate, format_seconds

INDENT = 12


def brief(plan: Plan, width: int = 80, *, saved: str | None = None) -> list[Line]:
    """The short report of a plan in lines of at most `width` columns. `saved` is the file it was written to."""
    return [
        *assumed_lines(plan, width),
        line(""),
        *_recommended(plan, width),
        line(""),
        *_why(plan, width),
        *unrestricted_lines(plan, width),
        *frontend_lines(plan, width),
        *_instead(plan, width),
        *_ladder(plan, width),
        *extra_lines(plan, width),
        *hint_lines(plan, width),
        *_next(saved, plan, width),
    ]


def hardware_words(plan: Costed) -> str:
    """The machines in one phrase."""
    parts = []
    for group in plan.cluster.groups:
        node = group.node
        network = f", {format_rate(node.inter_Bps)} per node between nodes" if plan.cluster.nodes > 1 and node.inter_Bps else ""  # fmt: skip
        parts.append(f"{group.count} node{'s' * (group.count > 1)} x {node.gpus} x {node.gpu.title}{_inside(node)}{network}")  # fmt: skip
    spine = plan.cluster.oversubscription
    return "; ".join(parts) + (f"; {spine:g} times oversubscribed" if spine != 1.0 else "")


def _inside(node: Node) -> str:
    """What joins the devices of a node, or of a rack of nodes."""
    if node.gpus == 1 or not node.intra_Bps:
        return ""
    if node.links and node.topology == "none":
        return f", linked one by one, at most {format_rate(node.intra_Bps)} each way"
    rack = f" among {node.fast_domain}" if node.fast_domain > node.gpus else ""
    return f", {node.topology} {format_rate(node.intra_Bps)} each way{rack}"


def model_words(plan: Costed) -> str:
    """The model in one phrase, with its exact count."""
    shape, parameters = plan.model, count(without_adapters(plan.model))
    active = f", {format_count(parameters.active)} active" if parameters.active != parameters.total else ""
    encoder = f"{shape.enc_layers} + " if shape.enc_layers else ""
    layers = f"{encoder}{shape.layers} layers x {shape.hidden}"
    heads = (f"{shape.heads} heads ({shape.kv_heads} kv)",) if shape.heads else ()
    outputs = "outputs" if LOOKED_UP in dict(shape.extra) else "vocab"
    facts = (layers, *heads, *((f"{outputs} {shape.vocab:,}",) if shape.vocab else ()))
    if shape.unit == "images":
        facts = (f"{shape.layers} blocks", f"{dict(shape.extra)['classes']:,} classes")
    return f"{shape.name}: {parameters.total:,} parameters{active}, {phrases(facts, gap=', ')}"


def job_words(plan: Costed) -> str:
    """The workload in one phrase."""
    work = plan.workload
    job = f"{_method_words(plan)}, {work.optimizer}, {work.precision}"
    batch = batch_words(plan.model.unit, work.seq_len, work.global_batch, work.target_len)
    if plan.model.unit == "images":
        return f"{job}, {batch} per step"
    tokens = counted(work.tokens_per_step, "token", format_count(work.tokens_per_step))
    tokens = tokens if work.target_len is None else f"{tokens} of inputs"
    crowded = f", busiest experts {work.expert_imbalance:g} times the mean" if work.expert_imbalance > 1 else ""
    return f"{job}, {batch} = {tokens} per step{crowded}"


def batch_words(unit: str, seq_len: int, global_batch: int, target_len: int | None = None) -> str:
    """What one step takes; an image is no sequence that people know the length of."""
    if unit == "images":
        return counted(global_batch, "image")
    targets = "" if target_len is None else f" with targets of {target_len}"
    return f"sequence {seq_len}{targets}, {counted(global_batch, 'sequence')}"


def _method_words(plan: Costed) -> str:
    """What is trained."""
    adapters = plan.model.adapters
    if adapters is None:
        return f"training of all but {plan.model.frozen:,} weights" if plan.model.frozen else "full training"
    from strategist.facts.adapters import adapter_parameters

    title = {"lora": "LoRA", "qlora": "QLoRA (frozen weights in 4 bits)"}[adapters.method]
    trained = f"{adapter_parameters(plan.model):,} parameters trained"
    return f"{title} of rank {adapters.rank} beside {', '.join(adapters.targets)}: {trained}"


def assumed_lines(plan: Costed, width: int) -> Iterator[Line]:
    """Machines, model and job, and everything that was assumed about them."""
    if plan.hardware_is_assumed:
        note = "no GPU was found and no hardware was named. This plan is for an assumed target; `run` refuses it until you name the hardware."
        yield from wrapped("NOTE", note, width, indent=INDENT, style="warn", label_style="warn")
    yield from wrapped("hardware", hardware_words(plan), width, indent=INDENT)
    yield from wrapped("model", model_words(plan), width, indent=INDENT)
    yield from wrapped("job", job_words(plan), width, indent=INDENT)
    for number, assumption in enumerate(plan.assumptions, 1):
        text = f"{assumption.what}: {assumption.value}   set:{HELD}{assumption.flag}"
        yield from wrapped(f"assumed A{number}", text, width, indent=INDENT, style="dim")


def family_title(name: str) -> str:
    """The family's name for people."""
    return next((family.title for family in load_families() if family.name == name), name)


def mesh_words(plan: Costed) -> str:
    """Degrees above one, in rank order."""
    mesh = plan.mesh
    axes = [f"{axis} {mesh.size(axis)}" for axis in (*mesh.order, "ep", "etp") if mesh.size(axis) > 1]
    return " | ".join(axes) or "one device"


def option_words(plan: Costed) -> str:
    """The choices that are not degrees."""
    s = plan.strategy
    words = [f"ZeRO-{s.zero}"] if s.zero else []
    words += (
        [s.schedule if s.virtual_stages == 1 else f"{s.schedule} x {s.virtual_stages}"] if s.schedule != "none" else []
    )
    if s.stage_split == "balanced":
        words += [f"{'/'.join(str(stage.layer_count) for stage in s.stages)} layers a stage"]
    if s.stage_split == "weighted":
        words += [f"{counted(s.stages[-1].layer_count, 'layer')} on the last stage"]
    words += ["sequence parallel"] if s.sequence_parallel else []
    words += [_context(plan)] if s.context_parallel != "none" else []
    words += [f"gradients compressed by {s.compression}"] if s.compression != "none" else []
    words += ["loss in chunks"] if s.loss == "chunked" else []
    words += ["tables of embeddings on a parameter server"] if s.tables == "server" else []
    words += [_recompute(s)] + ["compiled blocks"] * s.compile
    words += [f"offload {s.offload}"] if s.offload != "none" else []
    words += [f"tiling {s.tiling}"] if s.tiling > 1 else []
    return ", ".join(words)


def _context(plan: Costed) -> str:
    """How the ranks that share a sequence see all of it."""
    kind, inner = plan.strategy.context_parallel, plan.strategy.cp_inner
    rings = f" (all-to-all over {inner}, ring of {plan.mesh.cp // inner})" if inner > 1 else ""
    return f"{kind} context parallel{rings}"


def _recompute(s: Strategy) -> str:
    """What is computed again."""
    if s.recompute_stages:
        each = "a stage" if s.virtual_stages == 1 else "each chunk of a stage"
        return f"recompute of {'/'.join(map(str, s.recompute_stages))} layers of {each}"
    if s.recompute_layers or s.recompute_every:
        which = f"{s.recompute_layers} layers" if s.recompute_layers else f"one layer in {s.recompute_every}"
        each = "stage" if s.virtual_stages == 1 else "chunk"
        return f"recompute of {which}" + (f" of every {each}" if s.schedule != "none" else "")
    return f"recompute {s.recompute}" if s.recompute != "none" else "no recompute"


def _recommended(plan: Plan, width: int) -> Iterator[Line]:
    head = "BEST SO FAR" if plan.unfinished else "RECOMMENDED"
    yield from wrapped(
        head,
        f"{family_title(plan.decision.family)}   {mesh_words(plan)}",
        width,
        indent=INDENT + 1,
        style="title",
        label_style="good",
    )
    yield from wrapped("  layout", option_words(plan), width, indent=INDENT)
    yield from wrapped("  batch", plan.batch_identity, width, indent=INDENT)
    yield from memory_lines(plan, width)
    yield from time_lines(plan, width)
    yield from _money(plan, width)


def device_word(plan: Costed) -> str:
    """What one device of the machines is called."""
    return "rank" if plan.cluster.smallest.vendor == "CPU" else "GPU"


def memory_lines(plan: Costed, width: int) -> Iterator[Line]:
    """The peak with its interval, and its terms."""
    worst, capacity = plan.memory.worst, plan.memory.capacity_bytes
    where = f"per {device_word(plan)}" if plan.mesh.pp == 1 else f"on stage {worst.stage}, the fullest"
    low, high = plan.memory.peak.low, plan.memory.peak.high
    traced = ", traced" if worst.is_traced else ""
    head = f"{format_gib(worst.device)} ({format_gib(low)} to {format_gib(high)}) of {format_gib(capacity)} {where}{traced}  {bar(worst.device / capacity)}"
    yield from wrapped("  memory", head, width, indent=INDENT)
    account = plan.verification if isinstance(plan, Plan) else None
    if account is not None:
        yield from _traced_terms(worst, account.predicted_of(worst.stage), width)
        yield from verified_lines(account, width)
        return
    terms = phrases(f"{term.name} {format_gib(term.bytes)}" for term in worst.terms)
    yield from wrapped("", terms, width, indent=INDENT, style="dim")


def _traced_terms(traced: StageMemory, predicted: StageMemory, width: int) -> Iterator[Line]:
    """Bytes of each term, traced and predicted, each at its own worst moment."""
    names = [name for name in MEMORY_TERMS if traced.term(name) or predicted.term(name)]
    rows = [(name, format_gib(traced.term(name)), format_gib(predicted.term(name)), "") for name in names]
    total = ("in all", format_gib(traced.device), format_gib(predicted.device), "")
    yield from table([("", "traced", "predicted", ""), *rows, total], width, indent=INDENT, right=(1, 2))


def verified_lines(account: Verification, width: int) -> Iterator[Line]:
    """Which ranks were traced, and what came of each layout."""
    ranks = f"{', '.join(account.ranks)}; torch {account.torch}"
    yield from wrapped("  traced", ranks, width, indent=INDENT, style="dim")
    for each in account.layouts:
        traced = "" if each.traced_bytes is None else f", traced {format_gib(each.traced_bytes)}"
        text = f"{each.role}: {each.layout}: predicted {format_gib(each.predicted_bytes)}{traced}: {each.sentence}"
        yield from wrapped("", text, width, indent=INDENT, style="dim" if each.fits else "warn")


def time_lines(plan: Costed, width: int) -> Iterator[Line]:
    """The step with its interval, and the shares of its terms."""
    time = plan.time
    low, high = format_seconds(time.step.low), format_seconds(time.step.high)
    step = f"{format_seconds(time.step.value)} ({low} to {high}) predicted"
    rates = (f"{format_count(time.tokens_per_second)} {plan.model.unit}/s", f"MFU {100 * time.mfu:.0f} %")
    yield from wrapped("  step", phrases((step, *rates), gap="   "), width, indent=INDENT)
    shares = [
        f"{term.name} {100 * term.exposed_ns / time.step_ns:.0f} %"
        for term in time.terms
        if term.exposed_ns >= 0.005 * time.step_ns
    ]
    yield from wrapped("", phrases(shares), width, indent=INDENT, style="dim")


def _money(plan: Plan, width: int) -> Iterator[Line]:
    cost = plan.economics
    if cost.run_seconds is None or cost.run_gpu_hours is None or plan.workload.tokens is None:
        return
    text = f"{format_count(plan.workload.tokens)} tokens: {format_duration(cost.run_seconds)}, {format_count(cost.run_gpu_hours)} GPU-hours"
    if cost.run_cost is not None and cost.price_per_gpu_hour is not None:
        text += f", {format_count(cost.run_cost)} at {cost.price_per_gpu_hour:.2f} per GPU-hour ({cost.price_source})"
    yield from wrapped("  run", text, width, indent=INDENT)


def _why(plan: Plan, width: int) -> Iterator[Line]:
    for reason in plan.reasons:
        label = "why" if reason.kind != "gap" else "why (gap)"
        tag = f" [{reason.rule}]" if reason.rule not in ("model", "gap") else ""
        yield from wrapped(label, f"{reason.sentence}{tag}", width, indent=INDENT)
    yield from wrapped("policy", policy_words(plan), width, indent=INDENT)


def policy_words(plan: Plan) -> str:
    """Both policies' answers and what lies between them."""
    d = plan.decision
    same = abs(d.difference - 1) < 5e-4
    if (
        d.other_family == d.family and same
    ) or d.difference == 1.0:  # the same layout may go by the names of two families
        return f"{d.policy} and {d.other_policy} agree."
    speed = (
        "as fast" if same else f"{1 / d.difference:.2f}x faster" if d.difference < 1 else f"{d.difference:.2f}x slower"
    )
    return f"{d.policy}; {d.other_policy} would choose {family_title(d.other_family)} ({d.other_layout}), predicted {speed}."


def _instead(plan: Plan, width: int) -> Iterator[Line]:
    if plan.alternatives:
        yield line("")
        yield line(Span("instead", "key"))
        rows = [(a.family, format_gib(a.peak_bytes), f"{a.sentence}: {a.layout}") for a in plan.alternatives]
        yield from table(rows, width, right=(1,))


def unrestricted_lines(plan: Plan, width: int) -> Iterator[Line]:
    """What would be chosen without the front end, and what it costs to keep to what that can say."""
    best = plan.unrestricted
    if best is not None:
        text = f"without --frontend {plan.request.frontend}: {best.layout}: {best.sentence}"
        yield from wrapped("front end", text, width, indent=INDENT)


def frontend_lines(plan: Plan, width: int) -> Iterator[Line]:
    """The front end that rules chose for the plan, why, and those that would have come before it."""
    if plan.frontend is not None:
        yield from wrapped("front end", plan.frontend.words, width, indent=INDENT)


def _ladder(plan: Plan, width: int) -> Iterator[Line]:
    if plan.ladder:
        yield line("")
        yield from wrapped("", "smallest hardware for this job", width, indent=0, style="key")
        yield from table([(rung.family, rung.sentence) for rung in plan.ladder], width)


def extra_lines(plan: Plan, width: int) -> Iterator[Line]:
    """The front, the account of the search and what would change the choice, where the plan has them."""
    if plan.front is None and plan.certificate is None and plan.sensitivity is None:
        return
    from strategist.reports.front import certificate_lines, front_lines, sensitivity_lines  # few ask for them

    if plan.front is not None:
        yield from front_lines(plan.front, device_word(plan), width)
    if plan.certificate is not None:
        yield from certificate_lines(plan.certificate, width)
    if plan.sensitivity is not None:
        yield from sensitivity_lines(plan.sensitivity, width)


def hint_lines(plan: Costed, width: int) -> Iterator[Line]:
    """Warnings and notes, each under its code."""
    if plan.hints:
        yield line("")
    for hint in plan.hints:
        style: Style = "warn" if hint.code.startswith("W_") else "dim"
        indent = max(INDENT, len(hint.code) + 2)
        yield from wrapped(hint.code, hint.sentence, width, indent=indent, style=style, label_style=style)


def _next(saved: str | None, plan: Plan, width: int) -> Iterator[Line]:
    """What to type next; the plan's own file where it was written to one."""
    yield line("")
    path = saved or "plan.json"
    first = [] if saved else [f"strategist plan ... --out {path}"]
    steps = [*first, f"strategist explain {path}", *_starts(path, plan)]
    yield from wrapped("next", phrases(steps, gap="   "), width, indent=INDENT, style="dim")


def _starts(path: str, plan: Plan) -> tuple[str, ...]:
    """What writes the files of a plan and starts it. One for what our executor does not run is launched by its files; where no front end can say
    it, a program brings the module."""
    named = plan.request.frontend if plan.frontend is None else plan.frontend.target
    can_run = "W_NOT_EXECUTABLE" not in {hint.code for hint in plan.hints}
    if can_run or plan.frontend is not None:
        target = "torchrun" if named in ("any", "strategist") else named
        is_ours = can_run and engine_of(plan.request.frontend) in ("any", "strategist")
        return (
            f"strategist emit {path} --to {target} --out job",
            f"strategist run {path}" if is_ours else "job/launch.sh",
        )
    is_cut = max(plan.mesh.tp, plan.mesh.pp, plan.mesh.cp, plan.mesh.ep) > 1
    return () if is_cut else (f"strategist run {path} -- python train.py",)
