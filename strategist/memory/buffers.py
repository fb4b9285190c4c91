"""Bytes that are in flight or belong to nobody's tensors: gathered weights, reduction buffers, context, slack."""

from __future__ import annotations

import numpy as np

from strategist.catalog import rows
from strategist.facts.job import Job
from strategist.space.candidates import Candidates, Reals


def overhead(name: str) -> float:
    """One overhead figure of the catalogue by name."""
    return next(float(row["value"]) for row in rows("overheads") if row["name"] == name)


def runtime_bytes_C(job: Job, c: Candidates) -> Reals:
    """Bytes that never pass the allocator: device context and one set of communicator buffers per axis in use, (C,)."""
    kind = "cpu" if job.cluster.smallest.vendor == "CPU" else "gpu"
    context = "loaded" if kind == "gpu" and job.profile.loads_all else kind
    names = "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", *(name for name in ("cp_inner",) if name in c.columns)
    axes = np.sum([c[axis] > 1 for axis in names], axis=0)
    return overhead(f"{context}_context_bytes") + axes * overhead(f"{kind}_communicator_bytes")


LARGE_WORKSPACES = ("Hopper", "Blackwell")


def workspace_bytes(job: Job) -> int:
    """Bytes of cuBLAS workspaces, which pass the allocator and so count as allocated in measurements; the runtime term of a
    prediction holds them."""
    gpu = job.cluster.smallest
    if gpu.vendor != "NVIDIA":
        return 0
    name = "blas_workspace_hopper" if gpu.arch in LARGE_WORKSPACES else "blas_workspace"
    return job.profile.keeping.workspaces * int(overhead(name))


def slack_share(job: Job) -> float:
    """What the caching allocator reserves beyond what is allocated, as a share of that, where no formula knows its blocks."""
    return overhead("expandable_slack" if job.profile.segments == "expandable" else "allocator_slack")
