"""Bytes that a hook of DDP holds: between steps what it remembers, and while a bucket is on its way copies of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from strategist.facts.compression import compressor, low_rank, sent_of_largest
from strategist.facts.job import Job
from strategist.facts.parameters import count
from strategist.facts.profile import BYTES
from strategist.memory.instant import END, LAYERS, NONE, Instant, added
from strategist.memory.step import Step
from strategist.space.candidates import Reals
from strategist.space.compression import buckets_of
from strategist.space.shares import Group

PLACE_BYTES, WIRE_PLACE_BYTES = 8, 4
"""Of the number of an element as torch.topk gives it (int64), and as it is sent."""


def remembered_bytes(job: Job, word: str) -> float:
    """What lasts from step to step: what was left out of every gradient, and PowerSGD's factors (powerSGD_hook.py: error_dict,
    p_memory_dict, q_memory_dict)."""
    row, gradient = compressor(word), BYTES[job.formats.gradient]
    if not row.remembers:
        return 0.0
    factors = 0
    if row.rank:
        split = low_rank(job.model, row.rank)
        factors = split.left + split.right
    return float(gradient * (count(job.model).total + factors))


def remembered_CS(job: Job, group: Group) -> Reals:
    """The same for every candidate and stage, (C, S)."""
    return np.full((len(group.candidates), len(group.stages)), remembered_bytes(job, group.candidates.compression))


def hook_bytes_C(job: Job, group: Group, elements: int) -> Reals:
    """The most that a hook holds beside a bucket of so many elements, (C, 1).

    A cast holds the bucket in two bytes. PowerSGD holds its input, what it leaves out of it, and what it does not multiply.
    Top-k holds the magnitudes while it looks for the largest, and then what all ranks sent.
    """
    row, gradient = compressor(group.candidates.compression), BYTES[job.formats.gradient]
    held: Reals
    if row.rank:
        split = low_rank(job.model, row.rank)
        rest = elements * split.rest / count(job.model).total
        held = gradient * (2.0 * elements + rest) * np.ones(len(group.candidates))
    elif row.share:
        held = _of_largest(group, sent_of_largest(elements, row.share), elements, gradient)
    else:
        held = float(row.element_bytes * elements) * np.ones(len(group.candidates))
    return held[:, None]


def _of_largest(group: Group, sent: int, elements: int, gradient: float) -> Reals:
    message = (WIRE_PLACE_BYTES + gradient) * sent
    chosen = (PLACE_BYTES + gradient) * sent
    exchanged = chosen + (1.0 + group.candidates["dp_replicate"]) * message
    return np.maximum(gradient * elements + chosen, exchanged)


def hook_instants(step: Step) -> Iterator[Instant]:
    """Buckets on their way: the first, when the head's gradient is there; the largest of those between, in each worst layer's
    place; the last, when nothing else is left."""
    job, group = step.job, step.group
    buckets = buckets_of(job)
    first, between, last = (
        hook_bytes_C(job, group, size) for size in (buckets[0], max(buckets[1:-1], default=0), buckets[-1])
    )
    in_head = added(step.stream, step.outside)
    activations = np.maximum(step.inputs, step.in_layers - step.layers.largest)
    yield _beside(step, LAYERS, step.in_layers, added(step.copies, first), in_head)
    yield _beside(step, LAYERS, activations, added(step.copies, between), in_head)
    yield _beside(step, END, step.inputs, last, NONE)


def _beside(step: Step, moment: int, activations: Reals, held: Reals, temporaries: Reals) -> Instant:
    terms = {"gradients": step.earlier, "activations": activations, "bucket_buffers": held, "temporaries": temporaries}
    return Instant(moment, terms)
