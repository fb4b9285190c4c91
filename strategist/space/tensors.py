"""The single tensors that a rank's weights are made of, for what is done tensor by tensor: torch's ZeRO-1 and DDP's buckets.

`ZeroRedundancyOptimizer` sorts whole parameters by size, gives each to the rank that has least so far (the first of equals),
and after the update broadcasts each from its owner. Source: PyTorch 2.13
torch/distributed/optim/zero_redundancy_optimizer.py, _partition_parameters and _sync_params.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Literal

import numpy as np

from strategist.facts.layers import Layer, norm_size
from strategist.facts.model import ModelShape, layer_sequence
from strategist.facts.parameters import outer_parameters, table_width
from strategist.facts.weights import Matrix, Vector
from strategist.records import dataclass
from strategist.space.candidates import Column, Mask, Reals
from strategist.space.shares import Group, expert_shards, layers, state_shards
from strategist.space.stages import kinds

Sizes = tuple[tuple[int, int], ...]
"""(elements, how many tensors of that size), the largest first."""


@dataclass(frozen=True, slots=True)
class Part:
    """What lies on one rank of a stage: layers of each sort, and the ends of the model; `which`: all of it, or routed experts or
    the others alone."""

    layers: tuple[int, ...]
    is_first: bool
    is_last: bool
    tp: int
    ep: int
    etp: int
    which: Literal["all", "dense", "experts"] = "all"


@cache
def tensor_sizes(shape: ModelShape, part: Part) -> Sizes:
    """The tensors of a part by size. All experts' matrices of one kind are one tensor."""
    found: Counter[int] = Counter()
    for layer, number in zip(layers(shape), part.layers, strict=True):
        if number:
            for size in _of_layer(shape, layer, part):
                found[size] += number
    if part.which != "experts":
        found.update(_outside(shape, part))
    del found[0]
    return tuple(sorted(found.items(), reverse=True))


def _of_layer(shape: ModelShape, layer: Layer, part: Part) -> Iterator[int]:
    for matrix in layer.matrices:
        if part.which == "all" or matrix.is_expert == (part.which == "experts"):
            yield from _of_matrix(matrix, part)
    if part.which != "experts":
        for vector in layer.vectors:
            yield from _of_vector(shape, vector, part)


def _of_matrix(matrix: Matrix, part: Part) -> Iterator[int]:
    cut = part.etp if matrix.is_expert else part.tp
    rows = -(-matrix.outputs // cut) if matrix.cut == "column" else matrix.outputs
    width = -(-matrix.inputs // cut) if matrix.cut == "row" else matrix.inputs
    copies = -(-matrix.copies // part.ep) if matrix.is_expert else 1
    for _ in range(1 if matrix.is_expert else matrix.copies):
        yield copies * rows * width
        if matrix.bias:
            yield copies * rows


def _of_vector(shape: ModelShape, vector: Vector, part: Part) -> Iterator[int]:
    """Vectors that are listed together: each weight and each bias of a norm is a tensor, and each of three biases."""
    size = -(-vector.size // part.tp) if vector.cut else vector.size
    if vector.name == "qkv_bias":
        keys = min(size // 3, -(-shape.kv_heads * shape.head_dim // part.tp))
        yield from (size - 2 * keys, keys, keys)
        return
    each = {"norms": shape.hidden, "qk_norm": shape.head_dim}.get(vector.name, size)
    yield from [each] * (size // each)
    yield size % each


def _outside(shape: ModelShape, part: Part) -> Iterator[int]:
    outer = outer_parameters(shape)
    table = -(-shape.vocab // part.tp) * table_width(shape)
    if part.is_first:
        yield from (table, outer.position, outer.projection, outer.input)
        yield from _norms(shape, outer.embedding_norm)
    if part.is_last:
        yield from _norms(shape, outer.final_norm)
        yield 0 if shape.tied and part.is_first else table
        yield max(0, outer.head - (0 if shape.tied else shape.vocab * table_width(shape)))
        yield outer.extra


def _norms(shape: ModelShape, size: int) -> Iterator[int]:
    weights = norm_size(shape, 1)
    yield from [size // weights] * weights if size else ()


def dealt_CS(shape: ModelShape, group: Group, wanted: Mask) -> Reals:
    """Elements of the rank with most of them, (C, S), for the candidates that are `wanted` (C,); 0 for the others. Experts are
    dealt with the rest where they have as many copies to share the work, otherwise on their own."""
    c, known = group.meshes, _deals_of(shape)
    columns = (c["tp"], c["ep"], c["etp"], state_shards(c), expert_shards(c))
    meshes = np.unique(group.mesh_of[wanted])
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
    return found[group.mesh_of]


def _fullest(shape: ModelShape, part: Part, ranks: int, sharers: int) -> int:
    if shape.moe is None or ranks == sharers:
        return largest_deal(tensor_sizes(shape, part), ranks)
    dense, experts = (tensor_sizes(shape, replace(part, which=which)) for which in ("dense", "experts"))
    return largest_deal(dense, ranks) + largest_deal(experts, sharers)


@cache
def _deals_of(_shape: ModelShape) -> dict[object, int]:
    """What is known of a model's deals: filled as they are asked for, because a search asks for each several times."""
    return {}


@cache
def largest_deal(sizes: Sizes, ranks: int) -> int:
    """Elements of the rank with most when the tensors are dealt to `ranks` ranks, largest first, each to the rank with least."""
    loads = [(0, ranks)]  # (elements, how many ranks have them), the least first
    for size, count in sizes:
        left = count
        while left:
            (least, some), most = loads[0], loads[-1][0]
            rounds = left // ranks if most - least <= size else 0
            if rounds:  # nobody is given a second one before everybody has one
                loads = [(load + rounds * size, number) for load, number in loads]
                left -= rounds * ranks
                continue
            given = min(some, left)
            loads[0] = (least, some - given)
            if given == some:
                del loads[0]
            insort(loads, (least + size, given))
            left -= given
    return loads[-1][0]


def tensors_S(shape: ModelShape, group: Group) -> Column:
    """How many tensors a rank of each stage has, (S,)."""
    ends = zip(group.is_first.tolist(), group.is_last.tolist(), strict=True)
    parts = (Part(tuple(numbers), *end, 1, 1, 1) for numbers, end in zip(group.layers_SK.tolist(), ends, strict=True))
    return np.array([sum(number for _, number in tensor_sizes(shape, part)) for part in parts])


FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""Bytes from which DDP closes its first bucket and the others (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, bucket_cap_mb)."""


@cache
def ddp_buckets(shape: ModelShape, gradient: int) -> int:
    """How many all-reduces DDP makes of a model's gradients of `gradient` bytes per element: it fills buckets in the order in
    which gradients come and closes one when it is full. Source: PyTorch 2.13 torch/csrc/distributed/c10d/reducer.cpp,
    compute_bucket_assignment_by_size."""
    found, held, limit = 0, 0, FIRST_BUCKET
    for size in _as_gradients_come(shape):
        held += size * gradient
        if held >= limit:
            found, held, limit = found + 1, 0, BUCKET
    return found + (held > 0)


def _as_gradients_come(shape: ModelShape) -> Iterator[int]:
    """Elements of all tensors of a whole model from the head to the embedding."""
    part = Part((), True, True, 1, 1, 1)
    outer, sorts = outer_parameters(shape), dict(zip(kinds(shape), layers(shape), strict=True))
    table = shape.vocab * table_width(shape)
    yield from (0 if shape.tied else table, outer.final_norm, outer.extra)
    for kind in reversed(layer_sequence(shape)):
        for matrix in reversed(sorts[kind].matrices):
            yield from _of_matrix(matrix, part)
        for vector in sorts[kind].vectors:
            yield vector.size
    yield from (outer.position, table, outer.projection, outer.input, outer.embedding_norm)


def fullest_rank(sizes: Sizes, ranks: int) -> int:
    """The first rank of those that get most."""
    loads = [0] * ranks
    for size, count in sizes:
        for _ in range(count):
            loads[loads.index(min(loads))] += size
    return loads.index(max(loads))
