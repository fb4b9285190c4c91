"""What torch's ZeRO-1 deals to each rank when hidden matrices have another state than all other weights.

The optimizer has two groups, the others first. `ZeroRedundancyOptimizer` sorts each by size and goes on counting from the first to the
second (PyTorch 2.13 torch/distributed/optim/zero_redundancy_optimizer.py, _partition_parameters).
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from heapq import heapreplace

from strategist.facts.layers import build_layer
from strategist.facts.model import ModelShape, layer_counts
from strategist.facts.tensors import Part, tensor_sizes
from strategist.records import dataclass

Sides = tuple[int, int]
"""Rows and columns of a matrix."""


@dataclass(frozen=True, slots=True)
class Lot:
    """What one rank gets: elements of `others`, and `matrices` by their sides, with how many there are of each."""

    others: int
    matrices: tuple[tuple[Sides, int], ...]

    @property
    def elements(self) -> int:
        """Elements of its matrices."""
        return sum(rows * columns * number for (rows, columns), number in self.matrices)


@cache
def sorts_of_lots(shape: ModelShape, part: Part, ranks: int) -> tuple[Lot, ...]:
    """The lots that differ: with thousands of ranks most get the same."""
    return tuple(dict.fromkeys(lots(shape, part, ranks)))


def lots(shape: ModelShape, part: Part, ranks: int) -> tuple[Lot, ...]:
    """The lot of every rank, in order. For parts that tensor parallelism leaves whole, of models without experts."""
    inside = _matrices(shape, part)
    outside = Counter(dict(tensor_sizes(shape, part)))
    outside.subtract(rows * columns for rows, columns in inside)
    loads = [(0, rank) for rank in range(ranks)]
    others, matrices = [0] * ranks, [Counter[Sides]() for _ in range(ranks)]
    for size in sorted(outside.elements(), reverse=True):
        others[_given(loads, size)] += size
    for sides in sorted(inside, key=lambda sides: -sides[0] * sides[1]):
        matrices[_given(loads, sides[0] * sides[1])][sides] += 1
    return tuple(Lot(own, tuple(held.items())) for own, held in zip(others, matrices, strict=True))


def _given(loads: list[tuple[int, int]], size: int) -> int:
    """The first of the ranks with least, which gets one tensor more."""
    load, rank = loads[0]
    heapreplace(loads, (load + size, rank))
    return rank


def _matrices(shape: ModelShape, part: Part) -> list[Sides]:
    return [
        (matrix.outputs, matrix.inputs)
        for kind, number in zip(layer_counts(shape), part.layers, strict=True)
        for _ in range(number)
        for matrix in build_layer(shape, kind).matrices
        for _ in range(matrix.copies)
    ]


def state_bytes(lot: Lot, matrix: float, other: float) -> float:
    """Bytes of optimizer state of a lot, with so many for an element of a matrix and of another weight."""
    return matrix * lot.elements + other * lot.others


def fullest_lot(shape: ModelShape, part: Part, ranks: int, matrix: float, other: float) -> int:
    """The first rank of those whose lot has most state."""
    held = [state_bytes(lot, matrix, other) for lot in lots(shape, part, ranks)]
    return held.index(max(held))
