"""The last gate: invariants of a finished Plan. A plan that breaks one never leaves the planner or enters the executor."""

from __future__ import annotations

from collections.abc import Iterator

from strategist.document.estimate import MEMORY_TERMS, TIME_TERMS
from strategist.document.plan import MESH_AXES, Plan, sequences_per_step
from strategist.errors import ImpossibleError, shown
from strategist.facts.closed_formulas import FACTS_OF
from strategist.facts.convolutions import MAX_SIDE
from strategist.facts.model import layer_sequence
from strategist.facts.runs import stage_of_head


def faults(plan: Plan) -> tuple[str, ...]:
    """Sentences about every broken invariant; none for a sound plan."""
    sizes = tuple(_size_faults(plan))  # nothing else can be asked about a plan without sizes
    return sizes or (
        *_mesh_faults(plan),
        *_batch_faults(plan),
        *_optimizer_faults(plan),
        *share_faults(plan),
        *_stage_faults(plan),
        *_ledger_faults(plan),
        *_certificate_faults(plan),
        *_calibration_faults(plan),
    )


def require_sound(plan: Plan) -> None:
    """Raise ImpossibleError FRAMEWORK_LEGALITY with every broken invariant: such a plan is not shown, emitted or run."""
    broken = faults(plan)
    if broken:
        raise ImpossibleError(
            "FRAMEWORK_LEGALITY",
            f"The plan is not sound: {' '.join(broken)}",
            flag="PLAN",
            hint="Correct the file, or plan again.",
        )


def _size_faults(plan: Plan) -> Iterator[str]:
    """What everything else divides by or counts with."""
    groups, shape, work, s = plan.cluster.groups, plan.model, plan.workload, plan.strategy
    sizes: dict[str, float] = {f"mesh.{axis}": plan.mesh.size(axis) for axis in (*MESH_AXES, "ep", "etp")}
    sizes |= {"cluster.groups": len(groups), "model.hidden": shape.hidden, "model.layers": shape.layers}
    sizes |= {f"cluster.groups[{i}].count": group.count for i, group in enumerate(groups)}
    sizes |= {f"cluster.groups[{i}].node.gpus": group.node.gpus for i, group in enumerate(groups)}
    sizes |= {f"cluster.groups[{i}].node.gpu.memory_bytes": group.node.gpu.memory_bytes for i, group in enumerate(groups)}  # fmt: skip
    sizes |= {"workload.seq_len": work.seq_len, "workload.global_batch": work.global_batch}
    sizes |= {"workload.expert_imbalance": work.expert_imbalance, "workload.target_len": work.targets}
    sizes |= {
        "strategy.cp_inner": s.cp_inner,
        "strategy.micro_batch": s.micro_batch,
        "strategy.accumulation": s.accumulation,
    }
    for i, share in enumerate(s.uneven_batch):
        sizes |= {f"strategy.uneven_batch[{i}].{name}": getattr(share, name) for name in ("replicas", "micro_batches")}
    sizes |= {"time.step_ns": plan.time.step_ns, "memory.capacity_bytes": plan.memory.capacity_bytes}
    known = dict(shape.extra)
    sizes |= {f"model.extra.{name}": known.get(name, 0) for name in FACTS_OF.get(shape.formula, ())}
    yield from (f"{place} is {size}; it is at least 1." for place, size in sizes.items() if size < 1)
    if work.target_len is not None and (not shape.enc_layers or shape.moe is not None):
        yield f"workload.target_len is {work.target_len}, and the model has no decoder behind an encoder, or one of experts."
    yield from _convolution_faults(plan)


def _convolution_faults(plan: Plan) -> Iterator[str]:
    """What a network of convolutions is built from before anything is counted."""
    shape, known = plan.model, dict(plan.model.extra)
    if not shape.is_convolutional:
        return
    depths = sum(value for name, value in known.items() if name.startswith("depths_"))
    if depths != shape.layers:
        yield f"model.extra has stages of {depths} blocks and model.layers is {shape.layers}."
    if known.get("image", 0) > MAX_SIDE:
        yield f"model.extra.image is {known['image']}; it is at most {MAX_SIDE}."


def _mesh_faults(plan: Plan) -> Iterator[str]:
    mesh = plan.mesh
    if mesh.world != plan.cluster.world:
        yield f"The mesh has {mesh.world} ranks and the cluster {plan.cluster.world} devices."
    if mesh.expert_dp * mesh.pp * mesh.ep * mesh.etp != mesh.world:
        yield f"{mesh.world} ranks do not factor into pp {mesh.pp} x ep {mesh.ep} x etp {mesh.etp} x replicas."
    if sorted(mesh.order) != sorted(MESH_AXES):
        yield "mesh.order must name every dense axis once."


def _batch_faults(plan: Plan) -> Iterator[str]:
    if sequences_per_step(plan.mesh, plan.strategy) != plan.workload.global_batch:
        yield f"{plan.batch_identity}, but the global batch is {plan.workload.global_batch}."


def _optimizer_faults(plan: Plan) -> Iterator[str]:
    """What is trained with is what was asked for: figures are of the one, runs and launch files have the other."""
    own, asked = plan.strategy.optimizer, plan.workload.optimizer
    if own != asked:
        yield f"strategy.optimizer is {shown(own)} and workload.optimizer {asked}."


def share_faults(plan: Plan) -> Iterator[str]:
    """An uneven batch has a share for each kind of nodes, whose devices hold whole replicas that meet once a step."""
    mesh, s, groups = plan.mesh, plan.strategy, plan.cluster.groups
    if not s.uneven_batch:
        return
    if len(s.uneven_batch) != len(groups):
        yield f"The uneven batch has {len(s.uneven_batch)} shares and the cluster {len(groups)} kinds of nodes."
        return
    for place, (share, group) in enumerate(zip(s.uneven_batch, groups, strict=True)):
        devices = group.count * group.node.gpus
        if share.replicas * mesh.tp != devices or group.node.gpus % mesh.tp:
            yield f"Share {place} of the uneven batch has {share.replicas} replicas of tp {mesh.tp}; its {group.count} nodes have {devices} devices, {group.node.gpus} each."
    most = max(share.micro_batches for share in s.uneven_batch)
    if s.accumulation != most:
        yield f"strategy.accumulation is {s.accumulation} and the largest number of micro-batches of the uneven batch {most}."
    if s.zero > 1 or mesh.pp * mesh.cp * mesh.ep > 1:
        yield f"Replicas of an uneven batch meet once a step: under zero 0 or 1 and without pp, cp and ep; the plan has zero {s.zero}, pp {mesh.pp}, cp {mesh.cp}, ep {mesh.ep}."


def _stage_faults(plan: Plan) -> Iterator[str]:
    stages = plan.strategy.stages
    if len(stages) != plan.mesh.pp or [stage.index for stage in stages] != list(range(len(stages))):
        yield f"There are {len(stages)} stages for pp={plan.mesh.pp}."
        return
    depths = plan.strategy.recompute_stages
    if depths and len(depths) != len(stages):
        yield f"strategy.recompute_stages has {len(depths)} numbers; it has one for each of the {len(stages)} stages, or none."
    runs = sorted((first, end) for stage in stages for first, end in stage.layers)
    borders = [0, *(end for _, end in runs)]
    chained = [first for first, _ in runs] == borders[:-1] and all(first <= end for first, end in runs)
    if not chained or borders[-1] != len(layer_sequence(plan.model)):
        yield "The stages do not own every layer exactly once."
    last = stage_of_head(plan.strategy.schedule, len(stages))
    if [s.index for s in stages if s.embedding] != [0] or [s.index for s in stages if s.head] != [last]:
        yield "The embedding belongs to the first stage and the head to the last, or in a V to the first, too."


def _ledger_faults(plan: Plan) -> Iterator[str]:
    memory, time = plan.memory, plan.time
    if not memory.stages or {term.name for stage in memory.stages for term in stage.terms} - set(MEMORY_TERMS):
        yield "The memory ledger must have one entry per stage and only known terms."
        return
    if int(memory.peak.value) != memory.worst.device:
        yield f"The peak is {memory.peak.value:.0f} B and the terms of the worst stage add up to {memory.worst.device} B."
    if {term.name for term in time.terms} - set(TIME_TERMS) or sum(
        term.exposed_ns for term in time.terms
    ) != time.step_ns:
        yield "The terms of the step do not add up to it."
    for estimate in (memory.peak, time.step):
        if not estimate.low <= estimate.value <= estimate.high:
            yield "An interval does not contain its value."


def _calibration_faults(plan: Plan) -> Iterator[str]:
    """Factors and intervals that `calibrate` may write (document/load.py)."""
    yield from (f"factors[{i}].value is {one.value:g}; it lies between 0.1 and 10." for i, one in enumerate(plan.factors) if not 0.1 <= one.value <= 10)  # fmt: skip
    yield from (f"near[{i}] is no interval around what is predicted." for i, one in enumerate(plan.near) if not 0.1 <= one.low <= 1 <= one.high <= 10)  # fmt: skip


def _certificate_faults(plan: Plan) -> Iterator[str]:
    """What a search did with its layouts adds up."""
    account = plan.certificate
    if account is None:
        return
    refused = sum(each.count for each in account.refused)
    if (
        account.enumerated != refused + account.legal
        or account.legal != account.slower + account.bounded + account.weighed
        or account.weighed != account.over + account.evaluated
    ):
        yield "The layouts of the certificate do not add up: enumerated = refused + legal, legal = slower + bounded + weighed, weighed = over + evaluated."
