"""ZeRO-1's deal of whole tensors to ranks, for columns of candidates (facts/tensors.py says what is dealt and how)."""

from __future__ import annotations

from functools import cache

import numpy as np

from strategist.facts.model import ModelShape
from strategist.facts.tensors import Part, Which, deal, fullest_of_both, largest_deal, tensor_sizes
from strategist.records import replace
from strategist.space.candidates import Column, Mask, Reals
from strategist.space.shares import Group, expert_shards, state_shards


def dealt_CS(shape: ModelShape, group: Group, wanted: Mask) -> Reals:
    """Elements of the rank with most of them, (C, S), for the candidates that are `wanted` (C,); 0 for the others. Experts that
    are spread are dealt on their own: a rank has what it gets from both deals."""
    c, known = group.meshes, _deals_of(shape)
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
                known[held, degree] = _fullest(shape, Part(*held, *degree[:3]), *degree[3:])
            found[mesh, stage] = known[held, degree]
    return found.T.take(group.mesh_of, axis=-1).T


def _fullest(shape: ModelShape, part: Part, ranks: int, sharers: int) -> int:
    if part.ep == 1:
        return largest_deal(tensor_sizes(shape, part), ranks)
    dense, experts = (tensor_sizes(shape, replace(part, which=which)) for which in ("dense", "experts"))
    return fullest_of_both((deal(dense, ranks), part.tp), (deal(experts, sharers), part.ep * part.etp))[0]


@cache
def _deals_of(_shape: ModelShape) -> dict[object, int]:
    """What is known of a model's deals: filled as they are asked for, because a search asks for each several times."""
    return {}


def tensors_S(shape: ModelShape, group: Group, which: Which = "all") -> Column:
    """How many tensors a rank of each stage has, (S,); `which` of them as in Part."""
    ends = zip(group.is_first.tolist(), group.is_last.tolist(), strict=True)
    parts = (
        Part(tuple(numbers), *end, 1, 1, 1, which) for numbers, end in zip(group.layers_SK.tolist(), ends, strict=True)
    )
    return np.array([sum(number for _, number in tensor_sizes(shape, part)) for part in parts])
