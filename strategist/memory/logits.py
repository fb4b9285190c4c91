"""Bytes of vocabulary-sized tensors around the loss. They exist on the last stage only, for one micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from strategist.columns import on_stages, remembered
from strategist.facts.job import Job
from strategist.facts.model import loss_chunk
from strategist.facts.profile import BYTES
from strategist.space.candidates import Reals
from strategist.space.shares import Group, ceil_div, targets

BUFFERS = 2
"""Buffers of the last stage of DeepSpeed's pipelines (TrainSchedule.num_pipe_buffers)."""


def forward_bytes_CS(job: Job, group: Group) -> Reals:
    """Bytes when the loss is computed, (C, S): the logits, their float32 copy where they are not, and log-probabilities;
    other frameworks as their row says (catalogue: keeping). Of a chunked loss the float32 logits of a chunk and its
    log-probabilities."""
    if group.candidates.chunks_loss:
        return _vocabulary_CS(job, group) * 8.0
    return _vocabulary_CS(job, group) * (_forward_bytes(job) + _piped(job, group).at_loss[:, None])


def _forward_bytes(job: Job) -> float:
    """Bytes of one logit when the loss is computed."""
    keeping, compute = job.profile.keeping, BYTES[job.formats.compute]
    copies = keeping.forward_compute * compute if compute < 4.0 or not keeping.forward_float32 else 0.0
    return 4.0 * keeping.forward_float32 + copies


def loss_bytes_CS(job: Job, group: Group) -> Reals:
    """Bytes in the loss's own backward, (C, S): float32 log-probabilities, their gradient and the logits' gradient
    (torch.nn.functional.cross_entropy on float32 logits); under tensor parallelism one float32 tensor more, each cut by
    vocabulary (torch.distributed.tensor.parallel.loss_parallel); other frameworks as their row says."""
    more = np.where((group.candidates["tp"] > 1)[:, None], 4.0 * job.profile.keeping.cut_float32, 0.0)
    return _vocabulary_CS(job, group) * (_loss_bytes(job) + more + _piped(job, group).in_its_backward[:, None])


def _loss_bytes(job: Job) -> float:
    """Bytes of one logit in the loss's own backward."""
    keeping = job.profile.keeping
    return 4.0 * keeping.backward_float32 + keeping.backward_compute * BYTES[job.formats.compute]


def forward_holds_less(job: Job, group: Group) -> bool:
    """Whether the loss itself holds less of the vocabulary than its own backward, whatever the layout: logits that a stage holds as its
    output are no more of either."""
    return _forward_bytes(job) - _held_bytes(job, group) < _loss_bytes(job)


def gradient_bytes_CS(job: Job, group: Group) -> Reals:
    """Bytes while the head works backward, (C, S): the logits' gradient in the compute format, and outputs that a pipeline holds."""
    return _vocabulary_CS(job, group) * BYTES[job.formats.compute] + piped_CS(job, group)


class Piped(NamedTuple):
    """Bytes of outputs of one token and vocabulary entry that a pipeline's engine or a loop holds, each (C,) or (1,): `held` all the time, and
    what there is beside a loss without them, `at_loss` and `in_its_backward`."""

    held: Reals
    at_loss: Reals
    in_its_backward: Reals


def piped_CS(job: Job, group: Group) -> Reals:
    """Bytes of the logits that lie in the buffers of DeepSpeed's pipeline from one micro-batch to another, and from one step to the
    next, on the last stage, (C, S)."""
    return _vocabulary_CS(job, group) * _piped(job, group).held[:, None]


@remembered
def _piped(job: Job, group: Group) -> Piped:
    """The last stage has two buffers of outputs, taken in turns, and lets go of neither (deepspeedai/DeepSpeed:
    deepspeed/runtime/pipe/engine.py, _exec_forward_pass, _exec_backward_pass; schedule.py, TrainSchedule.num_pipe_buffers). Outputs in
    float32 are what the loss works on in place, so that one of its copies is no other tensor; when they are cast, their own buffer
    still has what was there before. Outputs in the compute format are one more tensor in the loss's backward. ZeRO-2 and 3 do not go
    with that engine. A loop that names what its model gave holds one (hpcaitech/ColossalAI v0.2.0: examples/language/gpt/train_gpt_demo.py, main)."""
    keeping, c = job.profile.keeping, group.candidates
    is_piped = 0 < keeping.pipes_from <= group.pp
    if not (is_piped or keeping.holds_logits):
        return Piped(*(np.zeros(1) for _ in range(3)))
    runs = ((c["zero"] <= 1) & is_piped) | keeping.holds_logits
    compute = BYTES[job.formats.compute]
    each = 4.0 if keeping.piped_outputs == "float32" else compute
    held = np.where(runs, each * (1 if keeping.holds_logits else np.minimum(c["accumulation"], BUFFERS)), 0.0)
    is_the_loss_own = each == BYTES["float32"] and not keeping.holds_logits
    return Piped(
        held=held,
        at_loss=held - np.where(runs & (not is_the_loss_own), compute, 0.0),
        in_its_backward=held - np.where(runs & is_the_loss_own, each, 0.0),
    )


@remembered
def held_logits_CS(job: Job, group: Group) -> Reals:
    """Bytes of the logits that a pipeline's last stage holds as its output until the micro-batch is over, (C, S); with a
    standing buffer of gradients the loss is the stage's output (NVIDIA/Megatron-LM: schedules.py, forward_step)."""
    return _vocabulary_CS(job, group) * _held_bytes(job, group)


def _held_bytes(job: Job, group: Group) -> float:
    return BYTES[job.formats.compute] if group.pp > 1 and job.profile.has_units else 0.0


def waiting_logits_CS(job: Job, group: Group) -> Reals:
    """Bytes that a micro-batch keeps there whose loss is known and whose backward has not begun, (C, S): the logits and
    float32 log-probabilities."""
    return _vocabulary_CS(job, group) * (BYTES[job.formats.compute] + 4.0)


def idle_bytes_CS(job: Job, group: Group) -> Reals:
    """Bytes of logits in the compute format that are free and too small when the loss's backward asks for one more float32
    tensor, (C, S)."""
    keeping, compute = job.profile.keeping, BYTES[job.formats.compute]
    copies = max(0.0, keeping.forward_compute - keeping.backward_compute)
    asks = compute < 4.0 and keeping.backward_float32 > keeping.forward_float32
    return _vocabulary_CS(job, group) * (copies * compute if asks else 0.0)


def largest_bytes_CS(job: Job, group: Group) -> Reals:
    """Bytes of the largest tensor of the vocabulary, (C, S)."""
    wide = 4.0 if job.profile.keeping.forward_float32 else BYTES[job.formats.compute]
    return _vocabulary_CS(job, group) * wide


@remembered
def _vocabulary_CS(job: Job, group: Group) -> Reals:
    """Elements of the logits that exist at one time on one rank, of one micro-batch or of a chunk of it, (C, S)."""
    rows = targets(job, group.candidates) * job.profile.head_tokens
    if group.candidates.chunks_loss:
        rows = loss_chunk(rows, job.model.hidden, job.model.vocab)
    wide = rows * ceil_div(job.model.vocab, group.candidates["tp"])
    return on_stages(wide, group.is_last)
