"""Which ranks stand for all: one per pipeline stage, of those that ZeRO-1 deals whole tensors to the one with most, of a ring one
behind the first, and, where shards are uneven, the one with the smallest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from strategist.document.plan import MESH_AXES, Plan
from strategist.errors import InputError
from strategist.facts.lots import fullest_lot
from strategist.facts.model import layer_counts, layer_sequence
from strategist.facts.profile import find_profile
from strategist.facts.tensors import Part, deal, fullest_of_both, fullest_rank, tensor_sizes
from strategist.records import dataclass, replace
from strategist.units import parse_integer

WORDS = ("first", "middle", "last", "fullest")
EVERY = "all-kinds"
JOINT: Mapping[str, tuple[str, ...]] = {"shards": ("dp_shard", "cp"), "data": ("dp_replicate", "dp_shard", "cp")}
"""Mesh axes that are one group where several of them have several ranks."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of rank and the one that stands for it."""

    name: str
    rank: int
    stage: int


def chosen_kinds(plan: Plan, words: str) -> tuple[Kind, ...]:
    """The kinds that some words ask for: first, middle, last, fullest (stages, with commas; the last as the plan predicts
    it), all-kinds, or one rank's number.

    Raises InputError CHOICE for another word, RANGE and INTEGER for a number that is no rank of the plan.
    """
    text = words.strip()
    if text == EVERY:
        return every_kind(plan)
    if text[:1].isdigit() or text[:1] in "+-":
        rank = parse_integer(text, "--ranks", low=0, high=plan.processes - 1, example="0")
        return (Kind(f"rank {rank}", rank, stage_of(plan, rank)),)
    pp = plan.mesh.pp
    stages = {"first": 0, "middle": pp // 2, "last": pp - 1, "fullest": plan.memory.worst.stage}
    chosen = [word.strip() for word in text.split(",")]
    for word in chosen:
        if word not in stages:
            raise InputError(
                "CHOICE",
                f"--ranks knows {', '.join(WORDS)} (stages of the pipeline), {EVERY} and rank numbers.",
                flag="--ranks",
                value=word,
                hint="Example: --ranks first,last.",
            )
    if plan.strategy.uneven_batch:
        return tuple(_of_shares(plan))
    numbers = sorted({stages[word] for word in chosen})
    return tuple(_of_stage(plan, stage) for stage in numbers)


def every_kind(plan: Plan) -> tuple[Kind, ...]:
    """One rank of each stage, and the last shard of each where the weights do not divide evenly."""
    if plan.strategy.uneven_batch:
        return tuple(_of_shares(plan))
    firsts = [_of_stage(plan, stage) for stage in range(plan.mesh.pp)]
    if not has_uneven_shards(plan):
        return tuple(firsts)
    count, stride = _shards(plan)
    ends = [_of_shard(plan, kind.stage, (count - 1) * stride, f"{kind.name}, last shard") for kind in firsts]
    return tuple(kind for pair in zip(firsts, ends, strict=True) for kind in pair)


def has_uneven_shards(plan: Plan) -> bool:
    """Whether some weight does not divide over the shards: its rows are padded, and the last ranks hold less."""
    if plan.strategy.zero < 2:
        return False
    shape, (shards, _), tp = plan.model, _shards(plan), plan.mesh.tp
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rank = shape.adapters.rank if shape.adapters is not None else 0
    rows = (-(-shape.vocab // tp), shape.hidden, shape.ffn_hidden // tp, queries // tp, keys // tp, rank)
    return any(count % shards for count in rows)


def stage_of(plan: Plan, rank: int) -> int:
    """The pipeline stage of a rank."""
    return rank // plan.mesh.stride("pp") % plan.mesh.pp


def _of_stage(plan: Plan, stage: int) -> Kind:
    pp = plan.mesh.pp
    alone = "every rank" if plan.processes == plan.mesh.world else "device 0"
    name = alone if pp == 1 else f"stage {stage} of {pp}"
    return _of_shard(plan, stage, _fullest(plan, stage), name)


def _of_shares(plan: Plan) -> Iterator[Kind]:
    """A rank of each share of an uneven batch: the first, or the one that holds most of the optimizer's state."""
    fullest, first = _fullest(plan, 0), 0
    for place, share in enumerate(plan.strategy.uneven_batch):
        end = first + share.replicas * plan.mesh.tp
        word = "micro-batch" if share.micro_batches == 1 else "micro-batches"
        yield Kind(f"share {place} ({share.micro_batches} {word})", fullest if first <= fullest < end else first, 0)
        first = end


def _of_shard(plan: Plan, stage: int, offset: int, name: str) -> Kind:
    return Kind(name, stage * plan.mesh.stride("pp") + offset, stage)


def _fullest(plan: Plan, stage: int) -> int:
    """The place in its stage of the rank that holds most of the optimizer's state: torch's ZeRO-1 deals whole tensors, and those of
    experts on their own where they lie apart. Where all hold as much, one that holds most in a ring: every rank but the first
    compares all of its queries with a piece of another's keys (executor/context.py)."""
    mesh, held, (shards, stride) = plan.mesh, plan.strategy.stages[stage], _shards(plan)
    if plan.strategy.zero != 1 or shards == 1:
        is_ring = plan.strategy.context_parallel in ("ring", "hierarchical")
        return stride * plan.strategy.cp_inner * int(mesh.cp > 1 and is_ring)
    own = [kind for first, end in held.layers for kind in layer_sequence(plan.model)[first:end]]
    numbers = tuple(own.count(kind) for kind in layer_counts(plan.model))
    part = Part(numbers, held.embedding, held.head, mesh.tp, mesh.ep, mesh.etp)
    if plan.strategy.optimizer == "muon":
        profile, precision = find_profile(), plan.workload.precision
        each = (profile.state_bytes(optimizer, precision) for optimizer in ("muon", "adamw"))
        return stride * fullest_lot(plan.model, part, shards, *each)
    if mesh.ep == 1:
        return stride * fullest_rank(tensor_sizes(plan.model, part), shards)
    dense, experts = (tensor_sizes(plan.model, replace(part, which=which)) for which in ("dense", "experts"))
    sharers, apart = group_of(plan, "expert_shards")
    return fullest_of_both((deal(dense, shards), stride), (deal(experts, sharers), apart))[1]


def _shards(plan: Plan) -> tuple[int, int]:
    """Ranks that share one copy of the state, and how far apart in rank numbers they are."""
    return group_of(plan, "shards")


def group_of(plan: Plan, axis: str) -> tuple[int, int]:
    """(ranks, stride) of the groups of a mesh axis or of JOINT ones, "world" is everybody."""
    mesh = plan.mesh
    if axis in JOINT:
        return prod(mesh.size(name) for name in JOINT[axis]), min(mesh.stride(name) for name in JOINT[axis])
    if axis == "ep":
        return mesh.ep, mesh.etp
    if axis in ("cp_inner", "cp_ring"):
        inner, stride = plan.strategy.cp_inner, mesh.stride("cp")
        return (inner, stride) if axis == "cp_inner" else (mesh.cp // inner, stride * inner)
    if axis in ("expert_shards", "expert_data"):
        outer = mesh.dp_replicate if plan.strategy.zero >= 1 and axis == "expert_shards" else 1
        return mesh.expert_dp // outer, mesh.ep * mesh.etp
    if axis in MESH_AXES:
        return mesh.size(axis), mesh.stride(axis)
    return mesh.world, 1
