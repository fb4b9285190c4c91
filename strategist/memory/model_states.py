"""Bytes of weights, gradients and optimizer state, as they lie on one rank between steps.

ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 5): stage 1 shards the optimizer state, stage 2 the gradients
too, stage 3 the weights too. Under torch's fully_shard, stages 2 and 3 both store sharded weights and differ in
whether the gathered copy survives from forward to backward.
"""

from __future__ import annotations

import numpy as np

from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.memory.buffers import overhead
from strategist.space.candidates import Candidates, Mask, Reals
from strategist.space.deals import dealt_CS
from strategist.space.shares import Elements, Group


def shards_state(c: Candidates, stage: int) -> Mask:
    """Candidates whose ZeRO stage is at least `stage`, shape (C,)."""
    return c["zero"] >= stage


def weights_from(job: Job) -> int:
    """The ZeRO stage from which stored weights are sharded: 2 in units of fully_shard, 3 where weights are kept whole."""
    return 2 if job.profile.has_units else 3


def parameter_bytes_CS(job: Job, group: Group, counts: Elements) -> Reals:
    """Bytes of the stored weights, (C, S): sharded from ZeRO-2 on under fully_shard, else from ZeRO-3 on; none when
    offloaded."""
    c = group.candidates
    stored = BYTES[job.formats.parameter] + (BYTES[job.formats.master] if job.formats.master != "none" else 0.0)
    held = np.where(shards_state(c, weights_from(job))[:, None], counts.sharded, counts.whole)
    return np.where(c.is_word("offload", "parameters", "nvme")[:, None], 0.0, stored * held)


def gradient_bytes_CS(job: Job, group: Group, counts: Elements) -> Reals:
    """Bytes of gradients while micro-batches follow each other, and once the last backward has finished, (C, S).

    Under FSDP's no_sync those before the last leave whole gradients (catalogue: profiles, accumulates_whole).
    With a pipeline, fully_shard keeps unsharded gradients in the reduce format until the last micro-batch
    (torch.distributed.pipelining.stage: backward_maybe_with_nosync), so ZeRO saves none of them there.
    """
    c = group.candidates
    unsharded = counts.whole * BYTES[job.formats.reduce]
    trained = job.trainable
    several = shards_state(c, 2) & (c["accumulation"] > 1)
    at_rest = settled_bytes_CS(job, group, counts)
    if job.profile.accumulates_whole:
        at_rest = np.where(several[:, None], counts.whole * BYTES[job.formats.compute], at_rest)
    return np.where((several & (c["pp"] > 1))[:, None], trained * unsharded, at_rest)


def settled_bytes_CS(job: Job, group: Group, counts: Elements) -> Reals:
    """Bytes of gradients when the update runs, (C, S): sharded from ZeRO-2 on, none where they rest on the host."""
    c = group.candidates
    at_rest = np.where(shards_state(c, 2)[:, None], counts.sharded, counts.whole) * BYTES[job.formats.gradient]
    return job.trainable * np.where(_grads_offloaded(c)[:, None], 0.0, at_rest)


def _grads_offloaded(c: Candidates) -> Mask:
    return c.is_word("offload", "parameters", "nvme")


def optimizer_bytes_CS(job: Job, group: Group, counts: Elements) -> Reals:
    """Bytes of moments, (C, S): sharded from ZeRO-1 on, none when offloaded. torch's ZeRO-1 deals whole tensors out."""
    c = group.candidates
    held = np.where(shards_state(c, 1)[:, None], counts.sharded, counts.whole)
    deals = c["zero"] == 1
    if job.profile.has_units and deals.any():
        held = np.where(deals[:, None], dealt_CS(job.model, group, deals), held)
    state = job.trainable * job.profile.state_bytes(job.workload.optimizer, job.workload.precision)
    return np.where(c.is_word("offload", "none")[:, None], state * held, 0.0)


def host_bytes_C(job: Job, group: Group, counts: Elements) -> Reals:
    """Bytes of host memory that offloading needs per rank on the fullest stage, shape (C,).

    Optimizer offload keeps the moments and a copy of the gradients, and our own of the weights too, which it updates there;
    parameter offload keeps everything; NVMe keeps the moments on disk and weights and gradients on the host, and two buffers
    for the state of a block, through which our own moments pass. Our own 8-bit update has a piece decoded.
    """
    c = group.candidates
    if not c["offload"].any():
        return np.zeros(len(c))
    state = job.profile.state_bytes(job.workload.optimizer, job.workload.precision)
    stored, gradient = BYTES[job.formats.parameter], BYTES[job.formats.gradient]
    everything = state + gradient + stored
    moments = everything if job.profile.has_units else state + gradient
    by_word = np.array([0.0, moments, everything, gradient + stored])
    held = counts.sharded.max(axis=1)
    host, on_drive = by_word[c["offload"]] * held, c.is_word("offload", "nvme")
    if job.profile.has_units and on_drive.any():
        host += 2.0 * state * on_drive * np.minimum(held, overhead("drive_block_elements"))
    if job.profile.has_units and job.workload.optimizer == "adamw8bit":
        host += ~c.is_word("offload", "none") * decoded_bytes(held)
    return host


def decoded_bytes(elements: Reals) -> Reals:
    """Bytes that our own 8-bit update of some elements has decoded at once."""
    return overhead("eight_bit_temporary_bytes") * np.minimum(elements, overhead("eight_bit_piece_elements"))
