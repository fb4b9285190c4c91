"""What ranks that compress their gradients send in one step, in place of DDP's all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from strategist.facts.compression import compressor, low_rank, sent_of_largest
from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.facts.tensors import bucket_sizes
from strategist.space.candidates import Reals
from strategist.space.shares import Group
from strategist.space.traffic import Hidden, Traffic


def buckets_of(job: Job) -> tuple[int, ...]:
    """Elements of DDP's buckets, in the order in which they are sent."""
    return bucket_sizes(job.model, BYTES[job.formats.gradient])


def compressed_traffic(job: Job, group: Group, last_CS: Reals) -> tuple[Traffic, ...]:
    """For every bucket (of the last, a share `last_CS`, nothing runs beside): casts are added up in two bytes; PowerSGD adds up what it leaves alone, then left factors, then right
    ones; top-k gathers places and values of what every rank sends. Source: the rows of the catalogue's `compression`."""
    row, buckets = compressor(group.candidates.compression), buckets_of(job)
    behind: Hidden = "backward" if row.behind == "backward" else "nothing"
    sent = partial(Traffic, "dp", place="replicas", behind=behind, pieces_CS=float(len(buckets)), first_CS=last_CS)
    shape = len(group.candidates), len(group.stages)
    once = np.ones(shape)
    return tuple(
        sent("all_gather" if row.share else "all_reduce", payload * once, once)
        for payload in _payloads(job, group, buckets)
    )


def _payloads(job: Job, group: Group, buckets: tuple[int, ...]) -> Iterator[np.ndarray | float]:
    """Bytes of one step by kind of collective: numbers, or one for each candidate, (C, 1)."""
    row = compressor(group.candidates.compression)
    if row.rank:
        split = low_rank(job.model, row.rank)
        yield from (1.0 * row.element_bytes * part for part in (split.rest, split.left, split.right))
    elif row.share:
        own = row.element_bytes * sum(sent_of_largest(size, row.share) for size in buckets)
        yield own * group.candidates["dp_replicate"][:, None]
    else:
        yield 1.0 * row.element_bytes * sum(buckets)
