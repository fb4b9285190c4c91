"""ZeRO-1's deal of whole tensors to ranks, for columns of candidates (facts/tensors.py says what is dealt and how)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np

from strategist.facts.lots import Lot, sorts_of_lots
from strategist.facts.model import ModelShape
from strategist.facts.tensors import Part, Which, deal, fullest_of_both, largest_deal, tensor_sizes
from strategist.records import replace
from strategist.space.candidates import Column, Mask, Reals
from strategist.space.shares import Group, expert_shards, state_shards


def dealt_CS(shape: ModelShape, group: Group, wanted: Mask) -> Reals:
    """Elements of the rank with most of them, (C, S), for the candidates that are `wanted` (C,); 0 for the others. Experts that
    are spread are dealt on their own: a rank has what it gets from both deals."""
    return _of_deals_CS(group, wanted, _deals_of(shape), partial(_fullest, shape))


def most_of_lots_CS(shape: ModelShape, group: Group, wanted: Mask, size: Callable[[Lot], float]) -> Reals:
    """The largest `size` of what a rank is dealt when hidden matrices are a group of their own, as `dealt_CS`."""

    def most(part: Part, ranks: int, _sharers: int) -> float:
        return max(size(lot) for lot in sorts_of_lots(shape, replace(part, tp=1, ep=1, etp=1), ranks))

    return _of_deals_CS(group, wanted, {}, most)


def _of_deals_CS(
    group: Group, wanted: Mask, known: dict[object, float], value: Callable[[Part, int, int], float]
) -> Reals:
    """`value` of what lies on a stage, the ranks that share it and those that share its experts, each asked once."""
    c = group.meshes
    columns = (c["tp"], c["ep"], c["etp"], state_shards(c), expert_shards(c))
    meshes = np.flatnonzero(np.bincount(group.mesh_of[wanted]))
    stages = [
        (tuple(numbers), bool(first), bool(last))
        for numbers, first, last in zip(group.layers_SK.tolist(), group.is_first, group.is_last, strict=True)
    ]
    found = np.zeros((len(c), len(stages)))
    degrees = zip(*(column[meshes].tolist() for column in columns), strict=True)
    for mesh, degree in zip(meshes.tolist(), degrees, strict=True):
        for stage, held in enumerate(stages):
            if (held, degree) not in known:
                known[held, degree] = value(Part(*held, *degree[:3]), *degree[3:])
            found[mesh, stage] = known[held, degree]
    return found.T.take(group.mesh_of, axis=-1).T


def _fullest(shape: ModelShape, part: Part, ranks: int, sharers: int) -> int:
    if part.ep == 1:
        return largest_deal(tensor_sizes(shape, part), ranks)
    dense, experts = (tensor_sizes(shape, replace(part, which=which)) for which in ("dense", "experts"))
    return fullest_of_both((deal(dense, ranks), part.tp), (deal(experts, sharers), part.ep * part.etp))[0]


@cache
def _deals_of(_shape: ModelShape) -> dict[object, float]:
    """What is known of a model's deals: filled as they are asked for, because a search asks for each several times."""
    return {}


def tensors_S(shape: ModelShape, group: Group, which: Which = "all") -> Column:
    """How many tensors a rank of each stage has, (S,); `which` of them as in Part."""
    ends = zip(group.is_first.tolist(), group.is_last.tolist(), strict=True)
    parts = (
        Part(tuple(numbers), *end, 1, 1, 1, which) for numbers, end in zip(group.layers_SK.tolist(), ends, strict=True)
    )
    return np.array([sum(number for _, number in tensor_sizes(shape, part)) for part in parts])
