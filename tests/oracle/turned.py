"""Muon, one matrix at a time: what the matrices inside the layers hold, send and cost (docs/memory_model.md, docs/time_model.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from strategist.facts.job import Job
from strategist.facts.layers import build_layer
from strategist.facts.model import LayerKind
from strategist.facts.profile import BYTES
from tests.oracle.parameters import held, shards, tensors_of, up
from tests.oracle.rates import matmul_seconds, memory_Bps, peak_FLOPs
from tests.oracle.stages import Layout

OWN_BYTES = 3 * 4 + 3 * 4 + (4 + 2) + 2 * 4 + (4 + 2 + 4)
"""Read and written per element of this rank's rows: the momentum; Nesterov's direction; that in two bytes; decay; the weight."""
WHOLE_BYTES = 2 + 2 * 2
"""And of the whole matrix before the iterations: its norm, and the division by it."""


def sizes(job: Job, kinds: Sequence[LayerKind]) -> Iterator[tuple[int, int]]:
    """(rows, columns) of every matrix of some layers."""
    for kind in kinds:
        for matrix in build_layer(job.model, kind).matrices:
            yield from [(matrix.outputs, matrix.inputs)] * matrix.copies


def parts(job: Job, layout: Layout, kinds: Sequence[LayerKind]) -> Iterator[tuple[int, int, int, int]]:
    """(rows, columns) of every matrix, and of what tensor parallelism leaves a rank of it."""
    tp = layout["tp"]
    for kind in kinds:
        for matrix in build_layer(job.model, kind).matrices:
            rows, columns = matrix.outputs, matrix.inputs
            own = up(rows, tp if matrix.cut == "column" else 1), up(columns, tp if matrix.cut == "row" else 1)
            yield from [(rows, columns, *own)] * matrix.copies


def _came(rows: int, columns: int, own_rows: int, own_columns: int, n: int) -> int:
    """Elements of a matrix that its owners, and then the ranks that it was cut for, have put together."""
    is_cut = (rows, columns) != (own_rows, own_columns)
    return rows * columns if is_cut else n * up(rows, n) * columns


def owners(layout: Layout) -> int:
    """Ranks among which the rows of a matrix are dealt."""
    return shards(layout) if layout["zero"] >= 2 else 1


def owned(job: Job, layout: Layout, kinds: Sequence[LayerKind]) -> int:
    """Elements whose momentum the first of them has."""
    return sum(up(rows, owners(layout)) * columns for _, _, rows, columns in parts(job, layout, kinds))


Lot = tuple[list[int], list[tuple[int, int]]]
"""The sizes of what a rank is dealt beside hidden matrices, and the sides of the matrices it is dealt."""


def deal(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> list[Lot]:
    """ZeRO-1 deals all other tensors, the largest first, each to the first rank with least; then the matrices."""
    found: list[Lot] = [([], []) for _ in range(shards(layout))]
    loads = [0] * len(found)
    matrices = sorted(sizes(job, kinds), key=lambda sides: -sides[0] * sides[1])
    others = tensors_of(job.model, layout, stage, kinds, experts=False)
    for rows, columns in matrices:
        others.remove(rows * columns)
    for size in sorted(others, reverse=True):
        rank = loads.index(min(loads))
        found[rank][0].append(size)
        loads[rank] += size
    for rows, columns in matrices:
        rank = loads.index(min(loads))
        found[rank][1].append((rows, columns))
        loads[rank] += rows * columns
    return found


def _resting(lot: Lot) -> float:
    return 8.0 * sum(lot[0]) + 4.0 * sum(rows * columns for rows, columns in lot[1])


def state_bytes(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind], elements: float) -> float:
    """A momentum in four bytes for each of those, AdamW's two moments for the other elements of a rank; of whole tensors, what the
    rank with most has."""
    if layout["zero"] == 1:
        return max(_resting(lot) for lot in deal(job, layout, stage, kinds))
    momenta = owned(job, layout, kinds)
    return 4.0 * momenta + 8.0 * (elements - momenta)


def turning_bytes(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> float:
    """The largest matrix as it came, what the last iteration reads and what it writes, and two squares of the shorter side. Where
    whole tensors are dealt out: by how much the worst rank then has more than the one with most state."""
    if layout["zero"] == 1:
        lots = deal(job, layout, stage, kinds)
        turning = [max((6.0 * a * b + 4.0 * min(a, b) ** 2 for a, b in lot[1]), default=0.0) for lot in lots]
        at_most = max(_resting(lot) + most for lot, most in zip(lots, turning, strict=True))
        return at_most - max(_resting(lot) for lot in lots)
    n = owners(layout)
    return max(
        (
            2.0 * (_came(rows, columns, *own, n) + 2 * rows * columns + 2 * min(rows, columns) ** 2)
            for rows, columns, *own in parts(job, layout, kinds)
        ),
        default=0.0,
    )


def sent(job: Job, layout: Layout, kinds: Sequence[LayerKind]) -> tuple[float, int]:
    """Bytes that the owners of a stage's parts of matrices gather for all of them, and in how many messages."""
    n, every = owners(layout), list(parts(job, layout, kinds))
    return sum(2.0 * n * up(rows, n) * columns for _, _, rows, columns in every), len(every)


def put_together(job: Job, layout: Layout, kinds: Sequence[LayerKind]) -> tuple[float, int]:
    """The same of the ranks that matrices were cut for."""
    cut = [rows * columns for rows, columns, *own in parts(job, layout, kinds) if [rows, columns] != own]
    return 2.0 * sum(cut), len(cut)


def seconds(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> float:
    """The update of one stage, on the slowest rank where whole tensors are dealt out."""
    if layout["zero"] == 1:
        return max(
            _moving(job, held_, held_, sum(others)) + _turning(job, matrices)
            for others, matrices in deal(job, layout, stage, kinds)
            for held_ in (sum(rows * columns for rows, columns in matrices),)
        )
    n, own = owners(layout), owned(job, layout, kinds)
    rest = held(job.model, layout, stage, kinds, sharded=layout["zero"] >= 1).all - own
    whole = sum(_came(*sides, n) for sides in parts(job, layout, kinds))
    return _moving(job, own, whole, rest) + _turning(job, sizes(job, kinds))


def _moving(job: Job, own: float, whole: float, rest: float) -> float:
    s, g = BYTES[job.formats.parameter], BYTES[job.formats.gradient]
    moved = (OWN_BYTES + g) * own + WHOLE_BYTES * whole + (2 * (s + 8) + 2 * g) * rest
    return moved / memory_Bps(job.cluster.slowest.gpu)


def _turning(job: Job, matrices: Iterable[tuple[int, int]]) -> float:
    """Five times three products for each matrix."""
    gpu, turning = job.cluster.slowest.gpu, 0.0
    precision = "bf16" if peak_FLOPs(gpu, "bf16") else "fp32"
    for rows, columns in matrices:
        short, long = float(min(rows, columns)), float(max(rows, columns))
        for size in ((short, short, long), (short, short, short), (short, long, short)):
            turning += 5 * matmul_seconds(gpu, precision, "bfloat16", size)
    return turning
