"""Slices of tiled matrices, one at a time, and the instants of a layer that works slice by slice (docs/memory_model.md, Tiles)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strategist.facts.layers import Matrix, build_layer
from strategist.facts.model import LayerKind, ModelShape
from tests.oracle.stages import Layout


def tiles_of(shape: ModelShape, layout: Layout) -> int:
    """In how many slices the largest matrix of a layer is gathered and given back; 1 where nothing is sliced."""
    sliced = layout["zero"] == 3 and layout["pp"] == 1 and shape.moe is None
    return int(layout["tiling"]) if sliced else 1


def up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def slices(shape: ModelShape, kind: LayerKind, matrix: Matrix, tiles: int, tp: int) -> list[tuple[int, int]]:
    """(rows, elements of a row with that of the bias) of each slice of one copy of a matrix."""
    largest = max(m.outputs * m.inputs for m in build_layer(shape, kind).matrices)
    count = min(matrix.outputs, max(1, up(tiles * matrix.outputs * matrix.inputs, largest)))
    rows = up(matrix.outputs, tp) if matrix.cut == "column" else matrix.outputs
    width = (up(matrix.inputs, tp) if matrix.cut == "row" else matrix.inputs) + matrix.bias
    return [(rows // count + (number < rows % count), width) for number in range(count)]


def sliced_elements(shape: ModelShape, kind: LayerKind, matrix: Matrix, tiles: int, tp: int, k: int) -> int:
    """One matrix on the fullest of k shards."""
    return matrix.copies * sum(up(rows, k) * width for rows, width in slices(shape, kind, matrix, tiles, tp))


def largest_slice(shape: ModelShape, kind: LayerKind, tiles: int, tp: int, k: int, name: str = "") -> int:
    """Elements of the largest slice of a layer, or of one of its matrices, with the padding of k shards."""
    chosen = [m for m in build_layer(shape, kind).matrices if name in ("", m.name)]
    found = (k * up(r, k) * w for m in chosen for r, w in slices(shape, kind, m, tiles, tp))
    return max(found, default=0)


def units(shape: ModelShape, layout: Layout, kind: LayerKind) -> int:
    """Units that a layer is."""
    layer, tiles = build_layer(shape, kind), tiles_of(shape, layout)
    if tiles == 1:
        return 1
    own = sum(m.copies * len(slices(shape, kind, m, tiles, layout["tp"])) for m in layer.matrices)
    return own + bool(layer.vectors)


def repeated(shape: ModelShape, layout: Layout, kind: LayerKind, k: int) -> tuple[int, int]:
    """Elements and number of the slices that a layer which is computed again gathers a third time: all but the last one of all."""
    tiles, tp = tiles_of(shape, layout), layout["tp"]
    every = [
        k * up(rows, k) * width
        for matrix in build_layer(shape, kind).matrices
        for _ in range(matrix.copies)
        for rows, width in slices(shape, kind, matrix, tiles, tp)
    ]
    return sum(every[:-1]), len(every) - 1


@dataclass(frozen=True)
class Turn:
    """A matrix at work: how many bytes its input's gradient takes, what else is there, what is gone."""

    name: str
    adds: float
    beside: float
    freed: float


def layer_in_slices(
    stage: Any, kind: LayerKind
) -> Iterator[tuple[bool, float, float, float, float, float, float, float]]:
    """(is what lies above the layer in reduction, temporaries, freed bytes, the slice with a gradient, that gradient, the slice
    gathered next, the one in reduction, elements whose gradients are reduced) at every instant of a layer of this sort."""
    shape, a = stage.job.model, stage.a
    tiles, n = tiles_of(shape, a), stage.n
    matrices = {m.name: m for m in build_layer(shape, kind).matrices}

    def large(name: str, ranks: int = n) -> int:
        return largest_slice(shape, kind, tiles, a["tp"], ranks, name) if name in matrices else 0

    turns = list(_turns(stage, kind))
    behind_down, attention = stage._feed_forward(kind), stage._attention(kind)
    reduced = before = 0
    for number, turn in enumerate(turns):
        own = large(turn.name)
        below = large(turns[number + 1].name) if number + 1 < len(turns) else 0
        count = len(slices(shape, kind, matrices[turn.name], tiles, a["tp"])) if turn.name in matrices else 0
        whole = n * sliced_elements(shape, kind, matrices[turn.name], tiles, a["tp"], n) if count else 0
        above, first, bare = before, number == 0, large(turn.name, 1)
        adds = [turn.beside + times * turn.adds for times in (1, 2)]
        yield first, adds[0], turn.freed, own, bare, own if count > 1 else below, above, reduced
        for left in range(min(count - 1, 2)):  # slices that are left behind this one
            following, late = own if left else below, reduced + whole - own * (1 + left)
            yield False, adds[1], turn.freed, own, bare, following, own, late
        reduced, before = reduced + whole, own
        at = {"down": behind_down, "o": attention}.get(turn.name)
        if at is not None:
            yield False, at.temporaries, at.freed, 0, 0, below, own, reduced


def _turns(stage: Any, kind: LayerKind) -> Iterator[Turn]:
    """From the last matrix to the first."""
    from tests.oracle.memory import _again, _kept, _used

    shape, a, whole = stage.job.model, stage.a, stage.whole
    per_head = stage.T * stage.c * shape.head_dim / a["tp"]
    queries, keys = per_head * shape.heads, per_head * shape.kv_heads
    last, inputs, first = stage._last_matrix(kind), stage._inputs(kind), stage._attention_inputs(kind)
    product = stage._product(kind)
    yield Turn("down", product, last.temporaries - product, last.freed)
    if shape.mlp_gated:
        yield Turn("gate", whole, inputs.temporaries + product - 2 * whole, inputs.freed)
    yield Turn("up", whole, inputs.temporaries - whole, inputs.freed)
    freed = stage._rows(kind, _kept, "ffn", "inside", "product") + stage._rows(kind, _used, "mixer")
    yield Turn("o", queries, stage.stream + stage._rows(kind, _again, "mixer", "exchanged"), freed)
    rest = first.temporaries - whole
    yield Turn("v", whole, rest - whole + 2 * keys, first.freed)
    yield Turn("k", whole, rest + keys, first.freed)
    yield Turn("q", whole, rest, first.freed)
