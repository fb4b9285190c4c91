"""The buffers from which DeepSpeed's ZeRO reduces gradients, as large as its configuration says, whatever the model.

Sources, DeepSpeed 0.19.8: runtime/zero/stage_1_and_2.py (setup_buckets: made at the first gradient; allreduce_bucket: what is reduced is copied into one
tensor; _release_ipg_buffers: let go of when everything is reduced, under stage 1 after the last micro-batch), stage3.py (ipg_buckets: made once).
"""

from __future__ import annotations

import numpy as np

from strategist.columns import on_stages
from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.space.candidates import Column, Reals
from strategist.space.shares import Group


def _dtypes(job: Job) -> int:
    """Formats in which gradients are sent: under autocast those of a few modules stay in fp32 where the others do not."""
    formats = job.formats
    return 2 if formats.parameter == "float32" != formats.reduce else 1


def standing_bytes_C(job: Job, group: Group) -> Reals:
    """Bytes of ZeRO-3's buffers, one per format that is sent, (C,)."""
    sent = BYTES[job.formats.reduce] + (BYTES["float32"] if _dtypes(job) > 1 else 0.0)
    return np.where(group.candidates["zero"] == 3, sent * job.profile.reduce_bucket, 0.0)


def is_in_buckets(group: Group) -> Column:
    """Whether ZeRO-1 or 2 shares the state, (C,)."""
    stage: Column = group.candidates["zero"]
    return (stage == 1) | (stage == 2)


def bucket_bytes_CS(job: Job, group: Group) -> Reals:
    """Bytes of the buffers of ZeRO-1 and 2 while backward runs, in the format of weights, (C, S)."""
    each = BYTES[job.formats.parameter] * _dtypes(job) * job.profile.reduce_bucket
    return on_stages(np.where(is_in_buckets(group), each, 0.0), np.ones(len(group.stages)))


def left_from_before(group: Group) -> Reals:
    """Where such buffers are still there in the forward pass of a later micro-batch, 1 or 0, (C, 1)."""
    c = group.candidates
    return ((c["zero"] == 1) & (c["accumulation"] > 1))[:, None].astype(np.float64)


def copied_bytes_CS(job: Job, group: Group, whole: Reals) -> Reals:
    """Bytes of the tensor into which the last that is reduced is copied, of `whole` weights of a stage, (C, S)."""
    most = job.trainable * np.minimum(whole, float(job.profile.reduce_bucket))
    return np.where(is_in_buckets(group)[:, None], BYTES[job.formats.parameter] * most, 0.0)


def too_large_bytes_CS(job: Job, group: Group, head: Reals) -> Reals:
    """Bytes of the head's gradient and of its copy where it finds no room in a buffer, (C, S): it is reduced on its own."""
    is_too_large = is_in_buckets(group)[:, None] & (head > job.profile.reduce_bucket)
    return np.where(is_too_large, 2.0 * job.trainable * BYTES[job.formats.parameter] * head, 0.0)
