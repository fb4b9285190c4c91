"""What the search leaves out is never better than what it keeps, according to the models themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strategist.facts.job import Job
from strategist.facts.layers import build_layer
from strategist.facts.model import layer_counts
from strategist.facts.profile import BYTES
from strategist.memory.activations import whole_stream_C
from strategist.memory.buffers import overhead
from strategist.memory.estimate import peak_memory
from strategist.timing.estimate import step_times
from tests.oracle.enumerate import is_collapsed, legal_layouts
from tests.oracle.stages import Layout
from tests.oracle.test_search import ROUNDING_NS, question_of
from tests.oracle.traffic import Row, collective_seconds, link_of
from tests.strategies import candidates

QUESTIONS = (
    "llama-2-7b dgx-h100 0 4096 8 bf16",
    "olmoe-1b-7b dgx-h100 0 1024 8 bf16",
    "gpt2 ws-4x-4090:2 0 1024 8 bf16",
    "qwen2.5-7b mi300x-platform 0 2048 8 bf16",
    "llama-2-7b dgx-gb200-nvl72-tray:2 0 2048 8 bf16",
    "gpt2 cpu:4 0 1024 8 fp32",
)
"""Switches that reduce, switches that do not, meshes, PCIe, CPU ranks; 4 and 8 devices."""


ONE = 2
"""Bytes by which sums of rounded terms may differ."""


def _weighed(job: Job, rows: list[dict[str, Any]]) -> tuple[Any, Any]:
    """(device bytes, step nanoseconds) of every layout."""
    columns = candidates(rows)
    return peak_memory(job, columns).device, step_times(job, columns).step


def _left_out(job: Job) -> list[dict[str, Any]]:
    """Legal layouts that the search does not look at, tiling apart."""
    return [a for a in legal_layouts(job) if a["tiling"] == 1 and is_collapsed(job, a, tiled=True)]


@pytest.mark.slow
@pytest.mark.parametrize("words", QUESTIONS)
def test_gpipe_is_never_better_than_1f1b(words: str) -> None:
    """With enough micro-batches 1F1B takes exactly as long as GPipe and holds no more, but for one gradient on its way to the
    stage before: torch's 1F1B sends it together with what it receives next, and so holds it through the next pass. Under
    ZeRO-3 it gathers norm and head for forward beside gradients that stand, which GPipe has given back by then: it holds as
    much more at most, and gathers them once more, which may take as long as that does."""
    job = question_of(words)
    dropped = [a for a in _left_out(job) if a["schedule"] == "gpipe" and a["accumulation"] >= a["pp"]]
    bytes_before, step_before = _weighed(job, dropped)
    bytes_after, step_after = _weighed(job, [a | {"schedule": "1f1b"} for a in dropped])
    one_message = whole_stream_C(job, candidates(dropped)) * (1.0 + overhead("allocator_slack"))
    behind = (job.model.vocab + 1) * job.model.hidden * BYTES[job.formats.compute] * (1.0 + overhead("allocator_slack"))
    gathered = np.array([behind / a["tp"] if a["zero"] == 3 else 0.0 for a in dropped])
    assert (bytes_after <= bytes_before + gathered + one_message + ONE).all()
    again = np.array([_head_ns(job, a) for a in dropped])
    assert (step_after + ROUNDING_NS >= step_before).all()
    assert (step_after <= step_before + again + ROUNDING_NS).all()


@pytest.mark.slow
@pytest.mark.parametrize("words", QUESTIONS)
def test_looped_bfs_takes_as_long_as_interleaving(words: str) -> None:
    """Where chunks can be interleaved, both schedules take exactly as long, but for norm and head, and a layer of every chunk, once more
    under ZeRO-3 (decision 0125); which holds less depends (decision 0087)."""
    job = question_of(words)
    dropped = [a for a in _left_out(job) if a["schedule"] == "looped_bfs"]
    _, step_before = _weighed(job, dropped)
    _, step_after = _weighed(job, [a | {"schedule": "interleaved"} for a in dropped])
    again = np.array([_head_ns(job, a) + a["virtual_stages"] * _layer_ns(job, a) for a in dropped])
    assert (step_after + ROUNDING_NS >= step_before).all()
    assert (step_after <= step_before + again).all()


def _head_ns(job: Job, a: Layout) -> float:
    """Nanoseconds of one gathering of norm and head under ZeRO-3, padding included; nothing elsewhere and where ends are tied."""
    if job.model.tied:
        return 0.0
    return _gathering_ns(job, a, -(-job.model.vocab // a["tp"]) * job.model.hidden)


def _layer_ns(job: Job, a: Layout) -> float:
    """The same of the largest layer."""
    return _gathering_ns(job, a, max(build_layer(job.model, kind).parameters for kind in layer_counts(job.model)))


def _gathering_ns(job: Job, a: Layout, elements: int) -> float:
    """Nanoseconds of gathering some elements under ZeRO-3, each rank's part with two rows more; nothing elsewhere."""
    ranks = a["dp_shard"] * a["cp"]
    if a["zero"] < 3:
        return 0.0
    weight = (elements + 2 * ranks * job.model.hidden) * BYTES[job.formats.compute]
    return ROUNDING_NS + 1e9 * collective_seconds(job.cluster, Row("dp", "all-gather", "", weight, 1, ranks, a["tp"]))


@pytest.mark.slow
@pytest.mark.parametrize("words", QUESTIONS)
def test_sequence_parallelism_is_never_worse(words: str) -> None:
    """A cut sequence holds at most what a whole one does, and where an all-reduce is no faster than the ring and nothing is
    computed again it takes no longer than its norms' gradients need, which are all-reduced.

    Where an all-reduce is faster than an all-gather and a reduce-scatter (reduction in the switch, PCIe) it may take
    longer, and the search does not look at the alternative: docs/decisions/0041-sequence-parallelism-may-cost-time.md.
    """
    job = question_of(words)
    dropped = [a for a in _left_out(job) if a["tp"] > 1 and not a["sequence_parallel"]]
    bytes_before, step_before = _weighed(job, dropped)
    bytes_after, step_after = _weighed(job, [a | {"sequence_parallel": 1} for a in dropped])
    assert (bytes_after <= bytes_before).all()
    links = [link_of(job.cluster, a["tp"], 1) for a in dropped]
    is_ring = np.array([link.all_reduce_Bps <= link.ring_Bps for link in links])
    fair = is_ring & np.array([a["recompute"] == "none" for a in dropped])
    norms = np.array([_norms_ns(job, a) for a in dropped])
    assert (step_after <= step_before + norms + ROUNDING_NS)[fair].all()


def _norms_ns(job: Job, a: Layout) -> float:
    """Nanoseconds of the all-reduce that adds up, once a step, what ranks say about weights and biases of two norms a layer and the last,
    biases of two matrices a layer, and positions; a pipeline's bubble makes it longer by its own share."""
    shape = job.model
    rows = 6 * shape.layers + 2 + shape.pos_rows
    row = Row("tp", "all-reduce", "", rows * shape.hidden * BYTES[job.formats.gradient], 1, a["tp"], 1)
    return 1e9 * (1 + (a["pp"] - 1) / a["accumulation"]) * collective_seconds(job.cluster, row)


@pytest.mark.slow
@pytest.mark.parametrize("words", QUESTIONS)
def test_tiling_never_saves_time(words: str) -> None:
    """Slices send the same bytes in more messages and compute the same products: a step takes as long or longer."""
    job = question_of(words)
    tiled = [a for a in legal_layouts(job) if a["tiling"] > 1 and a["offload"] != "nvme"]
    _, step_tiled = _weighed(job, tiled)
    _, step_whole = _weighed(job, [a | {"tiling": 1} for a in tiled])
    assert tiled
    assert (step_tiled >= step_whole).all()
