"""The single tensors that a rank's weights are made of, for what is done tensor by tensor: torch's ZeRO-1 and DDP's buckets.

`ZeroRedundancyOptimizer` sorts whole parameters by size, gives each to the rank that has least so far (the first of equals),
and after the update broadcasts each from its owner. Source: PyTorch 2.13
torch/distributed/optim/zero_redundancy_optimizer.py, _partition_parameters and _sync_params.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from functools import cache
from heapq import heapreplace
from operator import itemgetter
from typing import Literal

from strategist.facts.layers import Layer, build_layer, norm_size
from strategist.facts.model import ModelShape, layer_counts, layer_sequence
from strategist.facts.parameters import outer_parameters, table_width
from strategist.facts.tables import Served, served_elements
from strategist.facts.weights import Matrix, Vector
from strategist.records import dataclass

Sizes = tuple[tuple[int, int], ...]
"""(elements, how many tensors of that size), the largest first."""


Which = Literal["all", "dense", "experts"]


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
    which: Which = "all"


@cache
def tensor_sizes(shape: ModelShape, part: Part) -> Sizes:
    """The tensors of a part by size. All experts' matrices of one kind are one tensor."""
    found: Counter[int] = Counter()
    for kind, number in zip(layer_counts(shape), part.layers, strict=True):
        for size in _of_layer(shape, build_layer(shape, kind), part) if number else ():
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
    """Vectors that are listed together: each weight and each bias of a norm is a tensor, and each of three biases; a norm over all
    heads has one weight for queries and one for keys."""
    size, name = -(-vector.size // part.tp) if vector.cut else vector.size, vector.name.removeprefix("cross_")
    keys = -(-shape.kv_heads * shape.head_dim // part.tp)
    if name == "qkv_bias":
        keys = min(size // 3, keys)
        yield from (size - 2 * keys, keys, keys)
        return
    if name == "qk_norm" and shape.qk_norm in ("full", "per_head"):
        yield from (size - min(size, keys), min(size, keys))
        return
    each = {"norms": shape.hidden, "qk_norm": shape.head_dim}.get(name, size)
    yield from [each] * (size // each)
    yield size % each


def _outside(shape: ModelShape, part: Part) -> Iterator[int]:
    outer = outer_parameters(shape)
    table = -(-shape.vocab // part.tp) * table_width(shape)
    if part.is_first:
        yield from (table, *_positions(shape), outer.projection, outer.input)
        yield from _norms(shape, outer.embedding_norm)
    if part.is_last:
        yield from _norms(shape, outer.final_norm)
        yield 0 if shape.tied and part.is_first else table
        yield _beside_head(shape)
        yield outer.extra


def _beside_head(shape: ModelShape) -> int:
    """Elements of the head that are no table: a bias."""
    return max(0, outer_parameters(shape).head - (0 if shape.tied else shape.vocab * table_width(shape)))


def _positions(shape: ModelShape) -> tuple[int, ...]:
    """Elements of the tables of positions: an encoder and its decoder have one each."""
    every, extra = outer_parameters(shape).position, dict(shape.extra)
    if _halves(shape) == 1:
        return (every,)
    in_front = extra.get("enc_pos_rows", 0) * shape.hidden + extra.get("rel_buckets", 0) * shape.heads
    return in_front, every - in_front


def _halves(shape: ModelShape) -> int:
    """How many rows of layers have ends of their own."""
    return 2 if shape.formula == "encdec" else 1


def _norms(shape: ModelShape, size: int) -> Iterator[int]:
    weights = norm_size(shape, 1) * _halves(shape)
    yield from [size // weights] * weights if size else ()


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


FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""Bytes from which DDP closes its first bucket and the others (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, bucket_cap_mb)."""


def ddp_buckets(shape: ModelShape, gradient: float, *, serves_tables: bool = False) -> int:
    """How many all-reduces DDP makes of a model's gradients of `gradient` bytes per element, frozen ones counted in unless they
    stand beside adapters; without its tables where a server has them."""
    return len(bucket_sizes(shape, gradient, serves_tables=serves_tables))


@cache
def bucket_sizes(shape: ModelShape, gradient: float, *, serves_tables: bool = False) -> tuple[int, ...]:
    """Elements of DDP's buckets: it fills them in the order in which gradients come and closes one when it is full. Source: PyTorch
    2.13 torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size."""
    found, held, limit = [], 0, FIRST_BUCKET
    for size in _as_gradients_come(shape, served_elements(shape) if serves_tables else Served(0, 0)):
        held += size
        if held * gradient >= limit:
            found.append(held)
            held, limit = 0, BUCKET
    return tuple(found) if not held else (*found, held)


def _as_gradients_come(shape: ModelShape, served: Served) -> Iterator[int]:
    """Elements of all tensors of a whole model from the head to the embedding, but for those on a server."""
    part = Part((), True, True, 1, 1, 1)
    if shape.adapters is not None:
        yield from _of_adapters(shape, part)
        return
    outer = outer_parameters(shape)
    table, halves, positions = shape.vocab * table_width(shape), _halves(shape), _positions(shape)
    final_norm, embedding_norm = outer.final_norm // halves, outer.embedding_norm // halves
    yield from (0 if shape.tied else table, _beside_head(shape), final_norm, outer.extra - served.extra)
    for number, kind in enumerate(reversed(layer_sequence(shape))):
        if halves > 1 and number == shape.layers:  # in front of the decoder, and behind the encoder
            yield from (positions[-1], embedding_norm, final_norm)
        layer = build_layer(shape, kind)
        for matrix in reversed(layer.matrices):
            yield from _of_matrix(matrix, part)
        yield from (vector.size for vector in layer.vectors)
    yield from (embedding_norm, positions[0], table - served.before, outer.projection, outer.input)


def _of_adapters(shape: ModelShape, part: Part) -> Iterator[int]:
    """Elements of all adapters from the last layer to the first: nothing else has gradients."""
    for kind in reversed(layer_sequence(shape)):
        for matrix in reversed(build_layer(shape, kind).matrices):
            if matrix.is_adapter:
                yield from _of_matrix(matrix, part)


def deal(sizes: Sizes, ranks: int) -> list[int]:
    """Elements of each rank in turn, up to the last that gets any."""
    loads = [(0, rank) for rank in range(min(ranks, sum(count for _, count in sizes)))]
    for size, count in sizes:
        for _ in range(count):
            least, rank = loads[0]
            heapreplace(loads, (least + size, rank))
    return [load for load, _ in sorted(loads, key=itemgetter(1))]


def fullest_rank(sizes: Sizes, ranks: int) -> int:
    """The first rank of those that get most."""
    loads = deal(sizes, ranks)
    return loads.index(max(loads))


Dealt = tuple[list[int], int]
"""A deal, and how far apart in their stage those are to whom it deals in turn: as many neighbours are alike in it."""


def fullest_of_both(one: Dealt, other: Dealt) -> tuple[int, int]:
    """(elements, place in the stage) of the first rank of those that get most from two deals together."""
    begins = sorted({place * width for loads, width in (one, other) for place in range(len(loads))})
    held = [
        sum(loads[place // width] for loads, width in (one, other) if place // width < len(loads)) for place in begins
    ]
    most = max(held)
    return most, begins[held.index(most)]
