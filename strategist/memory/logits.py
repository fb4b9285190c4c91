"""Bytes of vocabulary-sized tensors around the loss. They exist on the last stage only, for one micro-batch."""

from __future__ import annotations

import numpy as np

from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.space.candidates import Reals
from strategist.space.shares import Group, ceil_div, tokens


def logits_bytes_CS(job: Job, group: Group) -> Reals:
    """Bytes at the worst moment of the loss, (C, S).

    Per token and vocabulary entry: the logits in the compute format, the float32 log-probabilities kept for backward,
    their float32 gradient, and the gradient cast back (torch.nn.functional.cross_entropy on float32 logits). With
    float32 compute no cast copies exist. Under tensor parallelism the vocabulary stays cut (loss parallel).
    """
    compute = BYTES[job.formats.compute]
    casts = 2 * compute if compute < 4.0 else 4.0
    vocabulary = ceil_div(job.model.vocab, group.candidates["tp"])
    return (tokens(job, group.candidates) * vocabulary * (8.0 + casts))[:, None] * group.is_last[None, :].astype(
        np.float64
    )
