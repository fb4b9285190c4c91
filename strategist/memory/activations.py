"""Bytes of activations: what each layer keeps, how many micro-batches are in flight, what recomputation saves."""

from __future__ import annotations

import numpy as np

from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.memory.saved import POLICIES, Policy, Saved, saved_tensors
from strategist.space.candidates import Candidates, Column, Reals, code
from strategist.space.shares import Group, tokens
from strategist.space.stages import kinds


def kept_CK(job: Job, candidates: Candidates) -> Reals:
    """Bytes that one layer of each sort keeps for one micro-batch under each candidate's recompute, (C, K)."""
    level = candidates["recompute"]
    by_level = [layer_bytes_CK(job, candidates, policy) for policy in POLICIES]
    return np.choose(level[:, None], by_level)


def layer_bytes_CK(job: Job, candidates: Candidates, policy: Policy) -> Reals:
    """Bytes kept per layer and micro-batch under one recompute policy, (C, K)."""
    columns = [_kept(job, candidates, saved_tensors(job.model, kind), policy) for kind in kinds(job.model)]
    return np.stack(columns, axis=1) * tokens(job, candidates)[:, None]


def _kept(job: Job, candidates: Candidates, rows: tuple[Saved, ...], policy: Policy) -> Reals:
    """Bytes per token, (C,)."""
    compute = BYTES[job.formats.compute]
    widths = {"sequence": 0.0, "heads": 0.0, "whole": 0.0}
    for row in rows:
        if policy in row.policies:
            widths[row.cut] += row.width * (4.0 if row.is_float32 else compute)
    tp = candidates["tp"]
    sequence_cut = np.where(candidates["sequence_parallel"] > 0, tp, 1)
    return widths["sequence"] / sequence_cut + widths["heads"] / tp + widths["whole"]


def in_flight_CS(group: Group) -> Reals:
    """Micro-batches whose activations a stage holds at once, (C, S).

    GPipe: all. 1F1B: min(m, pp - stage) (PipeDream-Flush, Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
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
    held = np.where(schedule == code("schedule", "gpipe"), m, held)
    return np.where(schedule == code("schedule", "none"), 1, held).astype(np.float64)


def activation_bytes_CS(job: Job, group: Group) -> Reals:
    """Bytes of kept activations with every micro-batch in flight, (C, S)."""
    per_micro_batch = group.layers_of(kept_CK(job, group.candidates))
    return in_flight_CS(group) * (per_micro_batch + _edges_CS(job, group))


def working_set_CS(job: Job, group: Group) -> Reals:
    """Bytes that backward brings back while it recomputes one layer: what policy "none" keeps less what is kept, (C, S)."""
    c = group.candidates
    extra = np.maximum(0.0, layer_bytes_CK(job, c, "none") - kept_CK(job, c))
    present = group.layers_SK > 0
    return np.where(present[None, :, :], extra[:, None, :], 0.0).max(axis=2)


def _edges_CS(job: Job, group: Group) -> Reals:
    """Bytes kept outside the layers per micro-batch: token ids on the first stage, the final norm on the last, (C, S)."""
    count = tokens(job, group.candidates)[:, None]
    tp = np.where(group.candidates["sequence_parallel"] > 0, group.candidates["tp"], 1)[:, None]
    compute = BYTES[job.formats.compute]
    last = count * (job.model.hidden * compute + 4.0) / tp + count * job.model.hidden * compute
    return np.where(group.is_last[None, :], last, 0.0) + np.where(group.is_first[None, :], count * 8.0, 0.0)


def backward_temporaries_CS(job: Job, group: Group) -> Reals:
    """Bytes of gradients of activations alive at the widest point of one layer's backward, (C, S).

    The feed-forward part is the widest: gradients of the product, of act(gate) and of up, and two residual streams.
    """
    c, shape = group.candidates, job.model
    compute = BYTES[job.formats.compute]
    moe = shape.moe
    width = max(shape.ffn_hidden, moe.top_k * moe.ffn if moe else 0, shape.heads * shape.head_dim)
    per_token = (3.0 if shape.mlp_gated else 2.0) * width / c["tp"] + 2.0 * shape.hidden
    return np.broadcast_to((tokens(job, c) * per_token * compute)[:, None], (len(c), len(group.stages)))


def boundary_bytes(job: Job, candidates: Candidates) -> Reals:
    """Bytes of the hidden states that one micro-batch sends between two stages, per rank, shape (C,)."""
    return tokens(job, candidates) * job.model.hidden * BYTES[job.formats.compute]


def receive_buffers_CS(job: Job, group: Group) -> Reals:
    """Bytes of receive buffers: one per micro-batch for activations and one for gradients, (C, S).

    Source: pytorch 2.13 torch/distributed/pipelining/stage.py allocates them per micro-batch at the first step.
    """
    neighbours = (~group.is_first).astype(np.float64) + (~group.is_last).astype(np.float64)
    chunks: Column = group.candidates["accumulation"] * group.candidates["virtual_stages"]
    if group.pp == 1:
        return np.zeros((len(chunks), len(group.stages)))
    return (chunks * boundary_bytes(job, group.candidates))[:, None] * neighbours[None, :]
