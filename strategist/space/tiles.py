"""Slices of tiled matrices as columns of candidates (C) against the matrices of a layer (M): how many, and how large.

Only layouts whose units are gathered and given back one by one have slices: see `space.shares.groups`.
"""

from __future__ import annotations

import numpy as np

from strategist.facts.layers import Layer
from strategist.facts.model import ModelShape
from strategist.facts.tiling import slices_of
from strategist.space.candidates import Candidates, Column, Reals
from strategist.space.shares import ceil_div, layers, matrices_of, matrix_shape, vector_elements


def slices_CM(layer: Layer, c: Candidates) -> Column:
    """Slices of each matrix."""
    m = matrices_of(layer)
    sizes = m.outputs * m.inputs
    return np.asarray(slices_of(m.outputs, m.inputs, max(1, int(sizes.max(initial=0))), c["tiling"][:, None]), np.int64)


def largest_CM(layer: Layer, c: Candidates, shards: Column) -> Column:
    """Elements of the largest slice of each matrix, all ranks' parts together with their padding."""
    rows, width = matrix_shape(layer, c)
    return ceil_div(ceil_div(rows, slices_CM(layer, c)), shards[:, None]) * shards[:, None] * width


def matrices_CM(layer: Layer, c: Candidates, shards: Column) -> Column:
    """Elements of each matrix on the fullest rank, each slice sharded over dim 0 with padding."""
    rows, width = matrix_shape(layer, c)
    slices = slices_CM(layer, c)
    smaller, larger = rows // slices, rows % slices
    own = larger * ceil_div(smaller + 1, shards[:, None]) + (slices - larger) * ceil_div(smaller, shards[:, None])
    return np.asarray(own * width, np.int64)


def layer_CK(shape: ModelShape, c: Candidates, shards: Column) -> Reals:
    """Elements of one layer of each sort on the fullest rank, (C, K)."""
    columns = [
        matrices_CM(layer, c, shards) @ matrices_of(layer).copies + vector_elements(layer, c, shards)
        for layer in layers(shape)
    ]
    return np.stack(columns, axis=1).astype(np.float64)


def widest_C(shape: ModelShape, c: Candidates, shards: Column) -> Reals:
    """Elements of the largest slice of any layer, (C,)."""
    return np.max([largest_CM(layer, c, shards).max(axis=1) for layer in layers(shape)], axis=0).astype(np.float64)


def rest_C(shape: ModelShape, c: Candidates, shards: Column) -> Reals:
    """Elements of what a layer has beside its matrices, which is a unit of its own, (C,)."""
    every = [vector_elements(layer, c, shards) * shards for layer in layers(shape)]
    return np.max(every, axis=0).astype(np.float64)


def units_K(shape: ModelShape, c: Candidates) -> Column:
    """Units that a layer of each sort is, (C, K): its slices, and its vectors together."""
    own = [slices_CM(layer, c) @ matrices_of(layer).copies + bool(layer.vectors) for layer in layers(shape)]
    return np.stack(own, axis=1)


def repeated_CK(shape: ModelShape, c: Candidates, shards: Column) -> tuple[Reals, Reals]:
    """Elements with padding, and number, of a layer's slices but the last one of its last matrix, (C, K) each."""
    elements, units = [], []
    for layer in layers(shape):
        slices, (rows, width) = slices_CM(layer, c), matrix_shape(layer, c)
        last = (ceil_div(rows // slices, shards[:, None]) * shards[:, None] * width)[:, -1]
        copies = matrices_of(layer).copies
        elements.append(matrices_CM(layer, c, shards) @ copies * shards - last)
        units.append(slices @ copies - 1)
    return np.stack(elements, axis=1).astype(np.float64), np.stack(units, axis=1).astype(np.float64)
