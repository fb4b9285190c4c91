"""Tables of embeddings that a parameter server holds: what they take off the ranks, and what rows cost (docs/memory_model.md, Tables on
a server; docs/time_model.md)."""

from __future__ import annotations

from strategist.facts.job import Job
from strategist.facts.model import ModelShape
from strategist.facts.parameters import outer_parameters, table_width
from strategist.facts.profile import BYTES
from tests.oracle.rates import share
from tests.oracle.stages import Layout


def is_served(layout: Layout) -> bool:
    """Whether a server holds the layout's tables."""
    return layout.get("tables") == "server"


def sides_of_tables(shape: ModelShape) -> list[tuple[int, int]]:
    """(rows, width) of what a server can hold: a decoder's tokens where its head has a weight of its own, all of a module's tables."""
    if shape.kind == "module":
        return list(shape.tables)
    return [(shape.vocab, table_width(shape))] if shape.vocab and shape.formula == "stack" and not shape.tied else []


def gone(shape: ModelShape, layout: Layout) -> tuple[int, int]:
    """Elements that are not on the ranks, in front of the layers and behind them."""
    every = sum(rows * width for rows, width in sides_of_tables(shape)) if is_served(layout) else 0
    in_front = min(every, outer_parameters(shape).embedding)
    return in_front, every - in_front


def named(job: Job, layout: Layout) -> tuple[float, float, float]:
    """Ids, rows and elements that a micro-batch names at most, of all tables."""
    ids, sides = layout["micro_batch"] * job.workload.seq_len, sides_of_tables(job.model)
    rows = [min(ids, most) for most, _ in sides]
    return ids * len(sides), sum(rows), sum(n * width for n, (_, width) in zip(rows, sides, strict=True))


def kept(job: Job, layout: Layout) -> float:
    """Bytes of a micro-batch until its backward: a number for each row and for each id."""
    return 8 * sum(named(job, layout)[:2]) if is_served(layout) else 0.0


def rows_bytes(job: Job, layout: Layout) -> float:
    """Bytes of a micro-batch's rows."""
    return BYTES[job.formats.parameter] * named(job, layout)[2]


def host_bytes(job: Job, layout: Layout, state: float) -> float:
    """Bytes on the host in the share of a rank: weights, gradients and `state` of an element."""
    each = BYTES[job.formats.parameter] + BYTES[job.formats.gradient] + state
    return each * sum(gone(job.model, layout)) / layout["dp_replicate"]


def seconds(job: Job, layout: Layout, touched: float) -> float:
    """Seconds of a step: rows and gradients over the host link; the server's memory, which reads and writes every worker's rows, adds
    their gradients up (two reads, a write), updates its tables (`touched` bytes an element), and goes over their gradients four times."""
    gpu = job.cluster.slowest.gpu
    link = (gpu.host_Bps or gpu.memory_Bps) * share("host_link_share", gpu)
    rows, m = rows_bytes(job, layout), layout["accumulation"]
    over_link = m * 2 * (rows + 8 * named(job, layout)[1]) / link
    own = (touched + 4 * BYTES[job.formats.gradient]) * sum(gone(job.model, layout))
    return over_link + (m * layout["dp_replicate"] * (2 + 3) * rows + own) / share("host_update_Bps", gpu)
