"""What one rank of each stage holds and works on. Columns of candidates (C) against stages (S) and layer sorts (K).

Candidates are taken in groups that share `pp` and `virtual_stages`, so that the layers of every stage are one small
table and everything else broadcasts against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strategist.facts.layers import Layer, Matrix, build_layer, norm_size
from strategist.facts.model import LayerKind, ModelShape
from strategist.facts.parameters import outer_parameters
from strategist.space.candidates import Candidates, Column, Reals
from strategist.space.stages import kinds, representative_stages, stage_layer_counts

LAST_PARTS = ("head", "head_bias", "final_norm")
"""Outer weights that live on the last stage; all others live on the first."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Candidates with one `pp` and one `virtual_stages`. `rows` are their places in the whole list, `stages` the
    stage numbers looked at, `layers_SK` the layers of each sort on each of them."""

    rows: Column
    candidates: Candidates
    pp: int
    stages: Column
    layers_SK: Column

    @property
    def is_first(self) -> NDArray[np.bool_]:
        """Stages that hold the embedding, shape (S,)."""
        return self.stages == 0

    @property
    def is_last(self) -> NDArray[np.bool_]:
        """Stages that hold the head and the loss, shape (S,)."""
        return self.stages == self.pp - 1

    def layers_of(self, values_CK: Reals) -> Reals:
        """Sum over the layers of each stage of a per-layer amount: (C, K) to (C, S)."""
        return values_CK @ self.layers_SK.T.astype(np.float64)


def groups(shape: ModelShape, candidates: Candidates, *, every_stage: bool = False) -> Iterator[Group]:
    """The candidates in blocks of equal `pp` and `virtual_stages`."""
    keys = candidates["pp"] * 2**20 + candidates["virtual_stages"]
    for key in np.unique(keys).tolist():
        pp, virtual = divmod(key, 2**20)
        rows = np.flatnonzero(keys == key)
        stages = np.arange(pp) if every_stage else representative_stages(shape, pp)
        yield Group(rows, candidates.where(rows), pp, stages, stage_layer_counts(shape, pp, virtual)[stages])


def distinct(evaluate: Callable[..., Reals], *columns: Column) -> Reals:
    """`evaluate` on the distinct rows of some columns only, spread back: a few hundred rows stand for a million."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return evaluate(*(column[first] for column in columns))[inverse]


def ceil_div(value: Column | int, divisor: Column | int) -> Column:
    """Whole-number division rounded up."""
    return -(-np.asarray(value, np.int64) // divisor)


def matrix_elements(matrix: Matrix, tp: Column, shards: Column) -> Column:
    """Elements of one copy of a matrix on the fullest rank: cut by `tp`, then sharded over dim 0 with padding, shape (C,).

    Source: torch.distributed.fsdp.fully_shard shards every parameter on dim 0 and pads to equal pieces.
    """
    rows = ceil_div(matrix.outputs, tp) if matrix.cut == "column" else np.full_like(tp, matrix.outputs)
    width = ceil_div(matrix.inputs, tp) if matrix.cut == "row" else matrix.inputs
    bias = ceil_div(rows, shards) if matrix.bias else 0
    return ceil_div(rows, shards) * width + bias


def dense_elements(layer: Layer, tp: Column, shards: Column) -> Reals:
    """Elements of one layer on the fullest rank, routed experts left out, shape (C,)."""
    total = np.zeros(len(tp), np.int64)
    for matrix in layer.matrices:
        if not matrix.is_expert:
            total += matrix.copies * matrix_elements(matrix, tp, shards)
    for vector in layer.vectors:
        size = np.asarray(vector.size if not vector.cut else ceil_div(vector.size, tp))
        total += np.sign(size) * ceil_div(np.abs(size), shards)
    return total.astype(np.float64)


def expert_elements(layer: Layer, ep: Column, etp: Column, shards: Column) -> Reals:
    """Elements of the routed experts of one layer on the fullest rank, shape (C,)."""
    total = np.zeros(len(ep), np.float64)
    for matrix in layer.matrices:
        if matrix.is_expert:
            total += ceil_div(matrix.copies, ep) * matrix_elements(matrix, etp, np.ones_like(ep)) / shards
    return total


def layers(shape: ModelShape) -> tuple[Layer, ...]:
    """One built layer per sort, in the order of `kinds`."""
    return tuple(build_layer(shape, kind) for kind in kinds(shape))


def layer_kinds(shape: ModelShape) -> tuple[LayerKind, ...]:
    """The sorts of layers, in column order (K)."""
    return kinds(shape)


def state_shards(candidates: Candidates) -> Column:
    """Ranks that share one copy of the dense weights' state under ZeRO, shape (C,)."""
    return candidates["dp_shard"] * candidates["cp"]


def dense_CK(shape: ModelShape, candidates: Candidates, shards: Column) -> Reals:
    """Dense elements of one layer of each sort on the fullest rank, (C, K)."""
    columns = [
        distinct(lambda tp, n, layer=layer: dense_elements(layer, tp, n), candidates["tp"], shards)
        for layer in layers(shape)
    ]
    return np.stack(columns, axis=1)


def expert_CK(shape: ModelShape, candidates: Candidates, shards: Column) -> Reals:
    """Routed-expert elements of one layer of each sort on the fullest rank, (C, K)."""
    if shape.moe is None:
        return np.zeros((len(candidates), len(kinds(shape))))
    columns = [
        distinct(
            lambda ep, etp, n, layer=layer: expert_elements(layer, ep, etp, n),
            candidates["ep"],
            candidates["etp"],
            shards,
        )
        for layer in layers(shape)
    ]
    return np.stack(columns, axis=1)


def outer_elements(shape: ModelShape, tp: Column, shards: Column) -> tuple[Reals, Reals]:
    """Elements outside the layers on the fullest rank of the first and of the last stage, each (C,).

    The vocabulary is cut by `tp` (rows of the embedding, columns of the head); the rest is whole. A tied head is the
    embedding again on another stage, so it is counted there too when the two stages differ.
    """
    parts = outer_parameters(shape)
    vocabulary_row = parts.get("embedding", 0) // shape.vocab if shape.vocab else 0
    cut = ceil_div(ceil_div(shape.vocab, tp), shards) * vocabulary_row
    whole = sum(size for name, size in parts.items() if name not in LAST_PARTS and name != "embedding")
    first = cut + ceil_div(whole, shards)
    head = ceil_div(ceil_div(shape.vocab, tp), shards) * shape.hidden if shape.vocab and _has_head(shape) else 0
    last = head + ceil_div(norm_size(shape, shape.hidden) if shape.final_norm else 0, shards)
    return first.astype(np.float64), np.broadcast_to(last, first.shape).astype(np.float64)


def _has_head(shape: ModelShape) -> bool:
    return shape.kind not in ("vit",)
