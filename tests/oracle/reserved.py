"""What the caching allocator reserves on one stage of one layout (docs/memory_model.md, Reserved memory)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from strategist.facts.job import Job
from strategist.facts.model import LayerKind
from strategist.facts.profile import BYTES
from tests.oracle import adapters
from tests.oracle.parameters import Held, held, padded, vocabulary
from tests.oracle.stages import Layout, last_stage
from tests.oracle.tiles import tiles_of

PAGE = 2**21
"""Large segments are whole numbers of pages."""


def by_blocks(job: Job) -> bool:
    """Whether blocks are known: units, and segments that do not grow."""
    return job.profile.has_units and job.profile.segments == "fixed"


def reserved(
    job: Job,
    layout: Layout,
    stage: int,
    kinds: Sequence[LayerKind],
    *,
    at_loss: float,
    ever: float,
    let_go: float,
    settled: float,
    in_units: bool,
) -> float:
    """Bytes of the three streams. Tensors hold `at_loss` at the loss and `ever` at most; forward lets go of `let_go` per layer."""
    w = (
        padded(job.model, layout, stage, kinds)
        if layout["zero"] >= 2
        else held(job.model, layout, stage, kinds, sharded=False)
    )
    c, r, s = (BYTES[f] for f in (job.formats.compute, job.formats.reduce, job.formats.parameter))
    pp, n = layout["pp"], layout["dp_shard"] * layout["cp"]
    layer, units = w.widest / (layout["tiling"] if tiles_of(job.model, layout) == 1 else 1), _outer_units(job, w, pp)
    largest = max(layer, *units)
    reduces = in_units and (pp == 1 or n * layout["dp_replicate"] > 1)
    stands = reduces and pp == 1 and layout["accumulation"] > 1 and not job.profile.accumulates_whole
    parts = n if layout["zero"] >= 2 else 1

    gather = 0.0
    if in_units and layout["zero"] >= 2 and n > 1:
        first, one, head = (_pages(c * size) for size in (units[0], adapters.travelling(job) * layer, units[1]))
        gather = first + one * (1 if first >= one else min(2, len(kinds))) + (head if head > one else 0)
        gather += c * largest / n if c != s else 0
    reduce = (settled if reduces else 0.0) + (job.trainable * r * largest / parts if stands else 0.0)

    decoded = job.workload.target_len if job.model.enc_layers else None
    rows = layout["micro_batch"] * (decoded or job.workload.seq_len) / layout["cp"]
    if layout.get("loss") == "chunked":
        rows = ceil(rows / ceil(job.model.vocab / job.model.hidden))
    entries = rows * -(-job.model.vocab // layout["tp"])
    entries *= stage == last_stage(layout)
    row = job.profile.keeping
    copied = max(0.0, row.forward_compute - row.backward_compute) * c * entries
    idle = let_go + (copied if c < 4 and row.backward_float32 > row.forward_float32 else 0.0)
    on_its_way = c * adapters.travelling(job) * layer if in_units and layout["zero"] >= 3 else 0.0

    request = job.trainable * r * largest if reduces else 0.0
    if not in_units and layout["zero"] < 2 and layout["tp"] == pp == 1 and c != s:
        request = job.trainable * s * vocabulary(job.model, 1, 1)
    largest_of_loss = entries * (4 if row.forward_float32 else c)
    outgrown = request if request > largest_of_loss else 0.0

    main = max(
        at_loss - (settled if stands else 0.0) + idle + on_its_way + outgrown,
        ever - (settled if reduces else 0.0) - (on_its_way if n > 1 else 0.0),
    )
    return main + gather + reduce


def _outer_units(job: Job, w: Held, pp: int) -> tuple[float, float]:
    """Elements of the units of the embedding and of norm with head; tied ends are one without a pipeline."""
    return (w.before + w.behind, 0.0) if job.model.tied and pp == 1 else (w.before, w.behind)


def _pages(size: float) -> float:
    return PAGE * ceil(size / PAGE)
