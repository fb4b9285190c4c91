"""Bytes of activations: what each layer keeps, how many micro-batches are in flight, what recomputation saves."""

from __future__ import annotations

import numpy as np

from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.space.candidates import Candidates, Column, Reals, code
from strategist.space.shares import Group, sequence_cut, tokens


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


def edges_CS(job: Job, group: Group, *, first: bool = True) -> Reals:
    """Bytes kept outside the layers per micro-batch, (C, S): the final norm and the head's input on the last stage and,
    with `first`, what the layers of a stage share or hand on: the tables of rotary positions, and in a pipeline the
    stage's output, while its input lies in a receive buffer."""
    c, shape = group.candidates, job.model
    count, compute = tokens(job, c)[:, None], BYTES[job.formats.compute]
    statistics = 4.0 * (1 if shape.norm == "rmsnorm" else 2)
    cut = sequence_cut(c)[:, None]
    last = count * (shape.hidden * compute + statistics) / cut + count * shape.hidden * compute
    if not first:
        return np.where(group.is_last[None, :], last, 0.0)
    tables = job.workload.seq_len * shape.head_dim * compute if shape.pos == "rope" else 0.0
    handed_on = np.where(group.is_last, 0.0, 1.0) - np.where(group.is_first, 0.0, 1.0)
    return np.where(group.is_last[None, :], last, 0.0) + tables + count * shape.hidden * compute / cut * handed_on


def step_inputs_C(job: Job, c: Candidates) -> Reals:
    """Bytes of a step's token ids and labels on one rank, eight each, (C,)."""
    return 16.0 * tokens(job, c) * c["accumulation"]


def boundary_bytes(job: Job, candidates: Candidates) -> Reals:
    """Bytes of the hidden states that one micro-batch sends between two stages, per rank, shape (C,)."""
    return tokens(job, candidates) * job.model.hidden * BYTES[job.formats.compute]


def receive_buffers_CS(job: Job, group: Group) -> Reals:
    """Bytes of receive buffers: one per micro-batch for activations and one for gradients, (C, S).

    Source: pytorch 2.13 torch/distributed/pipelining/stage.py allocates them per micro-batch at the first step.
    """
    neighbours = (~group.is_first).astype(np.float64) + (~group.is_last).astype(np.float64)
    chunks: Column = group.candidates["accumulation"] * group.candidates["virtual_stages"]
    if not job.profile.has_units:  # other frameworks take a buffer when a message is due
        chunks = np.ones_like(chunks)
    if group.pp == 1:
        return np.zeros((len(chunks), len(group.stages)))
    return (chunks * boundary_bytes(job, group.candidates))[:, None] * neighbours[None, :]
