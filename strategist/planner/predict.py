"""One given layout instead of a search: filled up to a whole candidate, judged by the rules, weighed and timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from strategist import __version__
from strategist.document.estimate import MemoryLedger
from strategist.document.plan import Hint, Plan, Strategy
from strategist.document.prediction import Prediction, Violation
from strategist.errors import ImpossibleError
from strategist.facts.adapters import as_trained
from strategist.facts.job import Job
from strategist.facts.model import layer_counts
from strategist.facts.profile import find_profile, with_gradients
from strategist.facts.resolved import Assumption
from strategist.facts.runs import OF_CHUNKS, V_SHAPED
from strategist.planner.check import share_faults
from strategist.planner.depth import with_depths
from strategist.planner.search import FRONTEND, Frontend
from strategist.planner.situation import one, question
from strategist.planner.weigh import lacking
from strategist.planner.write import (
    memory_ledger,
    mesh_of,
    near_the_limit,
    outside_known_errors,
    strategy_of,
    time_ledger,
)
from strategist.records import replace
from strategist.rulebook.apply import columns, sentence
from strategist.rulebook.rule import Rule, load_rules
from strategist.space.candidates import ASKED, BY_STAGE, LAYERS_OF, OF_LAYERS, OF_STAGE, WORDS, Candidates, code
from strategist.space.engines import own_job
from strategist.space.enumerate import divisors
from strategist.space.grammar import Pin, layout
from strategist.timing.estimate import StepTimes, step_times
from strategist.timing.rates import require_rate


def predict(
    job: Job,
    pins: tuple[Pin, ...],
    assumptions: tuple[Assumption, ...] = (),
    hints: tuple[Hint, ...] = (),
    rule_folders: tuple[str, ...] = (),
    frontend: Frontend | None = None,
) -> Prediction:
    """The ledgers of one layout, the rules that it breaks, what the front end cannot say of it, and whether it fits.

    Choices that the pins leave open are plain, data parallelism fills the machines, accumulation the batch. Raises
    ImpossibleError DIVISIBILITY when the degrees do not multiply to the devices, BATCH_SPLIT when the micro-batch does
    not divide the batch, HARDWARE_FEATURE when a device has no rate in the number format asked for, or a
    node no drive for what is offloaded to one.
    """
    require_rate(job)
    candidate = with_depths(job, one(**filled(job, {pin.key: pin.value for pin in pins})))
    _has_drives(job, candidate)
    asked, job = job, own_job(job, candidate)
    violations = (
        *broken(job, candidate, load_rules("legality", rule_folders)),
        *(() if frontend is None else _unsaid(frontend, asked, candidate)),
    )
    return _prediction(
        job,
        strategy_of(job, candidate.row(0)),
        Cost(candidate, step_times(job, candidate), memory_ledger(job, candidate), lacking(job, candidate)),
        violations,
        assumptions=assumptions,
        hints=hints,
    )


def _has_drives(job: Job, candidate: Candidates) -> None:
    """Raises ImpossibleError HARDWARE_FEATURE where state rests on drives and the rate of some node's is not known."""
    bare = job.cluster.without_drive
    if bare is not None and bool(candidate.is_word("offload", "nvme")[0]):
        raise ImpossibleError(
            "HARDWARE_FEATURE",
            f"offload=nvme needs a drive in every node, and none of {bare.name} is known.",
            flag="--hardware",
            value=bare.name,
            hint="Name a node type that has drives (`strategist catalog nodes`), or use offload=parameters.",
        )


class Cost(NamedTuple):
    """What one layout, the only row of `candidate`, takes."""

    candidate: Candidates
    times: StepTimes
    memory: MemoryLedger
    shortfall: str


def _prediction(
    job: Job,
    strategy: Strategy,
    cost: Cost,
    violations: tuple[Violation, ...],
    *,
    assumptions: tuple[Assumption, ...],
    hints: tuple[Hint, ...] = (),
) -> Prediction:
    row, memory = cost.candidate.row(0), cost.memory
    return Prediction(
        made_by=f"strategist {__version__}",
        cluster=job.cluster,
        model=job.model,
        workload=job.workload,
        framework=job.profile.name,
        assumptions=assumptions,
        layout=_words(row, strategy),
        mesh=mesh_of(row),
        strategy=strategy,
        legal=not violations,
        violations=violations,
        fits=not cost.shortfall,
        shortfall=cost.shortfall,
        over_bytes=max(0, memory.worst.device - memory.usable_bytes),
        memory=memory,
        time=time_ledger(job, cost.times, 0),
        hints=(*hints, *near_the_limit(job, memory, fits=not cost.shortfall), *outside_known_errors(job)),
    )


def _unsaid(frontend: Frontend, job: Job, candidate: Candidates) -> Iterator[Violation]:
    """What a front end cannot say of one candidate."""
    for sentence_ in frontend.obstacles(job, candidate, 0):
        yield Violation(
            rule=FRONTEND,
            code="UNSUPPORTED",
            sentence=sentence_,
            hint=f"Leave --frontend {frontend.name} out, or change the layout.",
            source=f"strategist emit --list: {frontend.name}",
        )


def predict_plan(plan: Plan) -> Prediction:
    """The layout of a Plan, priced again by this strategist. Raises InputError CHOICE for a profile nobody knows, ImpossibleError
    BATCH_SPLIT for an uneven batch that is none of the plan's machines."""
    if plan.strategy.uneven_batch:
        return _predict_uneven(plan)
    return predict(job_of(plan), tuple(pins_of(plan)), plan.assumptions)


def _predict_uneven(plan: Plan) -> Prediction:
    """The step of the kind of nodes that is last, and the ledger of the one with the least room."""
    from strategist.planner.uneven import priced  # few plans have one

    wrong = " ".join(share_faults(plan))
    if wrong:
        raise ImpossibleError(
            "BATCH_SPLIT", wrong, flag="$.strategy.uneven_batch", hint="Correct the shares, or plan again."
        )
    job, shares = job_of(plan), plan.strategy.uneven_batch
    said = {pin.key: pin.value for pin in pins_of(plan) if pin.value or pin.key not in ASKED}
    candidate = one(**said, uneven_batch=1)
    split = priced(job, candidate, [share.micro_batches for share in shares])
    return _prediction(
        job,
        replace(strategy_of(job, split.candidate.row(0)), uneven_batch=split.shares),
        Cost(split.candidate, split.times, memory_ledger(*split.tightest), lacking(*split.tightest)),
        tuple(broken(job, split.candidate, load_rules("legality"))),
        assumptions=plan.assumptions,
    )


def job_of(plan: Plan) -> Job:
    """The job that a Plan answers. Raises InputError CHOICE for a profile nobody knows."""
    formats = plan.strategy.formats
    gradients = {"gradient": formats.gradient, "reduce": formats.reduce}
    job = Job(
        cluster=plan.cluster,
        model=plan.model,
        workload=plan.workload,
        profile=with_gradients(find_profile(plan.strategy.profile), **gradients),
        headroom=plan.request.headroom,
        frontend=plan.request.frontend,
        factors=plan.factors,
        near=plan.near,
    )
    return as_trained(job)


def layout_of(plan: Plan) -> str:
    """The layout of a Plan in the grammar of --pin."""
    return _words({pin.key: pin.word if pin.key in WORDS else pin.value for pin in pins_of(plan)}, plan.strategy)


def _words(row: Mapping[str, int | str], strategy: Strategy) -> str:
    """A layout in the grammar; an uneven batch has the micro-batches of each kind of nodes for accumulation."""
    if not strategy.uneven_batch:
        return layout(row)
    from strategist.planner.uneven import uneven_words

    return uneven_words(row, strategy.uneven_batch)


def pins_of(plan: Plan) -> Iterator[Pin]:
    """Every choice of a Plan as it would be written by hand."""
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp"):
        yield Pin(axis, plan.mesh.size(axis), str(plan.mesh.size(axis)))
    s = plan.strategy
    for name in ("zero", "virtual_stages", "micro_batch", "accumulation", "sequence_parallel", "tiling"):
        yield Pin(name, int(getattr(s, name)), str(getattr(s, name)))
    for name in WORDS:
        word = getattr(s, name)
        yield Pin(name, code(name, word), word)
    for name in OF_LAYERS:
        if name not in WORDS and (number := getattr(s, name)):
            yield Pin(name, number, str(number))
    if s.cp_inner > 1:
        yield Pin("cp_inner", s.cp_inner, str(s.cp_inner))
    for stage, number in enumerate(s.recompute_stages):
        yield Pin(f"{OF_STAGE}{stage}", number, str(number))
    if s.stage_split == "balanced":
        for place, own in enumerate(s.stages):
            yield Pin(f"{LAYERS_OF}{place}", own.layer_count, str(own.layer_count))


OURS = ("loss", "tables")
"""Choices whose other word is known of our own executor alone."""


def filled(job: Job, said: Mapping[str, int]) -> dict[str, int]:
    """The columns of a candidate: what is said, and what follows from it. Raises as `predict`."""
    degrees = {axis: said.get(axis, 1) for axis in ("pp", "cp", "tp", "ep", "etp")}
    rest = degrees["pp"] * degrees["cp"] * degrees["tp"]
    dp = _data_parallel(job.cluster.world, rest, said)
    _consistent(degrees, dp * degrees["cp"] * degrees["tp"], said)
    ours = [f"{name}={WORDS[name][said[name]]}" for name in OURS if said.get(name)]
    if ours and job.profile.name != "strategist":
        raise ImpossibleError(
            "UNSUPPORTED",
            f"{ours[0]} is known of strategist's own executor; what {job.profile.title} does with it is not.",
            flag="--strategy",
            value=ours[0],
            hint=f"Leave out {ours[0]} or the framework.",
        )
    replicate, shard = _split(dp, said)
    zero = said.get("zero", 3 if said.get("dp_shard", 1) > 1 else 0)
    is_v_shaped = WORDS["schedule"][said.get("schedule", 0)] in V_SHAPED
    virtual = said.get("virtual_stages", 2 if is_v_shaped else 1)
    usual = "none" if degrees["pp"] == 1 else "interleaved" if virtual > 1 else "1f1b"
    kind = "none" if degrees["cp"] == 1 else "hierarchical" if "cp_inner" in said else "ring"
    _stated_split(job, degrees["pp"], said)
    micro, accumulation = _batch(job.workload.global_batch, dp, said)
    return (
        degrees
        | {
            "dp_replicate": replicate,
            "dp_shard": shard,
            "zero": zero,
            "virtual_stages": virtual,
            "schedule": said.get("schedule", code("schedule", usual)),
            "micro_batch": micro,
            "accumulation": accumulation,
            "sequence_parallel": said.get("sequence_parallel", 0),
            "context_parallel": said.get("context_parallel", code("context_parallel", kind)),
            "recompute": said.get("recompute", code("recompute", "full") if any(map(said.get, OF_LAYERS)) else 0),
            "offload": said.get("offload", 0),
            "tiling": said.get("tiling", 1),
            "stage_split": said.get("stage_split", 0),
        }
        | {name: said[name] for name in (*ASKED, "cp_inner") if said.get(name)}
        | {name: said[name] for name in said if name.startswith(BY_STAGE)}
    )


def _data_parallel(world: int, rest: int, said: Mapping[str, int]) -> int:
    """Ranks left for data, which the said degrees must match."""
    named = [said[key] for key in ("dp", "dp_replicate", "dp_shard") if key in said]
    both = "dp_replicate" in said and "dp_shard" in said
    stated = said["dp_replicate"] * said["dp_shard"] if both else said.get("dp")
    if world % rest or (stated is not None and stated * rest != world) or any(world // rest % n for n in named):
        raise ImpossibleError(
            "DIVISIBILITY",
            f"pp x cp x tp = {rest}{'' if stated is None else f' x dp {stated}'} does not make {world} devices.",
            flag="--strategy",
            hint=f"The product of dp, cp, tp and pp must be {world}; dp may be left out.",
        )
    return world // rest


def _consistent(degrees: Mapping[str, int], ranks: int, said: Mapping[str, int]) -> None:
    """Choices that mean nothing together have no price. `ranks` are those of one stage."""
    _consistent_pipeline(degrees["pp"], said)
    _consistent_context(degrees["cp"], said)
    _consistent_replicas(ranks, said)
    if said.get("loss") and any(degrees[axis] > 1 for axis in ASKED["loss"]):
        raise ImpossibleError(
            "FRAMEWORK_LEGALITY",
            "loss=chunked needs the whole head on every rank, which tp and pp spread.",
            flag="--strategy",
            hint="Leave out tp and pp, or loss=chunked.",
        )
    for name in OF_LAYERS:
        if said.get(name) and WORDS["recompute"][said.get("recompute", 2)] != "full":
            raise ImpossibleError(
                "FRAMEWORK_LEGALITY",
                f"{name}={said[name]} says of which layers full recompute runs forward again.",
                flag="--strategy",
                hint=f"Say recompute=full, or leave {name} out.",
            )
    _stated_by_stage(degrees["pp"], said)
    if ranks % (degrees["ep"] * degrees["etp"]):
        raise ImpossibleError(
            "DIVISIBILITY",
            f"ep x etp = {degrees['ep'] * degrees['etp']} does not divide the {ranks} ranks of a stage.",
            flag="--strategy",
            hint="Choose ep x etp so that it divides dp x cp x tp.",
        )


def _consistent_pipeline(pp: int, said: Mapping[str, int]) -> None:
    """Chunks, and stages that own different layers, are those of a pipeline."""
    if said.get("virtual_stages", 1) > 1 and pp == 1:
        raise ImpossibleError(
            "FRAMEWORK_LEGALITY",
            f"virtual_stages={said['virtual_stages']} needs a pipeline.",
            flag="--strategy",
            hint="Give pp as well.",
        )
    schedule = WORDS["schedule"][said.get("schedule", 0)]
    if schedule in V_SHAPED and (pp == 1 or said.get("virtual_stages", 2) != 2):
        raise ImpossibleError(
            "FRAMEWORK_LEGALITY",
            f"schedule={schedule} needs a pipeline whose stages have two chunks of layers each.",
            flag="--strategy",
            hint="Give pp, and leave out virtual_stages.",
        )
    _consistent_chunks(pp, schedule, said)
    if said.get("stage_split") and (pp == 1 or said.get("virtual_stages", 1) > 1):
        raise ImpossibleError(
            "FRAMEWORK_LEGALITY",
            f"stage_split={WORDS['stage_split'][said['stage_split']]} needs a pipeline whose stages have one chunk of layers each.",
            flag="--strategy",
            hint="Give pp, and leave virtual_stages at 1.",
        )


def _consistent_chunks(pp: int, schedule: str, said: Mapping[str, int]) -> None:
    """A pipeline has a schedule, and that of whole stages or that of chunks as it has one chunk or several. Said of no pipeline, a schedule
    changes nothing."""
    if pp == 1 or "schedule" not in said or schedule in V_SHAPED:
        return
    virtual = said.get("virtual_stages", 1)
    if schedule == "none":
        wrong, hint = f"pp={pp} needs a schedule.", "Leave schedule out, or say 1f1b."
    elif (schedule in OF_CHUNKS) != (virtual > 1):
        needs = "several chunks" if schedule in OF_CHUNKS else "one chunk"
        wrong = f"schedule={schedule} runs stages of {needs} of layers each, and virtual_stages is {virtual}."
        hint = "Say virtual_stages=2 or more." if virtual == 1 else "Leave schedule out, or virtual_stages."
    else:
        return
    raise ImpossibleError("FRAMEWORK_LEGALITY", wrong, flag="--strategy", value=schedule, hint=hint)


def _consistent_replicas(ranks: int, said: Mapping[str, int]) -> None:
    """What is of whole replicas alone goes with no other axis. `ranks` are those of one stage."""
    of_replicas = {
        "replicas": "nn.DataParallel",
        "compression": "a hook of DDP",
        "tables": "a parameter server beside DDP",
    }
    for name, what in of_replicas.items():
        if said.get(name) and (ranks == 1 or any(said.get(axis, 1) > 1 for axis in ASKED[name])):
            choice = f"{name}={WORDS[name][said[name]]}"
            raise ImpossibleError(
                "FRAMEWORK_LEGALITY",
                f"{choice} is {what}: whole replicas over several devices, and nothing else.",
                flag="--strategy",
                hint=f"Leave out dp_shard, cp, tp, pp, ep and etp, or {choice}.",
            )


def _consistent_context(cp: int, said: Mapping[str, int]) -> None:
    """Hierarchical context parallelism, and no other kind, is told among how many neighbours along cp heads are exchanged."""
    hierarchical, inner = code("context_parallel", "hierarchical"), said.get("cp_inner")
    kind = said.get("context_parallel", 0 if inner is None else hierarchical)
    word = WORDS["context_parallel"][kind]
    if kind != hierarchical and inner is not None:
        raise ImpossibleError(
            "FRAMEWORK_LEGALITY",
            f"cp_inner={inner} says among how many neighbours hierarchical context parallelism exchanges heads; context_parallel={word} has none.",
            flag="--strategy",
            value=inner,
            hint="Say context_parallel=hierarchical, or leave cp_inner out.",
        )
    if "context_parallel" in said and kind != hierarchical and (cp > 1) != (word != "none"):
        raise ImpossibleError(
            "FRAMEWORK_LEGALITY",
            f"context_parallel={word} does not go with cp={cp}: sequences that cp cuts need a kind of context parallelism, and whole ones have none.",
            flag="--strategy",
            value=word,
            hint="Leave context_parallel out, or say cp=2 or more."
            if cp == 1
            else "Leave context_parallel out, or say ring or all-to-all.",
        )
    sizes = [str(size) for size in divisors(cp) if 1 < size < cp]
    if kind == hierarchical and str(inner) not in sizes:
        raise ImpossibleError(
            "FRAMEWORK_LEGALITY",
            f"context_parallel=hierarchical exchanges heads among cp_inner neighbours, a part of cp={cp}; cp_inner={inner or 'nothing'} is none.",
            flag="--strategy",
            value=inner,
            hint=f"Say cp_inner={' or '.join(sizes)}." if sizes else "Say context_parallel=ring or all-to-all.",
        )


def _stated_by_stage(pp: int, said: Mapping[str, int]) -> None:
    """Numbers of layers by stage are those of a pipeline: left to the rule, or one for each of its stages."""
    stated = sorted(int(name.removeprefix(OF_STAGE)) for name in said if name.startswith(OF_STAGE))
    by_stage = bool(said.get("recompute_depth"))
    if (by_stage and (pp == 1 or stated not in ([], [*range(pp)]))) or (stated and not by_stage):
        raise ImpossibleError(
            "FRAMEWORK_LEGALITY",
            f"{len(stated) or 'No'} numbers of layers by stage (recompute=by-stage) do not go with pp={pp}.",
            flag="--strategy",
            hint="Say pp above 1 and recompute=by-stage, or as many numbers as there are stages, such as pp=2,recompute=3/1.",
        )


def _stated_split(job: Job, pp: int, said: Mapping[str, int]) -> None:
    """Balanced stages run different layers again. Both numbers are left to the rule, which knows layers that are all alike, or both are said
    of every stage."""
    stated = {int(name.removeprefix(LAYERS_OF)): said[name] for name in said if name.startswith(LAYERS_OF)}
    again = {int(name.removeprefix(OF_STAGE)): said[name] for name in said if name.startswith(OF_STAGE)}
    counts = layer_counts(job.model)
    is_balanced = said.get("stage_split") == code("stage_split", "balanced")
    is_whole = sorted(stated) == list(range(pp)) and sum(stated.values()) == sum(counts.values())
    is_owned = is_whole and sorted(again) == sorted(stated) and all(again[stage] <= stated[stage] for stage in stated)
    is_ruled = not stated and not again and len(counts) == 1
    if (is_balanced and not (said.get("recompute_depth") and (is_owned or is_ruled))) or (stated and not is_balanced):
        raise ImpossibleError(
            "FRAMEWORK_LEGALITY",
            f"Balanced stages are found together with the layers that each runs again, of a model whose layers are alike, or both are said: {sum(counts.values())} layers on pp={pp} stages, of each no more again than it owns.",
            flag="--strategy",
            hint="Say stage_split=balanced,recompute=by-stage, or both numbers of every stage, such as pp=2,stage_split=15/17,recompute=3/1.",
        )


def _split(dp: int, said: Mapping[str, int]) -> tuple[int, int]:
    """(dp_replicate, dp_shard): as said; else ZeRO decides."""
    if "dp_replicate" in said:
        return said["dp_replicate"], dp // said["dp_replicate"]
    if "dp_shard" in said:
        return dp // said["dp_shard"], said["dp_shard"]
    return (dp, 1) if said.get("zero", 0) == 0 else (1, dp)


def _batch(batch: int, dp: int, said: Mapping[str, int]) -> tuple[int, int]:
    """(micro_batch, accumulation) whose product with dp is the batch."""
    accumulation = said.get("accumulation")
    micro = said.get("micro_batch", 1 if accumulation is None else batch // (dp * accumulation))
    rounds = accumulation if accumulation is not None else batch // (dp * max(1, micro))
    if micro * rounds * dp != batch:
        raise ImpossibleError(
            "BATCH_SPLIT",
            f"micro-batch {micro} x accumulation {rounds} x dp {dp} = {micro * rounds * dp} is not the global batch {batch}.",
            flag="--strategy",
            hint=f"Choose a global batch that is a multiple of {micro * dp}, or another micro-batch.",
        )
    return micro, rounds


def broken(job: Job, candidate: Candidates, rules: tuple[Rule, ...]) -> Iterator[Violation]:
    """Every rule of legality that a lone candidate breaks, in the order of the book."""
    facts: dict[str, Any] = question(job)
    values = facts | columns(candidate)
    shown = facts | candidate.row(0) | {"dp": int(candidate.data_parallel[0])}
    for rule in rules:
        if bool(np.all(rule.holds(values))):
            yield Violation(
                rule=rule.id,
                code=rule.code,
                sentence=sentence(rule.because, shown),
                hint=sentence(rule.hint, shown),
                source=rule.source,
            )
