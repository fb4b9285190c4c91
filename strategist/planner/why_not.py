"""Why nothing can be planned: the chain of reasons down to the user's own flags, and changes that were tried and work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from strategist.catalog import rows
from strategist.document.plan import Request
from strategist.errors import ImpossibleError, InternalError, NoPlanError
from strategist.facts.adapters import QUANTISED_BYTES, as_trained
from strategist.facts.hardware import NodeGroup
from strategist.facts.job import Job
from strategist.facts.network import uplink_Bps
from strategist.facts.parameters import count
from strategist.facts.profile import BYTES
from strategist.planner.contradiction import contradiction
from strategist.planner.fewer import nodes_in_words
from strategist.planner.recommend import without_frontend
from strategist.planner.search import Found, Question, legality, limits_of, search
from strategist.planner.situation import describe, question
from strategist.planner.weigh import host_bytes_per_device, shortfall
from strategist.records import replace
from strategist.rulebook.apply import Refused, fired, forbid, sentence
from strategist.rulebook.rule import Rule, load_families, load_rules
from strategist.rulebook.vocabulary import WORDS
from strategist.space.candidates import code
from strategist.space.enumerate import divisors
from strategist.space.grammar import Pin, layout
from strategist.units import format_count, format_gib

MAX_FIXES = 4
NEXT_SIZE = 0.9
"""What part of a model that does not fit the next one to be tried has at most."""
MOST_TRIED = 2**23
"""Layouts among which changes are looked for: when the spaces of those that were tried hold so many, no further change is tried."""
Explained = ImpossibleError


def explain_failure(found: Found, request: Request) -> Explained:
    """The error for a search that found nothing."""
    if not found.enumerated:
        return _nothing_enumerated(found.question)
    if found.unsaid is not None and not len(found.legal):
        return _nothing_sayable(found, request)
    if not len(found.legal):
        return _nothing_legal(found)
    return _nothing_fits(found, request)


def _nothing_enumerated(asked: Question) -> Explained:
    """Pins and forbidden techniques leave no way to use all ranks."""
    limits = limits_of(asked)
    for pin in asked.pins:
        if pin.key in ("tp", "pp", "cp", "dp", "dp_shard", "dp_replicate") and limits.world % pin.value:
            return _indivisible(pin, limits.world, "devices")
        if pin.key == "ep" and limits.experts % pin.value:
            return _indivisible(pin, limits.experts, "experts")
        if pin.key == "cp_inner" and limits.world % pin.value:
            return _indivisible(pin, limits.world, "devices")
    return contradiction(limits)


def _indivisible(pin: Pin, total: int, noun: str) -> ImpossibleError:
    return ImpossibleError(
        "DIVISIBILITY",
        f"{pin.key}={pin.word} does not divide the {total} {noun}.",
        flag="--pin",
        value=f"{pin.key}={pin.word}",
        hint=f"Sizes that divide them: {', '.join(str(d) for d in divisors(total))}.",
    )


def _nothing_legal(found: Found) -> Explained:
    """Every candidate was refused: by a rule about the question, which no layout gets round; else, of the rules that speak of a
    pinned choice, or of all, the one that refused the plainest layout, which is enumerated first, speaks."""
    pinned = {pin.key for pin in found.question.pins}

    def weight(refused: Refused) -> tuple[bool, bool, int]:
        words = set(refused.rule.words)
        asks = all(WORDS[word].scope == "situation" for word in words)
        return asks, bool(pinned & words), -refused.example

    worst = max(found.refused, key=weight)
    example = found.enumerated_candidates.row(worst.example)
    values: dict[str, Any] = question(found.question.job) | example
    values["dp"] = int(example["dp_replicate"]) * int(example["dp_shard"])
    text = sentence(worst.rule.because, values)
    flag = _flag_of(worst.rule, found.question)
    return ImpossibleError(
        worst.rule.code,
        text,
        flag=flag,
        value=_value_of(flag, found.question.job, example),
        hint=f"{sentence(worst.rule.hint, values)}{_nearest(worst.rule.code, values)} [{worst.rule.id}, `strategist rule {worst.rule.id}`]",
    )


FLAGS: Mapping[str, str] = {
    "has_precision": "--precision",
    "precision": "--precision",
    "optimizer": "--optimizer",
    "buildable": "--model",
    "positions": "--seq-len",
    "target_positions": "--target-len",
}
"""Words of the question -> the flag that says them. A rule about no layout speaks of one of these."""


def _flag_of(rule: Rule, asked: Question) -> str:
    said = next((flag for word, flag in FLAGS.items() if word in rule.words), None)
    if said is not None:
        return said
    return "--global-batch" if rule.code == "BATCH_SPLIT" else "--pin" if asked.pins else "--hardware"


def _value_of(flag: str, job: Job, example: dict[str, Any]) -> str:
    """What was said with the flag; the refused layout where no single flag is to blame."""
    work = job.workload
    said = {"--precision": work.precision, "--optimizer": work.optimizer, "--model": job.model.name}
    lengths = {"--seq-len": work.seq_len, "--target-len": work.targets}
    return str((said | lengths).get(flag, layout(example)))


def _nearest(code: str, values: dict[str, Any]) -> str:
    """The nearest legal value where one can be named."""
    if code == "DIVISIBILITY" and values["cp"] > 1 and values["seq_len"] % (2 * values["cp"]):
        unit = 2 * values["cp"]
        return f" The nearest sequence length is {max(unit, round(values['seq_len'] / unit) * unit)}."
    if code == "BATCH_SPLIT":
        dp, batch = values["dp"], values["global_batch"]
        near = sorted({max(dp, batch // dp * dp), (batch // dp + 1) * dp})
        return f" Near batches that divide: {', '.join(str(size) for size in near)}."
    return ""


def _nothing_fits(found: Found, request: Request) -> NoPlanError:
    job = found.question.job
    (leanest,) = found.weights.leanest(np.arange(len(found.legal)))
    size, usable = int(found.weights.device[leanest]), job.usable_bytes
    fixes = tuple(islice(_that_fit(_changes(found.question, request)), MAX_FIXES))
    host = int(found.weights.host[leanest])
    over = f"misses by {format_gib(size - usable)}" if size > usable else f"does not fit: {shortfall(job, size, host)}"
    return NoPlanError(
        f"No plan fits: the leanest of {len(found.legal)} legal layouts, {layout(found.legal.row(leanest))}, needs {format_gib(size)} of {format_gib(usable)} usable and {over}.",
        chain=(
            *_chain(job, size, host),
            *_unsaid_links(found),
            *_preferred(found.question),
        ),
        fixes=fixes,
        flag="--hardware",
        hint=fixes[0] if fixes else "Use more or larger devices, or a smaller model.",
    )


def _nothing_sayable(found: Found, request: Request) -> Explained:
    """Rules allow layouts, and the front end can say none of them: the one of which it can say the most speaks."""
    frontend, job = found.question.frontend, found.question.job
    if frontend is None or found.unsaid is None:
        raise InternalError("INTERNAL", "No front end was asked for, and one refused.", hint="Please report this.")
    keep, _ = forbid(legality(found.question), question(job), found.enumerated_candidates)
    allowed = found.enumerated_candidates.where(keep)
    row = frontend.nearest(job, allowed)
    fixes = tuple(_that_fit(_unbound(found.question)))
    return NoPlanError(
        f"No plan for {frontend.name}: of the {found.unsaid.layouts} layouts that no rule forbids it can say none.",
        chain=(
            f"because the nearest that {frontend.name} could say is {layout(allowed.row(row))} (--frontend {frontend.name})",
            *(f"and {sentence_}" for sentence_ in frontend.obstacles(job, allowed, row)),
            "so no layout is left to choose from",
        ),
        fixes=fixes,
        flag="--frontend",
        value=frontend.name,
        hint=fixes[0] if fixes else "Name another front end, or leave --frontend out.",
    )


def _unsaid_links(found: Found) -> tuple[str, ...]:
    """What the front end could not say, where some of it might have fitted."""
    frontend, unsaid = found.question.frontend, found.unsaid
    if frontend is None or unsaid is None:
        return ()
    return (
        f"and {frontend.name} cannot say {unsaid.layouts} further layouts that no rule forbids (--frontend {frontend.name})",
    )


def _chain(job: Job, leanest: int, host: int) -> tuple[str, ...]:
    """because ... and ... so: each link ends in the flag that causes it."""
    gpu, work = job.cluster.smallest, job.workload
    total, per_parameter = count(job.model).total, _bytes_per_parameter(job)
    whole = total * per_parameter
    what = "full training" if job.model.adapters is None else f"{job.model.method} of rank {job.model.adapters.rank}"
    chain = [
        f"because {what} with {work.optimizer} in {work.precision} keeps {per_parameter:g} bytes per parameter (--optimizer {work.optimizer}, --precision {work.precision})",
        f"and {format_count(total)} parameters x {per_parameter:g} = {format_gib(whole)}; the best case is an even split over {_devices(job)} = {format_gib(whole / job.cluster.world)} each (--model)",
        f"and one {gpu.title} has {format_gib(gpu.memory_bytes)}, of which {format_gib(job.usable_bytes)} may be used (--gpu, --headroom {job.headroom:g})",
        f"so even the leanest layout needs {format_gib(leanest)} with {work.seq_len} tokens per sequence (--seq-len {work.seq_len})",
    ]
    if host:
        room = max(0, host_bytes_per_device(job) - job.cluster.shares_host * leanest)
        chain.append(
            f"and what leaves the devices would take {format_gib(host)} of host memory per device where {format_gib(room)} are free for it"
        )
    return tuple(chain)


def _bytes_per_parameter(job: Job) -> float:
    """Bytes of weight, gradient and optimizer state, spread over all parameters where only some are trained."""
    resting = QUANTISED_BYTES if job.model.method == "qlora" else BYTES[job.formats.parameter]
    return resting + job.trainable * (BYTES[job.formats.gradient] + job.state_bytes)


def _devices(job: Job) -> str:
    return "1 device" if job.cluster.world == 1 else f"{job.cluster.world} devices"


def _preferred(asked: Question) -> Iterator[str]:
    """What the decision tables would have chosen, so that their answer is known even where it does not fit."""
    situation = describe(asked.job, "recompute" not in asked.forbids)
    titles = {family.name: family.title for family in load_families()}
    for rule in fired(load_rules("hf_decisions", asked.rule_folders), situation):
        wanted = ", then ".join(" or ".join(titles[name] for name in tier) for tier in rule.families)
        yield f"and what the decision tables prefer here, {wanted}, does not fit either [{rule.id}]"


Change = tuple[str, Question]
"""What is said differently, and the question with it."""


def _that_fit(groups: Iterable[Iterable[Change]]) -> Iterator[str]:
    """Cheapest changes first; each is searched again and only printed when it really fits."""
    tried = 0
    for group in groups:
        for words, changed in group:
            if tried > MOST_TRIED:
                return
            found = search(changed, bests=True)
            tried += found.enumerated
            row = found.best_of()
            if row is not None:
                yield _fits(words, found, row)
                break


def _fits(words: str, found: Found, row: int) -> str:
    """A change with the layout that fits under it."""
    size, usable = int(found.device_bytes[row]), found.question.job.usable_bytes
    return f"{words}    fits: {format_gib(size)} of {format_gib(usable)} with {layout(found.candidates.row(row))}"


def _changes(asked: Question, request: Request) -> Iterator[Iterable[Change]]:
    """Groups of changes, each in order; of every group the first that helps is enough."""
    job = asked.job
    yield from _unbound(asked)
    yield _one_sequence_at_a_time(asked)
    yield _loss_in_chunks(asked)
    if job.workload.global_batch % job.cluster.world:
        batch = (job.workload.global_batch // job.cluster.world + 1) * job.cluster.world
        yield [(f"--global-batch {batch}", _with(asked, workload=replace(job.workload, global_batch=batch)))]
    if job.workload.precision in ("fp32", "tf32"):
        yield [("--precision bf16", _with(asked, workload=replace(job.workload, precision="bf16")))]
    if job.workload.optimizer == "adamw":
        yield [("--optimizer adamw8bit", _with(asked, workload=replace(job.workload, optimizer="adamw8bit")))]
    shorter = job.workload.seq_len // 2
    if shorter >= 256:
        yield [(f"--seq-len {shorter}", _with(asked, workload=replace(job.workload, seq_len=shorter)))]
    yield _more_machines(asked, request)
    yield _smaller_models(asked)


def _unbound(asked: Question) -> Iterator[Iterable[Change]]:
    """The question without what was asked of the layout."""
    if asked.frontend is not None:
        yield [(f"without --frontend {asked.frontend.name}", without_frontend(asked))]
    if asked.pins or asked.forbids:
        fixed = [*(f"{pin.key}={pin.word}" for pin in asked.pins), *(f"--forbid {word}" for word in asked.forbids)]
        yield [(f"without {', '.join(fixed)}", replace(asked, pins=(), forbids=()))]


def _one_sequence_at_a_time(asked: Question) -> Iterator[Change]:
    """The batch that a pinned accumulation makes with one sequence for each device, where the asked one leaves them more at once."""
    work, world = asked.job.workload, asked.job.cluster.world
    batch = next((pin.value * world for pin in asked.pins if pin.key == "accumulation"), work.global_batch)
    if batch < work.global_batch:
        yield f"--global-batch {batch}", _with(asked, workload=replace(work, global_batch=batch))


def _loss_in_chunks(asked: Question) -> Iterator[Change]:
    """The same training with the logits of a few tokens at a time, where our own executor is what is planned for."""
    pinned = [f"{pin.key}={pin.word}" for pin in asked.pins]
    if asked.job.profile.name == "strategist" and all(pin.key != "loss" for pin in asked.pins):
        chunked = Pin("loss", code("loss", "chunked"), "chunked")
        yield f"--pin {','.join([*pinned, 'loss=chunked'])}", replace(asked, pins=(*asked.pins, chunked))


def _with(asked: Question, **changes: Any) -> Question:
    return replace(asked, job=replace(asked.job, **changes))


def _more_machines(asked: Question, request: Request) -> Iterator[Change]:
    """Twice, four times ... the nodes, up to 64 times, with what was pinned; none where nothing is known that joins them."""
    cluster = asked.job.cluster
    group = cluster.groups[0]
    if len(cluster.groups) != 1 or cluster.links or not uplink_Bps(group.node):
        return
    for factor in (2, 4, 8, 16, 32, 64):
        bigger = replace(cluster, groups=(NodeGroup(node=group.node, count=group.count * factor, name=group.name),))
        changed = _with(asked, cluster=bigger)
        if _could_fit(changed.job):
            nodes, batch = group.count * factor, asked.job.workload.global_batch
            words = nodes_in_words(cluster, request, nodes, batch=batch) or f"{nodes} nodes in a file for --hardware"
            yield f"{factor}x the nodes ({words})", changed


def _could_fit(job: Job, beside: float = 0.0) -> bool:
    """Model states split evenly leave room, some of them `beside` the devices, in bytes for each: worth a search."""
    return count(job.model).total * _bytes_per_parameter(job) / job.cluster.world < 0.6 * job.usable_bytes + beside


def _beside(asked: Question) -> float:
    """Bytes of states that may lie outside a device: in host memory, and where there are drives three times that on them, because what the
    host keeps of a weight is a quarter of it."""
    if "offload" in asked.forbids or asked.job.cluster.shares_host:
        return 0.0
    on_drives = asked.job.cluster.without_drive is None
    return float(host_bytes_per_device(asked.job)) * (4 if on_drives else 1)


def _smaller_models(asked: Question) -> Iterator[Change]:
    """The nicknamed sizes below the asked one, largest first, with what was pinned; none that is within a tenth of the one before, which did
    not fit."""
    from strategist.facts.sizes import shape_for_size, with_positions

    total, seq_len, beside = count(asked.job.model).total, asked.job.workload.seq_len, _beside(asked)
    sized = [
        (with_positions(shape_for_size(row["size"], "--model-size").shape, seq_len), row["size"])
        for row in rows("size_names")
    ]
    for shape, name in sorted(sized, key=lambda pair: -count(pair[0]).total):
        if count(shape).total > NEXT_SIZE * total:
            continue
        changed = _with(asked, model=replace(shape, adapters=asked.job.model.adapters))
        changed = replace(changed, job=as_trained(changed.job))
        if _could_fit(changed.job, beside):
            total = count(shape).total
            yield f"--model-size {name}", changed
