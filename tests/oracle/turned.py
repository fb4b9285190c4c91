"""Muon, one matrix at a time: what the matrices inside the layers hold, send and cost (docs/memory_model.md, docs/time_model.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strategist.facts.job import Job
from strategist.facts.layers import build_layer
from strategist.facts.model import LayerKind
from strategist.facts.profile import BYTES
from tests.oracle.parameters import held, shards, up
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


def owners(layout: Layout) -> int:
    """Ranks among which the rows of a matrix are dealt."""
    return shards(layout) if layout["zero"] >= 2 else 1


def owned(job: Job, layout: Layout, kinds: Sequence[LayerKind]) -> int:
    """Elements whose momentum the first of them has."""
    return sum(up(rows, owners(layout)) * columns for rows, columns in sizes(job, kinds))


def state_bytes(job: Job, layout: Layout, kinds: Sequence[LayerKind], elements: float) -> float:
    """A momentum in four bytes for each of those, AdamW's two moments for the other elements of a rank."""
    momenta = owned(job, layout, kinds)
    return 4.0 * momenta + 8.0 * (elements - momenta)


def turning_bytes(job: Job, layout: Layout, kinds: Sequence[LayerKind]) -> float:
    """The largest matrix as it came, what the last iteration reads and what it writes, and two squares of the shorter side."""
    n = owners(layout)
    return max(
        (
            2.0 * (n * up(rows, n) * columns + 2 * rows * columns + 2 * min(rows, columns) ** 2)
            for rows, columns in sizes(job, kinds)
        ),
        default=0.0,
    )


def sent(job: Job, layout: Layout, kinds: Sequence[LayerKind]) -> tuple[float, int]:
    """Bytes that the ranks of a stage gather for all of its matrices, and in how many messages."""
    n, every = owners(layout), list(sizes(job, kinds))
    return sum(2.0 * n * up(rows, n) * columns for rows, columns in every), len(every)


def seconds(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> float:
    """The update of one stage."""
    gpu, formats = job.cluster.slowest.gpu, job.formats
    n, own = owners(layout), owned(job, layout, kinds)
    rest = held(job.model, layout, stage, kinds, sharded=layout["zero"] >= 1).all - own
    s, g = BYTES[formats.parameter], BYTES[formats.gradient]
    whole = sum(n * up(rows, n) * columns for rows, columns in sizes(job, kinds))
    moved = (OWN_BYTES + g) * own + WHOLE_BYTES * whole + (2 * (s + 8) + 2 * g) * rest
    precision = "bf16" if peak_FLOPs(gpu, "bf16") else "fp32"
    turning = 0.0
    for rows, columns in sizes(job, kinds):
        short, long = float(min(rows, columns)), float(max(rows, columns))
        for size in ((short, short, long), (short, short, short), (short, long, short)):
            turning += 5 * matmul_seconds(gpu, precision, "bfloat16", size)
    return moved / memory_Bps(gpu) + turning
