"""Bytes of activations: what each layer keeps, how many micro-batches are in flight, what recomputation saves."""

from __future__ import annotations

import numpy as np

from strategist.columns import on_stages, remembered, stage_by_stage
from strategist.facts.convolutions import blocks
from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.facts.runs import BREADTH_FIRST
from strategist.space.candidates import Candidates, Reals, code
from strategist.space.shares import Group, sequence_cut, targets, tokens


def in_flight_CS(group: Group) -> Reals:
    """Micro-batches whose activations a stage holds at once, (C, S).

    GPipe and looped BFS: all. 1F1B: min(m, pp - stage) (PipeDream-Flush, Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    ZB-H1 and ZBV: min(m, pp) (Qi et al. 2023, arXiv 2401.10241, sections 2.1 and 6), and DualPipeV half a one more.
    Interleaved: min(m v, 2 (pp - stage - 1) + (v - 1) pp + 1) chunks of 1/v stage each (Megatron-LM:
    megatron/core/pipeline_parallel/schedules.py, warm-up count).
    """
    c = group.candidates
    m, v = c["accumulation"][:, None], c["virtual_stages"][:, None]
    behind = group.pp - group.stages[None, :]
    one_f_one_b = np.minimum(m, behind)
    interleaved = np.minimum(m * v, 2 * (behind - 1) + (v - 1) * group.pp + 1) / v
    schedule = c["schedule"][:, None]
    held = np.where(schedule == code("schedule", "interleaved"), interleaved, one_f_one_b)
    held = np.where(c.is_word("schedule", *BREADTH_FIRST)[:, None], m, held)
    held = np.where(c.is_word("schedule", "zb_h1", "zbv")[:, None], np.minimum(m, group.pp), held)
    held = np.where(c.is_word("schedule", "dualpipev")[:, None], group.pp + 0.5, held)
    return np.asarray(stage_by_stage(np.where(schedule == code("schedule", "none"), 1, held)), np.float64)


@remembered
def edges_CS(job: Job, group: Group) -> Reals:
    """Bytes kept behind the layers per micro-batch, (C, S): the final norm and the head's input, on the last stage; a frozen head
    needs none. Behind an encoder there is as much, for its own norm and for what every layer of the decoder reads."""
    c, shape = group.candidates, job.model
    own = targets(job, c) * shape.hidden * BYTES[job.formats.compute] if shape.adapters is None else 0.0
    last = targets(job, c) * _normed_bytes(job) / sequence_cut(c) + own + encoded_C(job, c)
    return on_stages(last, group.is_last)


def _normed_bytes(job: Job) -> float:
    """Bytes that a norm keeps of a token: its input and statistics."""
    statistics = 4.0 * (1 if job.model.norm.startswith("rms") else 2)
    return job.model.hidden * BYTES[job.formats.compute] + statistics


def encoded_C(job: Job, c: Candidates) -> Reals | float:
    """Bytes that are kept of an encoder's last norm and of what that gave, (C,)."""
    if not job.model.enc_layers:
        return 0.0
    return tokens(job, c) * _normed_bytes(job) / sequence_cut(c) + memory_C(job, c)


def memory_C(job: Job, c: Candidates) -> Reals:
    """Bytes that are kept of what an encoder gave, (C,), as long as a layer of the decoder has yet to go backward: under sequence parallelism a
    rank's part, or none where every such layer keeps the whole as it put it together."""
    cut = sequence_cut(c)
    keeps = job.profile.keeping.gathered_inputs & (cut > 1) & c.is_word("recompute", "none")
    return np.where(keeps, 0.0, whole_stream_C(job, c) / cut)


def handed_on_CS(job: Job, group: Group) -> Reals:
    """Bytes of a stage's output less those of its input, which lies in a receive buffer, per micro-batch, (C, S)."""
    c = group.candidates
    stream = whole_stream_C(job, c) / sequence_cut(c)
    return on_stages(stream, group.is_first * 1.0 - group.is_last)


def tables_C(job: Job, c: Candidates) -> Reals:
    """Bytes of the tables of rotary positions that the layers of one forward pass share, (C,)."""
    width = job.model.head_dim * BYTES[job.formats.compute] * (job.model.pos == "rope")
    return width * (job.workload.seq_len / c["cp"])


def step_inputs_C(job: Job, c: Candidates) -> Reals:
    """Bytes of a step's token ids and labels on one rank, eight each, (C,); of convolutional networks pixels in place of ids, of four bytes
    a colour; on the first of several threads' devices those of all."""
    each = 8.0 + (4.0 * blocks(job.model.extra)[0].convolutions[0].read if job.model.is_convolutional else 8.0)
    own = each * tokens(job, c) * c["accumulation"]
    if job.model.enc_layers:  # ids of both, and labels of the decoder's
        own = 8.0 * (tokens(job, c) + 2.0 * targets(job, c)) * c["accumulation"]
    return own * c["dp_replicate"] if c.in_threads else own


def whole_stream_C(job: Job, c: Candidates) -> Reals:
    """Bytes of the residual stream of a micro-batch, or of its gradient, for all tokens that a rank's matrices see, (C,)."""
    return tokens(job, c) * job.model.hidden * BYTES[job.formats.compute]


def receive_buffers_CS(job: Job, group: Group) -> Reals:
    """Bytes of receive buffers: one per micro-batch for activations and one for gradients, (C, S).

    Source: pytorch 2.13 torch/distributed/pipelining/stage.py allocates them per micro-batch at the first step; what a stage hands to
    itself takes their place (set_local_fwd_input, set_local_bwd_input).
    """
    c = group.candidates
    ends = group.is_first.astype(np.float64) + group.is_last + 2.0 * group.turns_back
    if group.pp == 1:
        return np.zeros((len(c), len(ends)))
    if not job.profile.has_units:  # other frameworks take a buffer when a message is due
        return on_stages(whole_stream_C(job, c), 2.0 - ends)
    one = whole_stream_C(job, c) / sequence_cut(c) * c["accumulation"]
    return (one * 2.0 * c["virtual_stages"])[:, None] - on_stages(one, ends)
