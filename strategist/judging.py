"""Somebody else's configuration, judged: what it says, what is wrong with it, and whether it fits the machines it is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from math import ceil
from typing import Any

from strategist.api import predicted
from strategist.ask import Asked, Given, complete
from strategist.document.judgement import Finding, Judgement, Said
from strategist.document.prediction import Prediction
from strategist.errors import ImpossibleError, InputError
from strategist.facts.job import Job
from strategist.facts.keeping import find_keeping
from strategist.facts.profile import (
    AUTOCAST,
    ENGINE,
    as_compiled,
    deepspeed_profile,
    merges_copies,
    with_dispatcher,
    with_gradients,
    with_habits,
    with_narrow_weights,
    with_states,
)
from strategist.readers import READERS, open_source, reader_of
from strategist.readers.foreign import IN_BF16, Foreign, Reader, Says, Source, Unsaid, finding, told
from strategist.records import replace
from strategist.space.candidates import WORDS
from strategist.space.grammar import KEYS, parse_pins
from strategist.units import format_gib

Layout = Mapping[str, Said]

DEGREES = ("dp", "dp_replicate", "dp_shard", "cp", "tp", "pp", "zero")
REPLICAS = ("dp_replicate", "dp_shard")
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8": "fp8", "float4": "fp4"}


def judge(path: str, given: Given | None = None, flag: str = "FILE") -> Judgement:
    """The judgement of one file, with a prediction where `given` names machines and it or the file a model, and the file says a layout.

    Raises InputError for a file that cannot be read or is no configuration that is known.
    """
    source = open_source(path, flag)
    reader = reader_of(source, flag)
    foreign = reader.read(source, None)
    job = None
    unsaid = unsaid_beside(given, foreign)
    if given is not None and not unsaid:
        given = _with_model(given, reader, source, flag)
        job = complete(given).question.job
        foreign = reader.read(source, job.cluster.world)
    findings, found = (*foreign.findings, *_unknown_values(unsaid)), None
    if job is not None:
        findings = (*findings, *_on_nodes(reader, source, job))
    if given is not None and job is not None and says_a_layout(says := _together(given, foreign.says)):
        found, more = _weighed(given, says, reader, layout_of(says, job.model.layers))
        findings = (*findings, *more)
    return Judgement(
        file=path,
        framework=reader.name,
        title=reader.title,
        says=tuple(foreign.says.items()),
        findings=findings,
        prediction=found,
    )


def _on_nodes(reader: Reader, source: Source, job: Job) -> Iterable[Finding]:
    """What is wrong on the smallest nodes of the job's machines."""
    return reader.on_nodes(source, min(group.node.gpus for group in job.cluster.groups))


def predicted_source(source: Source, given: Given, flag: str) -> tuple[Prediction, tuple[Finding, ...]]:
    """The prediction of the layout that a file says, of the model that was given or else of the one that the file is for, and the file's
    own faults. Raises InputError MISSING when it says too little of a layout, and what `complete` and `predict` raise."""
    reader = reader_of(source, flag)
    for fault in _unknown_values(unsaid_beside(given, reader.read(source, None))):
        raise InputError("MISSING", f"{flag}: {fault.sentence}", flag=flag, value=source.path, hint=fault.fix)
    given = _with_model(given, reader, source, flag)
    job = complete(given).question.job
    foreign = reader.read(source, job.cluster.world)
    says = _together(given, foreign.says)
    _require_a_layout(says, reader.title, source.path, flag)
    found = _predicted(given, says, reader, layout_of(says, job.model.layers))
    return found, (*foreign.findings, *_on_nodes(reader, source, job), *_left_wide(found, says))


def _with_model(given: Given, reader: Reader, source: Source, flag: str) -> Given:
    """What was given, with the model of the file where none was."""
    if any(model is not None for model in (given.model, given.model_size, given.model_config)):
        return given
    return replace(given, model=reader.model(source, flag))


LOOPS = ("strategist", "hf-trainer", ENGINE)
"""Profiles of whoever trains by torch's own ZeRO unless an engine is named, and of the engine."""
BESIDE = {
    "micro_batch": "--micro-batch NUMBER",
    "accumulation": "--grad-accum NUMBER",
    "global_batch": "--global-batch NUMBER",
    "seq_len": "--seq-len NUMBER",
    "model": "--model NAME",
}
"""How to say beside a file what is no choice of a layout."""


def unsaid_beside(given: Given | None, foreign: Foreign) -> tuple[Unsaid, ...]:
    """What the file leaves to whoever starts it, and the command line does not say either."""
    if given is None:
        return foreign.unsaid
    known = set(_together(given, {})) | {name for name in ("global_batch", "seq_len") if getattr(given, name)}
    known |= {"global_batch", "accumulation"} if known & {"global_batch", "accumulation"} else set()
    if any(model is not None for model in (given.model, given.model_size, given.model_config)):
        known.add("model")
    return tuple(one for one in foreign.unsaid if one.choice not in known)


def _unknown_values(unsaid: tuple[Unsaid, ...]) -> Iterator[Finding]:
    """One finding for all of them, with what to give beside the file."""
    if unsaid:
        choices = dict.fromkeys(one.choice for one in unsaid)
        pins = ",".join(f"{name}=VALUE" for name in choices if name not in BESIDE)
        ways = [f"--strategy {pins}"] if pins else []
        ways += [BESIDE[name] for name in choices if name in BESIDE]
        texts = dict.fromkeys(f"{one.argument} {one.text}".rstrip() for one in unsaid)
        yield finding("unknown-value", unsaid[0].argument, words=", ".join(texts), fix=" ".join(ways))


def _require_a_layout(says: Says, title: str, path: str, flag: str) -> None:
    if says_a_layout(says):
        return
    has_degrees = _says_degrees(says)
    lacks = "no micro-batch" if has_degrees else "no degrees and no ZeRO stage"
    raise InputError(
        "MISSING",
        f"{flag}: the {title} file says {lacks}, so there is no layout that could be predicted.",
        flag=flag,
        value=path,
        hint="Add --micro-batch 1, or another number of sequences." if has_degrees else "Give one with --strategy.",
    )


def is_foreign(source: Source) -> bool:
    """Whether a file is another framework's configuration rather than a document of ours."""
    return "format" not in source.table and any(reader.recognises(source) for reader in READERS)


def _together(given: Given, says: Says) -> Says:
    """What the file says, under a batch and choices of the layout that were named beside it. Whoever shards what the file replicates, or
    the other way round, has all data-parallel ranks in mind, not the file's replicas; another global batch has its own accumulation."""
    pins = () if given.strategy is None else parse_pins(given.strategy, "--strategy")
    own = {pin.key: pin.word if pin.key in WORDS else pin.value for pin in pins}
    shards = bool(says["zero"]) if "zero" in says else says.get("dp_shard", 1) != 1
    turns = "zero" in own and bool(own["zero"]) != shards and not set(own) & set(REPLICAS)
    left = set(REPLICAS) if turns or "dp" in own else set()
    left |= {"accumulation"} if given.global_batch else set()
    kept = {name: word for name, word in says.items() if name not in left}
    return kept | told(micro_batch=given.micro_batch, accumulation=given.grad_accum) | own


def says_a_layout(says: Says) -> bool:
    """Whether there is enough to weigh: how states are kept, and how many sequences at a time."""
    return _says_degrees(says) and "micro_batch" in says


def _says_degrees(says: Says) -> bool:
    return any(name in says for name in DEGREES)


def layout_of(says: Says, layers: int) -> Layout:
    """The layout, key by key. Stages that are given by their layers are counted for a model of so many; beside replicas that are numbered
    and shard nothing there are no groups that shard."""
    layout = {name: word for name, word in says.items() if name in KEYS}
    if layout.get("zero") == 0 and "dp_replicate" in layout:
        layout.setdefault("dp_shard", 1)
    each, pp = says.get("layers_per_stage"), layout.get("pp")
    if isinstance(each, int) and isinstance(pp, int) and pp > 1:
        layout["virtual_stages"] = max(1, ceil(layers / each) // pp)
    return layout


def _predicted(given: Given, says: Says, reader: Reader, layout: Layout) -> Prediction:
    """The prediction of a layout. What was said on the command line wins over what the file says."""
    batch, length, compute = says.get("global_batch"), says.get("seq_len"), says.get("compute")
    targets = says.get("target_len")
    text = ",".join(f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in layout.items())
    precision = given.precision or PRECISIONS.get(str(compute))
    asked = complete(
        replace(
            given,
            strategy=text,
            micro_batch=None,
            grad_accum=None,
            global_batch=given.global_batch or (batch if isinstance(batch, int) else None),
            seq_len=given.seq_len or (length if isinstance(length, int) else None),
            target_len=given.target_len or (targets if isinstance(targets, int) else None),
            precision=precision,
            framework=given.framework or _profile(reader, says, layout, precision),
            optimizer=given.optimizer or _word(says, "optimizer"),
            **_adapters(given, says),
        )
    )
    is_of_the_file = given.framework is None and given.precision is None
    return predicted(_with_formats(asked, reader, says) if is_of_the_file else asked)


def _profile(reader: Reader, says: Says, layout: Layout, precision: str | None) -> str:
    """Whose habits a file's run has: its framework's, or those of the engine that an ordinary loop hands its states to; DeepSpeed's ZeRO
    has its own by stage and by the format of weights."""
    if reader.profile not in LOOPS:
        return reader.profile
    engine = _word(says, "engine") or reader.profile
    if engine not in (ENGINE, AUTOCAST):
        return engine
    alone = layout.get("tp", 1) == layout.get("pp", 1) == 1
    return deepspeed_profile(engine, precision or "bf16", int(layout.get("zero", 0)), alone)


def _word(says: Says, name: str) -> str | None:
    found = says.get(name)
    return found if isinstance(found, str) else None


def _with_formats(asked: Asked, reader: Reader, says: Says) -> Asked:
    """The question with numbers at rest in the formats that the file says, gradients and what they are added up in, or all of them,
    with the kernels of whoever compiles, and with the file's ways to experts."""
    job = asked.question.job
    profile = job.profile
    if reader.says_gradients:
        named = {name: str(says[name]) for name in ("gradient", "reduce") if name in says}
        profile = with_gradients(profile, **named)
    if reader.keeping:
        profile = replace(profile, keeping=find_keeping(reader.keeping))
    if IN_BF16.items() <= says.items() and not job.adapters:
        profile = with_narrow_weights(profile, "bfloat16", str(says.get("reduce", "bfloat16")))
    if profile.reduce_bucket and "reduce_bucket" in says:
        profile = replace(profile, reduce_bucket=_reduce_bucket(says["reduce_bucket"], job))
    if says.get("update") == "one" and profile.update_kernels == "operations":
        profile = replace(profile, update_kernels="one", update_copies=0.0)
    state, copies = says.get("state_bytes"), says.get("update_bytes")
    if isinstance(state, int) and isinstance(copies, int):
        profile = with_states(profile, "adamw", state, copies)
    if says.get("compile") is True:
        profile = as_compiled(profile)
    if says.get("attention") == "flash":
        profile = with_habits(profile, attention="flash")
    merges = merges_copies(_word(says, "dispatcher") or "")
    fp8, overlaps = (says.get(name) is True for name in ("dispatches_fp8", "overlaps_experts"))
    profile = with_dispatcher(profile, merges=merges, fp8=fp8, overlaps=overlaps)
    return replace(asked, question=replace(asked.question, job=replace(job, profile=profile)))


def _reduce_bucket(said: Said, job: Job) -> int:
    """Gradients in DeepSpeed's buffers: what Trainer and Accelerate fill in for "auto" is the width of the model squared (Transformers 5.23.0,
    integrations/deepspeed.py, trainer_config_finalize; Accelerate 1.15.0, accelerator.py, _prepare_deepspeed)."""
    return said if isinstance(said, int) else job.model.hidden**2


def _adapters(given: Given, says: Says) -> dict[str, Any]:
    """What is trained, as the command line says it, or else as the file does."""
    if given.method is not None or says.get("method") in (None, "full"):
        return {}
    return {name: getattr(given, name) or says.get(name) for name in ("method", "lora_rank", "lora_targets")}


def _weighed(given: Given, says: Says, reader: Reader, layout: Layout) -> tuple[Prediction | None, tuple[Finding, ...]]:
    """The prediction of the layout, and what it adds to the faults. Degrees that do not fill the machines are a fault."""
    try:
        found = _predicted(given, says, reader, layout)
    except ImpossibleError as refusal:
        return None, (finding("illegal-layout", "layout", sentence=refusal.message, fix=refusal.hint or ""),)
    return found, (*_illegal(found), *_left_wide(found, says), *_too_large(given, says, reader, layout, found))


def _left_wide(found: Prediction, says: Says) -> Iterator[Finding]:
    """Experts that are counted in four bits, and that only some frameworks bring there."""
    if found.model.method == "qlora" and found.model.moe is not None and not says.get("packs_experts"):
        yield finding("experts-in-sixteen-bits", "method", model=found.model.name)


def _illegal(found: Prediction) -> Iterator[Finding]:
    for fault in found.violations:
        yield finding("illegal-layout", fault.rule, sentence=fault.sentence, fix=fault.hint)


def _too_large(given: Given, says: Says, reader: Reader, layout: Layout, found: Prediction) -> Iterator[Finding]:
    """What does not fit, by how much, the largest terms, and the smallest change that makes it fit."""
    if found.fits:
        return
    smaller = (change for change in _sets_of_changes(layout) if _fits(given, says, reader, {**layout, **change}))
    change = next(smaller, None)
    words = ", ".join(f"{name}={value}" for name, value in (change or {}).items())
    terms = sorted(found.memory.worst.terms, key=lambda term: -term.bytes)[:3]
    yield finding(
        "does-not-fit",
        "memory",
        peak=format_gib(found.memory.worst.device),
        usable=format_gib(found.memory.usable_bytes),
        shortfall=found.shortfall,
        terms=", ".join(f"{term.name} {format_gib(term.bytes)}" for term in terms),
        fix=f"It fits with {words}."
        if change
        else "No one or two changes fit: `strategist plan` looks for another layout.",
    )


def _sets_of_changes(layout: Layout) -> Iterator[Layout]:
    """One change, then two of different choices."""
    single = tuple(_changes(layout))
    yield from single
    yield from ({**one, **other} for one, other in combinations(single, 2) if not set(one) & set(other))


def _changes(layout: Layout) -> Iterator[Layout]:
    """Changes of one choice, the cheapest first: smaller micro-batches, recomputation, more sharding, offloading."""
    micro, accumulation = layout.get("micro_batch"), layout.get("accumulation")
    if isinstance(micro, int) and isinstance(accumulation, int):
        while micro % 2 == 0:
            micro, accumulation = micro // 2, accumulation * 2
            yield {"micro_batch": micro, "accumulation": accumulation}
    if layout.get("recompute", "none") == "none":
        yield {"recompute": "selective"}
    yield {"recompute": "full"}
    shards = layout.get("dp_shard", 1)
    if isinstance(shards, int) and shards > 1:
        yield from ({"zero": stage} for stage in range(1, 4) if stage > int(layout.get("zero", 0)))
        yield {"offload": "optimizer"}


def _fits(given: Given, says: Says, reader: Reader, layout: Layout) -> bool:
    try:
        found = _predicted(given, says, reader, layout)
    except ImpossibleError:
        return False
    return found.legal and found.fits
