"""The matrices inside the layers, which Muon turns whole, as columns of candidates (C) against stages (S) and sorts of layer (K).

Newton-Schulz iterations (Jordan et al. 2024, kellerjordan.github.io/posts/muon) work on the matrix with n <= m for its sides: X, of
n x m, is five times replaced by a X + (b A + c A A) X with A = X X^T. Ranks that hold rows of a matrix gather it first, in bfloat16
(Liu et al. 2025, arXiv 2502.16982, section 2.3), and those that tensor parallelism gave parts of it gather these then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from strategist.facts.layers import Layer
from strategist.facts.model import ModelShape
from strategist.facts.profile import BYTES
from strategist.records import dataclass
from strategist.space.candidates import Candidates, Column, Mask, Reals
from strategist.space.shares import Group, ceil_div, layers, matrices_of, matrix_shape, state_shards

WIDTH = BYTES["bfloat16"]
"""Bytes of a number of the iterations, whatever the job computes in (PyTorch 2.13 torch/optim/_muon.py)."""
ITERATIONS = 5
"""Jordan et al. 2024; torch's default."""


@dataclass(frozen=True, slots=True, eq=False)
class Turned:
    """The matrices of one layer, (C, M) each: rows and width of one that is whole, elements of the part that tensor parallelism leaves
    a rank, with those that fill up the shards, whether it leaves parts, and how many there are, (M,)."""

    rows: Column
    width: Column
    gathered: Column
    is_cut: Mask
    copies: Column

    @property
    def came(self) -> Column:
        """Elements of one as it comes to the iterations: parts are put together without what fills up shards."""
        return np.where(self.is_cut, self.rows * self.width, self.gathered)

    @property
    def short(self) -> Column:
        """The shorter side."""
        return np.minimum(self.rows, self.width)

    @property
    def long(self) -> Column:
        """The longer side."""
        return np.maximum(self.rows, self.width)


def turned(layer: Layer, c: Candidates) -> Turned:
    """The matrices of a layer, without what a bias adds to a row; filled up where ranks share them."""
    (rows, wide), m = matrix_shape(layer, c), matrices_of(layer)
    shards = np.where(c["zero"] >= 2, state_shards(c), 1)[:, None]
    every = np.ones_like(rows)
    return Turned(
        rows=every * m.outputs,
        width=every * m.inputs,
        gathered=ceil_div(rows, shards) * shards * (wide - m.bias),
        is_cut=(c["tp"] > 1)[:, None] & (m.is_column | m.is_row),
        copies=m.copies,
    )


def elements_CS(shape: ModelShape, group: Group) -> Reals:
    """Elements of a rank's parts of such matrices on each stage, with padding where ranks share them."""
    return _sums(shape, group, lambda t: t.gathered)


def came_CS(shape: ModelShape, group: Group) -> Reals:
    """Elements of them as they come to the iterations."""
    return _sums(shape, group, lambda t: t.came)


def cut_CS(shape: ModelShape, group: Group) -> tuple[Reals, Reals]:
    """Elements of those of which tensor parallelism leaves parts, whole, and how many they are."""
    elements = _sums(shape, group, lambda t: t.is_cut * t.rows * t.width)
    return elements, _sums(shape, group, lambda t: 1 * t.is_cut)


def owned_CS(shape: ModelShape, group: Group) -> Reals:
    """Elements of them whose momentum a rank has."""
    shards = np.where(group.candidates["zero"] >= 2, state_shards(group.candidates), 1)[:, None]
    return elements_CS(shape, group) / shards


def number_CS(shape: ModelShape, group: Group) -> Reals:
    """How many of them a stage has."""
    return _sums(shape, group, lambda t: np.ones_like(t.rows))


def bytes_of_one(rows: Column | int, width: Column | int, came: Column | int) -> Any:
    """Bytes that turning a matrix holds: the elements that `came`, X and what replaces it, A and b A + c A A."""
    return WIDTH * (came + 2.0 * rows * width + 2.0 * np.minimum(rows, width) ** 2)


def largest_bytes_CS(shape: ModelShape, group: Group) -> Reals:
    """Bytes that turning the largest one of a stage holds."""
    each = [bytes_of_one(t.rows, t.width, t.came).max(axis=1, initial=0.0) for t in _of_layers(shape, group)]
    on_stages = [np.where(group.layers_SK[:, sort] > 0, held[:, None], 0.0) for sort, held in enumerate(each)]
    return np.max(on_stages, axis=0)


def _sums(shape: ModelShape, group: Group, of_each: Callable[[Turned], Column]) -> Reals:
    each = [(of_each(t) @ t.copies).astype(np.float64) for t in _of_layers(shape, group)]
    return group.layers_of(np.stack(each, axis=1))


def _of_layers(shape: ModelShape, group: Group) -> list[Turned]:
    return [turned(layer, group.candidates) for layer in layers(shape)]
