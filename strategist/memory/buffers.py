"""Bytes that are in flight or belong to nobody's tensors: gathered weights, reduction buffers, context, slack."""

from __future__ import annotations

import numpy as np

from strategist.catalog import rows
from strategist.facts.job import Job
from strategist.space.candidates import Candidates, Mask, Reals


def is_plain_data_parallel(c: Candidates) -> Mask:
    """Candidates that torch's DistributedDataParallel (or no wrapper at all) runs: zero < 2, no tp, no pp, shape (C,)."""
    return (c["zero"] < 2) & (c["tp"] == 1) & (c["pp"] == 1)


def is_managed(job: Job, c: Candidates) -> Mask:
    """Candidates whose weights lie in units of fully_shard or replicate, shape (C,): all but plain data parallelism and
    those with one data rank that compute in the format the weights are stored in (nothing to share, nothing to cast).
    Frameworks without units have them from ZeRO-2 on."""
    alone = (c.data_parallel * c["cp"] == 1) & (job.formats.compute == job.formats.parameter)
    return ~is_plain_data_parallel(c) & ~alone & ((c["zero"] >= 2) | job.profile.has_units)


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
