"""Bytes that are in flight or belong to nobody's tensors: gathered weights, reduction buffers, context, slack."""

from __future__ import annotations

import numpy as np

from strategist.catalog import rows
from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.memory.model_states import shards_state
from strategist.records import dataclass
from strategist.space.candidates import Candidates, Mask, Reals
from strategist.space.shares import Elements, Group


def is_plain_data_parallel(c: Candidates) -> Mask:
    """Candidates that torch's DistributedDataParallel (or no wrapper at all) runs: zero < 2, no tp, no pp, shape (C,)."""
    return (c["zero"] < 2) & (c["tp"] == 1) & (c["pp"] == 1)


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """Bytes of fully_shard's units at three moments, (C, S) each: weights gathered; gradients of the unit that is being
    reduced while backward starts; gradients of the root unit when backward ends."""

    gathered: Reals
    root: Reals
    starting: Reals
    ending: Reals


def units_in_flight(job: Job, group: Group, counts: Elements) -> InFlight:
    """Unsharded weights and gradients of fully_shard's units.

    fully_shard gathers block by block in the compute format and prefetches the next block (ZeRO-3), or keeps every
    gathered block until backward (ZeRO-2). The root unit (embedding, norm, head) stays gathered for the whole step.
    Backward holds the gradient of one block in the compute format and its copy in the reduce format, and from its first
    moment the head's gradient; the root unit is reduced last. Source: PyTorch FSDP, Zhao et al. 2023 (arXiv 2304.11277,
    section 4.3); torch.distributed.fsdp.fully_shard.
    """
    c = group.candidates
    compute, reduce = BYTES[job.formats.compute], BYTES[job.formats.reduce]
    used = ~is_plain_data_parallel(c)[:, None]
    widest = counts.widest[:, None] / c["tiling"][:, None]
    few = np.minimum(job.profile.gathered_blocks * widest, counts.layers)
    blocks = np.where(shards_state(c, 3)[:, None], few, counts.layers)
    head = counts.outer * group.is_last[None, :]
    return InFlight(
        gathered=np.where(used, compute * (blocks + counts.outer), 0.0),
        root=np.where(used, compute * counts.outer, 0.0),
        starting=np.where(used, (compute + reduce) * widest + compute * head, 0.0),
        ending=np.where(used, (compute + reduce) * counts.outer, 0.0),
    )


def bucket_bytes_CS(job: Job, group: Group, counts: Elements) -> Reals:
    """Bytes of autocast copies of the weights under plain data parallelism, (C, S).

    DDP's buckets are the gradients themselves (gradient_as_bucket_view), so they cost nothing more. autocast keeps one
    copy of every matrix in the compute format from forward to backward.
    """
    casts = job.formats.compute != job.formats.parameter
    copies = BYTES[job.formats.compute] * counts.whole if casts else np.zeros_like(counts.whole)
    return np.where(is_plain_data_parallel(group.candidates)[:, None], copies, 0.0)


def overhead(name: str) -> float:
    """One overhead figure of the catalogue by name."""
    return next(float(row["value"]) for row in rows("overheads") if row["name"] == name)


def runtime_bytes_C(job: Job, c: Candidates) -> Reals:
    """Bytes that never pass the allocator: device context and one set of communicator buffers per axis in use, (C,)."""
    kind = "cpu" if job.cluster.smallest.vendor == "CPU" else "gpu"
    axes = np.sum([c[axis] > 1 for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")], axis=0)
    return overhead(f"{kind}_context_bytes") + axes * overhead(f"{kind}_communicator_bytes")


def slack_bytes(allocated: Reals) -> Reals:
    """Bytes the caching allocator reserves beyond what is allocated, any shape."""
    return overhead("allocator_slack") * allocated
