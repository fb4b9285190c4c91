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


def is_managed(job: Job, c: Candidates) -> Mask:
    """Candidates whose weights lie in units of fully_shard or replicate, shape (C,): all but plain data parallelism and
    those with one data rank that compute in the format the weights are stored in (nothing to share, nothing to cast)."""
    alone = (c.data_parallel * c["cp"] == 1) & (job.formats.compute == job.formats.parameter)
    return ~is_plain_data_parallel(c) & ~alone


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """Bytes of fully_shard's units, (C, S) each: weights gathered at the loss, the same and the first gradients when
    backward starts, and the last unit with its gradient when backward ends."""

    at_loss: Reals
    starting: Reals
    ending: Reals


def units_in_flight(job: Job, group: Group, counts: Elements) -> InFlight:
    """Unsharded weights and gradients of fully_shard's units: every block, the embedding, and norm with head.

    Units are gathered one after the other in the compute format, the next one ahead of time. ZeRO-2 keeps all of them
    until backward; ZeRO-3 gives each back except norm with head, where backward begins. Tied weights are one root unit
    that stays gathered. While a unit is reduced its gradient exists in the compute format and as a copy in the reduce
    format; the embedding is reduced last, and under ZeRO-3 an untied one is not gathered for it (the gradient of a table
    does not depend on its values). Source: PyTorch FSDP, Zhao et al. 2023 (arXiv 2304.11277, section 4.3);
    torch.distributed.fsdp.fully_shard.
    """
    c = group.candidates
    compute, reduce = BYTES[job.formats.compute], BYTES[job.formats.reduce]
    used = is_managed(job, c)[:, None]
    reshards = shards_state(c, 3)[:, None]
    widest = counts.widest[:, None] / c["tiling"][:, None]
    outer = counts.before + counts.behind
    blocks = np.where(reshards, np.minimum(job.profile.gathered_blocks * widest, counts.layers), counts.layers)
    kept = np.where(reshards & (not job.model.tied), counts.behind, outer)
    last = outer if job.model.tied else counts.before
    copies = np.where(reshards & (not job.model.tied), 1.0, 2.0)
    gathered = compute * (blocks + kept)
    first_gradients = (compute + reduce) * np.maximum(widest, 0.0 if job.model.tied else counts.behind)
    first_gradients = first_gradients + (compute * outer if job.model.tied else 0.0)
    return InFlight(
        at_loss=np.where(used, gathered, 0.0),
        starting=np.where(used, gathered + first_gradients, 0.0),
        ending=np.where(used, (copies * compute + reduce) * last, 0.0),
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
