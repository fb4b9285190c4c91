"""What hooks of DDP do to gradients: the settings that plans take, and what of a model PowerSGD makes smaller."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from strategist.catalog import rows
from strategist.facts.layers import build_layer
from strategist.facts.model import ModelShape, layer_counts
from strategist.facts.parameters import count, outer_parameters, table_width
from strategist.facts.resolved import Assumption
from strategist.records import dataclass

MIN_SAVING = 2
"""PowerSGD leaves a matrix alone that its factors would not make this many times smaller (PowerSGDState, min_compression_rate)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor:
    """A row of the catalogue. `element_bytes` of each element that is sent, `cost_bytes` that a device's memory moves for each
    gradient, `products` for each element of a matrix that is multiplied; `remembers` what it leaves out."""

    name: str
    rank: int
    share: float
    element_bytes: int
    remembers: bool
    cost_bytes: int
    products: int
    behind: str
    sentence: str
    source: str


@cache
def compressor(name: str) -> Compressor:
    """One of the rows."""
    return next(Compressor(**row) for row in rows("compression") if row["name"] == name)


def loss_of_exactness(name: str) -> Assumption:
    """What somebody who asks for compression takes as given."""
    row = compressor(name)
    return Assumption(
        what="gradients are not exact",
        value=f"{row.sentence}; training reaches the same loss",
        flag="--pin compression",
        source=row.source,
    )


def sent_of_largest(elements: int, share: float) -> int:
    """How many elements of a bucket top-k sends."""
    return max(1, round(share * elements))


@dataclass(frozen=True, slots=True)
class LowRank:
    """Elements of a model's gradients: those that PowerSGD sends as they are, those that it multiplies, and those of all left and
    all right factors."""

    rest: int
    compressed: int
    left: int
    right: int


@cache
def low_rank(shape: ModelShape, rank: int) -> LowRank:
    """How PowerSGD divides the gradients of a model that is trained whole. A tensor is a matrix of its first dimension against all
    others (powerSGD_hook.py, _should_compress)."""
    compressed = left = right = 0
    for height, width, number in _matrices(shape):
        own = min(height, width, rank)
        if (height + width) * own * MIN_SAVING < height * width:
            compressed += number * height * width
            left, right = left + number * height * own, right + number * width * own
    return LowRank(count(shape).total - compressed, compressed, left, right)


def _matrices(shape: ModelShape) -> Iterator[tuple[int, int, int]]:
    """(first dimension, product of the others, how many) of all tensors of at least two dimensions."""
    for kind, layers in layer_counts(shape).items():
        for matrix in build_layer(shape, kind).matrices:
            if matrix.is_expert:  # one tensor for all experts, their hidden width first
                is_column = matrix.cut == "column"
                inner, outer = (matrix.outputs, matrix.inputs) if is_column else (matrix.inputs, matrix.outputs)
                yield inner, matrix.copies * outer, layers
            else:
                yield matrix.outputs, matrix.inputs, layers * matrix.copies
    yield shape.vocab, table_width(shape), 1 if shape.tied else 2
    if shape.pos_rows and outer_parameters(shape).position:
        yield shape.pos_rows, outer_parameters(shape).position // shape.pos_rows, 1
