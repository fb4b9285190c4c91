"""The fold: the terms of memory at each moment of a step, on every stage; the worst of them is the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from strategist.document.estimate import MEMORY_TERMS
from strategist.facts.job import Job
from strategist.memory.activations import (
    activation_bytes_CS,
    backward_temporaries_CS,
    receive_buffers_CS,
    working_set_CS,
)
from strategist.memory.buffers import InFlight, bucket_bytes_CS, runtime_bytes_C, slack_bytes_CS, units_in_flight
from strategist.memory.logits import logits_bytes_CS
from strategist.memory.model_states import (
    gradient_bytes_CS,
    host_bytes_C,
    optimizer_bytes_CS,
    parameter_bytes_CS,
)
from strategist.space.candidates import Candidates, Column, Reals
from strategist.space.shares import Group, elements, groups

MOMENTS = ("loss", "backward of the last layer", "end of backward", "optimizer step")
"""Where a step can peak: at the loss with every activation held, when backward starts, when it ends and the last
gradients are reduced, and when the update runs."""

Terms = Mapping[str, Reals]


@dataclass(frozen=True, slots=True, eq=False)
class Peaks:
    """Per candidate (C): bytes by term at the worst moment of the worst stage, where that is, and host bytes."""

    terms: Mapping[str, Column]
    device: Column
    stage: Column
    moment: Column
    host: Column


def peak_memory(job: Job, candidates: Candidates) -> Peaks:
    """The peak of every candidate. Whole bytes; the terms add up to `device` exactly."""
    size = len(candidates)
    terms = {name: np.zeros(size, np.int64) for name in MEMORY_TERMS}
    device, stage, moment, host = (np.zeros(size, np.int64) for _ in range(4))
    for group in groups(job.model, candidates):
        table, host_C = stage_terms(job, group)
        worst = _worst(table)
        for name, value_MCS in table.items():
            terms[name][group.rows] = _take(value_MCS, worst)
        device[group.rows] = sum(terms[name][group.rows] for name in MEMORY_TERMS)
        moment[group.rows], stage[group.rows] = worst[0], group.stages[worst[1]]
        host[group.rows] = host_C
    return Peaks(terms, device, stage, moment, host)


def stage_terms(job: Job, group: Group) -> tuple[Mapping[str, Column], Column]:
    """Whole bytes of every term at every moment on every stage, (M, C, S), and host bytes (C,)."""
    counts = elements(job.model, group)
    flat: dict[str, Reals] = {
        "parameters": parameter_bytes_CS(job, group, counts),
        "optimizer": optimizer_bytes_CS(job, group, counts),
        "bucket_buffers": bucket_bytes_CS(job, group, counts),
        "pipeline_buffers": receive_buffers_CS(job, group),
    }
    moving = _moving(job, group, gradient_bytes_CS(job, group, counts), units_in_flight(job, group, counts))
    shape = (len(MOMENTS), len(group.candidates), len(group.stages))
    table: dict[str, Reals] = {name: np.broadcast_to(value, shape) for name, value in flat.items()} | moving
    table["slack"] = slack_bytes_CS(np.sum(list(table.values()), axis=0))
    table["runtime"] = np.broadcast_to(runtime_bytes_C(job, group.candidates)[None, :, None], shape)
    whole = {name: np.ceil(value).astype(np.int64) for name, value in table.items()}
    return {name: whole[name] for name in MEMORY_TERMS}, np.ceil(host_bytes_C(job, group, counts)).astype(np.int64)


def _moving(job: Job, group: Group, gradients: Reals, units: InFlight) -> dict[str, Reals]:
    """Terms that differ between the moments: gradients outlive a step only when there are several micro-batches."""
    held = activation_bytes_CS(job, group)
    nothing: Reals = np.zeros_like(held)
    early = np.where((group.candidates["accumulation"] > 1)[:, None], gradients, 0.0)
    working = backward_temporaries_CS(job, group) + working_set_CS(job, group)
    return {
        "gradients": np.stack([early, early, gradients, gradients]),
        "activations": np.stack([held, held, nothing, nothing]),
        "logits": np.stack([logits_bytes_CS(job, group), nothing, nothing, nothing]),
        "gather_buffers": np.stack(
            [units.gathered, units.gathered + units.starting, units.root + units.ending, nothing]
        ),
        "temporaries": np.stack([nothing, working, nothing, nothing]),
    }


def _worst(table: Mapping[str, Column]) -> tuple[Column, Column]:
    """(moment, stage) of the largest total, first of equals, each (C,)."""
    total: Column = np.sum(list(table.values()), axis=0)
    moments, size, stages = total.shape
    place = total.transpose(1, 0, 2).reshape(size, moments * stages).argmax(axis=1)
    return place // stages, place % stages


def _take(value_MCS: Column, worst: tuple[Column, Column]) -> Column:
    taken: Column = value_MCS[worst[0], np.arange(value_MCS.shape[1]), worst[1]]
    return taken
