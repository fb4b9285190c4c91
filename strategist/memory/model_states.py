"""Bytes of weights, gradients and optimizer state, as they lie on one rank between steps.

ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 5): stage 1 shards the optimizer state, stage 2 the gradients
too, stage 3 the weights too. Under torch's fully_shard, stages 2 and 3 both store sharded weights and differ in
whether the gathered copy survives from forward to backward.
"""

from __future__ import annotations

from math import prod

import numpy as np

from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.facts.tables import served_elements
from strategist.memory.buffers import overhead
from strategist.space.candidates import Candidates, Mask, Reals
from strategist.space.deals import dealt_CS, most_of_lots_CS
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
    is_sharded = shards_state(c, weights_from(job))[:, None]
    held = np.where(is_sharded, counts.sharded, counts.whole)
    resting = stored * held if job.model.adapters is None else _with_adapters_CS(job, group, held, is_sharded)
    return np.where(c.is_word("offload", "parameters", "nvme")[:, None], 0.0, resting)


def _with_adapters_CS(job: Job, group: Group, held: Reals, is_sharded: Mask) -> Reals:
    """Bytes of frozen weights, quantised or not, and of the adapters beside them, (C, S)."""
    from strategist.space.adapters import quantised_share, resting_bytes_CS, trained_share

    trained, packed = (share(job.model, group) for share in (trained_share, quantised_share))
    parts = (np.where(is_sharded, share.sharded, share.whole) for share in (trained, packed))
    return resting_bytes_CS(job, group, held, *parts)


def trained_CS(job: Job, group: Group, counts: Elements, is_sharded: Mask) -> Reals:
    """Elements that are trained on a rank, (C, S), of a sharded copy where `is_sharded` (C, 1) says so: adapters where the model
    has them, else the job's share of all."""
    if job.model.adapters is None:
        return job.trainable * np.where(is_sharded, counts.sharded, counts.whole)
    from strategist.space.adapters import trained_share

    adapters = trained_share(job.model, group)
    return np.where(is_sharded, adapters.sharded, adapters.whole)


def gradient_bytes_CS(job: Job, group: Group, counts: Elements, at_rest: Reals) -> Reals:
    """Bytes of gradients while micro-batches follow each other, (C, S); `at_rest` once the last backward has finished.

    Under FSDP's no_sync those before the last leave whole gradients (catalogue: profiles, accumulates_whole).
    With a pipeline, fully_shard keeps unsharded gradients in the reduce format until the last micro-batch
    (torch.distributed.pipelining.stage: backward_maybe_with_nosync), so ZeRO saves none of them there.
    Gradients that rest on the host leave when a unit is reduced, but what replicas add up does not before backward is over.
    """
    c = group.candidates
    unsharded = counts.whole * BYTES[job.formats.reduce]
    trained = job.trainable
    several = shards_state(c, 2) & (c["accumulation"] > 1)
    sums = _sums_on_device(job, c)
    if sums.any():
        at_rest = np.where(sums[:, None], trained * counts.sharded * BYTES[job.formats.reduce], at_rest)
    if job.profile.accumulates_whole:
        at_rest = np.where(several[:, None], counts.whole * BYTES[job.formats.compute], at_rest)
    return np.where((several & (c["pp"] > 1))[:, None], trained * unsharded, at_rest)


def settled_bytes_CS(job: Job, group: Group, counts: Elements) -> Reals:
    """Bytes of gradients when the update runs, (C, S): sharded from ZeRO-2 on, none where they rest on the host."""
    c = group.candidates
    at_rest = trained_CS(job, group, counts, shards_state(c, 2)[:, None]) * BYTES[job.formats.gradient]
    return np.where(_grads_offloaded(job, c)[:, None], 0.0, at_rest)


def _grads_offloaded(job: Job, c: Candidates) -> Mask:
    """Where gradients rest on the host, (C,): with the weights, and in frameworks that move them to an optimizer there as they are reduced."""
    away = c.is_word("offload", "parameters", "nvme")
    return away | (c.is_word("offload", "optimizer") & shards_state(c, 2)) if job.profile.host_gradient_bytes else away


def _sums_on_device(job: Job, c: Candidates) -> Mask:
    """Where gradients that will rest on the host stay on the device as long as backward runs, (C,): replicas of shards add theirs up
    there after the last micro-batch, and fully_shard lets go of none of the sums before the end (PyTorch 2.13
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _partial_reduce_output and _all_reduce_state)."""
    waits = job.profile.has_units and job.profile.replicas_wait
    return np.asarray(_grads_offloaded(job, c) & shards_state(c, 2) & (c["dp_replicate"] > 1) & (c["pp"] == 1) & waits)


def optimizer_bytes_CS(job: Job, group: Group, counts: Elements) -> Reals:
    """Bytes of moments, (C, S): sharded from ZeRO-1 on, none when offloaded. torch's ZeRO-1 deals whole tensors out."""
    c = group.candidates
    held = trained_CS(job, group, counts, shards_state(c, 1)[:, None])
    deals = c["zero"] == 1
    if job.profile.has_units and deals.any():
        held = np.where(deals[:, None], job.trainable * dealt_CS(job.model, group, deals), held)
    resting = job.state_bytes * held if job.workload.optimizer != "muon" else _with_momentum_CS(job, group, held)
    return np.where(c.is_word("offload", "none")[:, None], resting, 0.0)


def _with_momentum_CS(job: Job, group: Group, held: Reals) -> Reals:
    """Bytes of Muon's momentum of matrices inside the layers, and of AdamW's moments of the rest of what is `held`, (C, S); of the
    rank that has most of both where torch's ZeRO-1 deals them out. Of models whose matrices are not all held, which rules forbid beside Muon
    (adapters, experts on other ranks), there is no more momentum than weights."""
    from strategist.facts.lots import state_bytes  # few ask for any
    from strategist.space.turned import owned_CS

    matrices, deals = np.minimum(owned_CS(job.model, group), held), group.candidates["zero"] == 1
    adamw, muon = (job.profile.state_bytes(name, job.workload.precision) for name in ("adamw", "muon"))
    resting = muon * matrices + adamw * (held - matrices)
    if not deals.any():
        return resting
    dealt = most_of_lots_CS(job.model, group, deals, lambda lot: state_bytes(lot, muon, adamw))
    return np.where(deals[:, None], dealt, resting)


def turning_bytes_CS(job: Job, group: Group) -> Reals:
    """Bytes that Muon holds while it turns a matrix, (C, S); where torch's ZeRO-1 deals matrices out, what the rank that then has
    most has more than the one with most state."""
    from strategist.facts.lots import Lot, state_bytes  # few ask for any
    from strategist.space.turned import bytes_of_one, largest_bytes_CS

    turning, deals = largest_bytes_CS(job.model, group), group.candidates["zero"] == 1
    if not deals.any():
        return turning
    adamw, muon = (job.profile.state_bytes(name, job.workload.precision) for name in ("adamw", "muon"))

    def resting(lot: Lot) -> float:
        return state_bytes(lot, muon, adamw)

    def at_most(lot: Lot) -> float:
        return resting(lot) + max((bytes_of_one(*sides, prod(sides)) for sides, _ in lot.matrices), default=0.0)

    most, least = (most_of_lots_CS(job.model, group, deals, size) for size in (at_most, resting))
    return np.where(deals[:, None], most - least, turning)


def host_bytes_C(job: Job, group: Group, counts: Elements) -> Reals:
    """Bytes of host memory that offloading needs per rank on the fullest stage, shape (C,).

    Optimizer offload keeps the moments and a copy of the gradients, and our own of the weights too, which it updates there;
    parameter offload keeps everything; DeepSpeed's gradients are in fp32 there; NVMe keeps the moments on disk and weights and gradients on the host, and two buffers
    for the state of a block, through which our own moments pass. Our own 8-bit update has a piece decoded.
    """
    c = group.candidates
    if c.serves_tables:
        return _tables_C(job, c)
    if not c["offload"].any():
        return np.zeros(len(c))
    state, stored = job.state_bytes, BYTES[job.formats.parameter]
    gradient = job.profile.host_gradient_bytes or BYTES[job.formats.gradient]
    everything = state + gradient + stored
    moments = everything if job.profile.has_units and not job.profile.host_gradient_bytes else state + gradient
    by_word = np.array([0.0, moments, everything, gradient + stored])
    held = counts.sharded.max(axis=1)
    host, on_drive = by_word[c["offload"]] * held, c.is_word("offload", "nvme")
    if job.profile.has_units and on_drive.any():
        host += 2.0 * state * on_drive * np.minimum(held, overhead("drive_block_elements"))
    if job.profile.has_units and job.workload.optimizer == "adamw8bit":
        host += ~c.is_word("offload", "none") * decoded_bytes(held)
    return host


def _tables_C(job: Job, c: Candidates) -> Reals:
    """Bytes of host memory that a parameter server takes for its tables, their gradients and their state, in a share for each rank."""
    each = BYTES[job.formats.parameter] + BYTES[job.formats.gradient] + job.state_bytes
    return each * served_elements(job.model).total / c["dp_replicate"]


def decoded_bytes(elements: Reals) -> Reals:
    """Bytes that our own 8-bit update of some elements has decoded at once."""
    return overhead("eight_bit_temporary_bytes") * np.minimum(elements, overhead("eight_bit_piece_elements"))
