"""A Plan as one generic tree of terms: predicted values, and beside them what other rungs saw; and the tree as lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from strategist.document.estimate import MEMORY_TERMS, TIME_TERMS, StageMemory, TimeTerm
from strategist.document.observed import Observed, ObservedTime, RankObservation
from strategist.document.plan import Costed, Plan
from strategist.document.verification import Verification
from strategist.document.write import digest
from strategist.errors import StaleError, shown
from strategist.facts.hardware import Basis
from strategist.records import dataclass, replace
from strategist.reports.lines import Line, Span, Style, hung, line, text_of, wrapped
from strategist.units import format_gib, format_seconds

VALUE_COLUMN = 12
RATIO_COLUMN = 8
NARROW = 44
"""Below so many columns a value follows its name instead of standing in a column."""

COMPUTE = ("matmul", "attention", "elementwise", "loss", "moe_dispatch", "host")
COMMUNICATION = ("tp", "cp", "ep", "pp", "dp")

MEANING: Mapping[str, str] = {
    "parameters": "weights as stored between steps",
    "gradients": "gradients, accumulation included",
    "optimizer": "moments and master weights",
    "activations": "tensors kept for backward",
    "logits": "vocabulary-sized tensors of the loss",
    "gather_buffers": "gathered weights and gradients in flight",
    "bucket_buffers": "reduction buckets and casts",
    "pipeline_buffers": "received activations and gradients",
    "temporaries": "workspace inside an operation",
    "runtime": "context, communicators, libraries",
    "slack": "reserved minus allocated",
    "matmul": "matrix products",
    "attention": "softmax attention",
    "elementwise": "norms, activations, residuals, rotary",
    "loss": "cross-entropy over the vocabulary",
    "moe_dispatch": "routing tokens to experts",
    "host": "launching kernels",
    "tp": "tensor parallel collectives",
    "cp": "context parallel collectives",
    "ep": "expert parallel collectives",
    "pp": "pipeline sends",
    "dp": "data parallel collectives",
    "bubble": "idle pipeline",
    "straggler": "waiting for the slowest device",
    "optimizer_step": "weight update",
    "offload": "host link and host update",
}


@dataclass(frozen=True, slots=True)
class Tree:
    """One term: its value in `unit` (B, ns or "" for groups without one), the value other rungs saw, and its parts.

    `is_worst` marks the part that is furthest from what the first of them to see it saw.
    """

    name: str
    unit: str
    predicted: float | None
    observed: tuple[float | None, ...] = ()
    basis: Basis | None = None
    note: str = ""
    children: tuple[Tree, ...] = ()
    is_worst: bool = False

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Predicted over observed, per rung; None where either is missing or nothing was seen."""
        return tuple(
            self.predicted / value if self.predicted is not None and value else None for value in self.observed
        )

    def __str__(self) -> str:
        """The tree as `strategist explain` prints it: 80 columns, without colour."""
        return text_of(tree_lines(self, 80))


def plan_tree(plan: Costed, observed: Sequence[Observed] = ()) -> Tree:
    """The time of a step and the memory of its worst stage, term by term; of every stage that was observed.

    Raises StaleError DIGEST for an observation of another plan.
    """
    for seen in observed:
        _require_same_plan(plan, seen)
    stages = [s for s in plan.memory.stages if any(seen.of_stage(s.stage) is not None for seen in observed)]
    ledgers = stages or [plan.memory.worst]
    return Tree(
        "plan",
        "",
        None,
        children=(
            time_tree(plan, observed),
            *(memory_tree(plan, stage, observed) for stage in ledgers),
            *process_trees(plan, ledgers, observed),
        ),
    )


def rungs_of(plan: Costed, observed: Sequence[Observed] = ()) -> tuple[str, ...]:
    """What the columns of observed values are called: the trace that verified the plan, then what was given."""
    return (*(("traced",) if _account(plan) is not None else ()), *(seen.rung for seen in observed))


def _account(plan: Costed) -> Verification | None:
    return plan.verification if isinstance(plan, Plan) else None


def _require_same_plan(plan: Costed, seen: Observed) -> None:
    if not isinstance(plan, Plan) or seen.plan != digest(plan):
        raise StaleError(
            "DIGEST",
            f"The observation is of another plan ({shown(seen.plan)}).",
            flag="--with",
            value=seen.plan,
            hint="Trace this plan again.",
        )


def time_tree(plan: Costed, observed: Sequence[Observed] = ()) -> Tree:
    """The step: compute, exposed communication, and the rest. Exposed nanoseconds add up to the step.

    What was observed is one rank's step, the slowest that was looked at; where collectives are fake, nothing of the wire
    and of waiting for others is in it. In a run they are, and then communication too can be what is furthest off.
    """
    unheard = () if all(seen.rung == "run" for seen in observed if seen.slowest is not None) else COMMUNICATION
    clocks = _clocks(plan, observed)
    seen = {term.name for clock in clocks if clock is not None for term in clock.terms}
    present = {term.name for term in plan.time.terms} | seen
    leaves = {
        leaf.name: leaf
        for leaf in _marked([_time_leaf(plan, name, clocks) for name in TIME_TERMS if name in present], unheard)
    }
    groups = (("compute", COMPUTE), ("exposed communication", COMMUNICATION))
    children = tuple(
        _time_group(label, [leaves[name] for name in names if name in leaves], clocks)
        for label, names in groups
        if any(name in leaves for name in names)
    )
    rest = (leaf for name, leaf in leaves.items() if name not in (*COMPUTE, *COMMUNICATION))
    return Tree(
        "step",
        "ns",
        plan.time.step_ns,
        tuple(None if clock is None else clock.step_ns for clock in clocks),
        basis=plan.time.step.basis,
        note=_clock_words(plan, observed),
        children=(*children, *rest),
    )


def _clocks(plan: Costed, observed: Sequence[Observed]) -> list[ObservedTime | None]:
    """The timed step of every column; None for those that time nothing."""
    ranks = [seen.slowest for seen in observed]
    own = [None] * (len(rungs_of(plan, observed)) - len(observed))
    return [*own, *(None if rank is None else rank.time for rank in ranks)]


def _clock_words(plan: Costed, observed: Sequence[Observed]) -> str:
    """Where times were taken, and what is not in them."""
    words = []
    for seen in observed:
        rank = seen.slowest
        if rank is not None and rank.time is not None:
            floor = format_seconds(rank.time.launch_floor_ns / 1e9)
            words.append(
                f"{seen.rung}: {rank.kind} on {seen.device}{_peers(plan, seen)}; issuing it takes {floor} at least"
            )
    return "; ".join(words)


def _peers(plan: Costed, seen: Observed) -> str:
    """What a timed step has of the other ranks."""
    if plan.mesh.world == 1:
        return ""
    return ", waiting for others included" if seen.rung == "run" else ", without wire and waiting"


def _time_group(label: str, leaves: Sequence[Tree], clocks: Sequence[ObservedTime | None]) -> Tree:
    sums = tuple(
        None if clock is None else sum(leaf.observed[column] or 0 for leaf in leaves)
        for column, clock in enumerate(clocks)
    )
    return Tree(label, "ns", sum(leaf.predicted or 0 for leaf in leaves), sums, children=tuple(leaves))


def _time_leaf(plan: Costed, name: str, clocks: Sequence[ObservedTime | None]) -> Tree:
    term = next((term for term in plan.time.terms if term.name == name), TimeTerm(name, 0))
    parts = []
    if term.hidden_ns:
        parts.append(f"{format_seconds(term.hidden_ns / 1e9)} more hidden behind compute")
    if term.recomputed_ns:
        parts.append(f"{format_seconds(term.recomputed_ns / 1e9)} of it run again")
    meaning = MEANING["optimizer_step" if name == "optimizer" else name]
    seen = tuple(None if clock is None else _exposed(clock, name) for clock in clocks)
    return Tree(name, "ns", term.exposed_ns, seen, basis=term.basis, note="; ".join([meaning, *parts]))


def _exposed(clock: ObservedTime, name: str) -> int | None:
    found = clock.term(name)
    return None if found is None else found.exposed_ns


@dataclass(frozen=True, slots=True)
class _View:
    """The memory of one stage as one column has it: its peak, its bytes by term, and where the peak was."""

    total: int | None
    terms: Mapping[str, int]
    place: str


def memory_tree(plan: Costed, ledger: StageMemory, observed: Sequence[Observed] = ()) -> Tree:
    """One stage at its worst moment. The terms add up to what is missing from the device.

    What was observed is what tensors held at the same moment, and at the peak wherever that was. A verified plan's own
    bytes are such a column, and the formulas' stand before it.
    """
    account = _account(plan)
    predicted = ledger if account is None else account.predicted_of(ledger.stage)
    views = [] if account is None else [_own_view(ledger, whole=not observed)]
    views += [_view(rung, rung.of_stage(ledger.stage), predicted.moment) for rung in observed]
    by_name = {term.name: term for term in predicted.terms}
    leaves = [
        Tree(
            name,
            "B",
            by_name[name].bytes if name in by_name else 0,
            tuple(view.terms.get(name) for view in views),
            by_name[name].basis if name in by_name else None,
            MEANING[name],
        )
        for name in MEMORY_TERMS
        if name in by_name or any(view.terms.get(name) for view in views)
    ]
    return Tree(
        "peak memory" if plan.mesh.pp == 1 else f"peak memory, stage {ledger.stage}",
        "B",
        predicted.allocated if observed else predicted.device,
        tuple(view.total for view in views),
        plan.memory.peak.basis if account is None else None,
        "; ".join([f"at: {predicted.moment}", *(view.place for view in views if view.place)]),
        _marked(leaves),
    )


def process_trees(plan: Costed, ledgers: Sequence[StageMemory], observed: Sequence[Observed]) -> Iterator[Tree]:
    """The device's bytes of each stage beside the most that a process of it had in memory, where a run on CPU ranks saw that."""
    own = [None] * (len(rungs_of(plan, observed)) - len(observed))
    for ledger in ledgers:
        seen = tuple(_process_bytes(rung, ledger.stage) for rung in observed)
        if any(seen):
            name = "whole process" if plan.mesh.pp == 1 else f"whole process, stage {ledger.stage}"
            yield Tree(name, "B", ledger.device, (*own, *seen), note="runtime and slack included")


def _process_bytes(rung: Observed, stage: int) -> int | None:
    """The fullest process of a stage, for ranks whose device is the host."""
    sizes = [r.process_bytes for r in rung.ranks if r.stage == stage and rung.rung == "run" and not r.memory.peak_bytes]
    return max(sizes, default=None)


def _own_view(ledger: StageMemory, *, whole: bool) -> _View:
    """The bytes of a verified plan; `whole` counts what no tensor holds too."""
    if not ledger.is_traced:
        return _View(None, {}, "")
    total = ledger.device if whole else ledger.allocated
    return _View(total, {term.name: term.bytes for term in ledger.terms}, f"traced at: {ledger.moment}")


def _view(rung: Observed, rank: RankObservation | None, moment: str) -> _View:
    """One rank as a rung saw it, at a moment of the plan's."""
    if rank is None:
        return _View(None, {}, "")
    memory = rank.memory
    found = next((m for m in memory.moments if m.moment == moment), None)
    terms = (
        {} if found is None else {name: found.term(name) for name in MEMORY_TERMS if name not in ("runtime", "slack")}
    )
    terms |= {} if memory.slack is None else {"slack": memory.slack}
    return _View(memory.peak_bytes or None, terms, _place(rung, rank) if memory.peak_bytes else "")


def _place(rung: Observed, rank: RankObservation) -> str:
    """Where the peak is: the module, pass and operation, as far as this rung can tell."""
    if not rank.memory.moments:
        return f"{rung.rung} on {rung.device}"
    peak = rank.memory.peak
    return f"seen at: {peak.moment}, {peak.module or 'outside the blocks'}, {peak.during}, {peak.operator}"


def _marked(leaves: Sequence[Tree], unheard: Sequence[str] = ()) -> tuple[Tree, ...]:
    """The leaves, the one that is furthest from what the first rung to see it saw marked; none of `unheard`, the axes of which
    no wire was seen."""
    worst = max((leaf for leaf in leaves if leaf.name not in unheard), key=_distance, default=None)
    return tuple(replace(leaf, is_worst=leaf is worst and _distance(leaf) > 0) for leaf in leaves)


def _distance(leaf: Tree) -> float:
    """How far off a term is, in its unit; 0 where nobody looked."""
    seen = next((value for value in leaf.observed if value is not None), None)
    return 0.0 if seen is None else abs(seen - (leaf.predicted or 0.0))


def tree_lines(tree: Tree, width: int, rungs: Sequence[str] = ()) -> Iterator[Line]:
    """One line per term: its name, the predicted value, what each of `rungs` saw, the ratio to the first of them that saw it,
    and what it means. A root without a value only holds the others."""
    tops = (tree,) if tree.predicted is not None else tree.children
    seen_width = VALUE_COLUMN * len(rungs) + RATIO_COLUMN * bool(rungs)
    name_width = _name_width(tops, width - seen_width)
    if width >= NARROW:
        heads = "".join(word.rjust(VALUE_COLUMN) for word in ("predicted", *rungs))
        ratio = "ratio".rjust(RATIO_COLUMN) if rungs else ""
        yield line(Span(f"{' ' * name_width}{heads}{ratio}", "dim"))
    for top in tops:
        yield from _branch(top, width, name_width, 0, rungs)


def _name_width(tops: Sequence[Tree], width: int) -> int:
    """As wide as the longest name needs, but never so wide that the notes have less than half of the line."""
    return min(_longest(tops, 0) + 1, max(24, width // 2 - VALUE_COLUMN - 2))


def _longest(nodes: Sequence[Tree], depth: int) -> int:
    widths = [len("  " * depth + node.name) for node in nodes]
    return max([*widths, *(_longest(node.children, depth + 1) for node in nodes)], default=0)


def _branch(node: Tree, width: int, name_width: int, depth: int, rungs: Sequence[str]) -> Iterator[Line]:
    label = f"{'  ' * depth}{node.name}"
    figures = _figures(node, len(rungs))
    worst = "<- worst" if node.is_worst else ""
    note = node.note + (f" ({node.basis})" if node.basis not in (None, "derived") else "")
    if width < NARROW:
        heads = ("predicted", *rungs, "ratio") if rungs else ("",)
        said = (
            f"{head} {figure.strip()}".strip() for head, figure in zip(heads, figures, strict=True) if figure.strip()
        )
        text = "; ".join(part for part in (f"{label} {', '.join(said)}", f"{worst} {note}".strip()) if part)
        yield from hung(text, width)
    else:
        head = f"{label.ljust(name_width)[:name_width]}{''.join(figures)}  "
        style: Style = "title" if depth == 0 else "bad" if worst else "plain"
        text = f"{worst} {note}".strip()
        yield from (
            [line(Span(head.rstrip(), style))]
            if not text
            else wrapped(head, text, width, indent=len(head), style="dim", label_style=style)
        )
    for child in node.children:
        yield from _branch(child, width, name_width, depth + 1, rungs)


def _figures(node: Tree, rungs: int) -> list[str]:
    """The cells of one line: predicted, what each rung saw, and the ratio."""
    seen = [*node.observed, *[None] * (rungs - len(node.observed))]
    cells = [_value(value, node.unit).rjust(VALUE_COLUMN) for value in (node.predicted, *seen)]
    ratio = next((ratio for ratio in node.ratios if ratio is not None), None)
    return [*cells, ("" if ratio is None else f"{ratio:.3f}").rjust(RATIO_COLUMN)] if rungs else cells


def _value(value: float | None, unit: str) -> str:
    """A figure and its unit, padded so that figures stand under figures."""
    if value is None:
        return ""
    figure, _, unit_word = (format_gib(value) if unit == "B" else format_seconds(value / 1e9)).partition(" ")
    return f"{figure} {unit_word:<3}"
