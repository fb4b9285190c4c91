"""The fold: the terms of memory at each moment of a step, on every stage; the worst of them is the peak."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from strategist.document.estimate import MEMORY_TERMS
from strategist.facts.job import Job
from strategist.memory.activations import (
    activation_bytes_CS,
    backward_temporaries_CS,
    receive_buffers_CS,
    working_set_CS,
)
from strategist.memory.buffers import InFlight, bucket_bytes_CS, runtime_bytes_C, slack_bytes, units_in_flight
from strategist.memory.logits import logits_bytes_CS
from strategist.memory.model_states import (
    gradient_bytes_CS,
    host_bytes_C,
    optimizer_bytes_CS,
    parameter_bytes_CS,
)
from strategist.records import dataclass
from strategist.space.candidates import Candidates, Column, Reals, total_of
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
    stage, moment, host = (np.zeros(size, np.int64) for _ in range(3))
    for group in groups(job.model, candidates):
        table = ledger(job, group)
        worst_moment, worst_stage = table.worst()
        for name in MEMORY_TERMS:
            terms[name][group.rows] = table.bytes_at(name, worst_moment, worst_stage)
        moment[group.rows], stage[group.rows], host[group.rows] = worst_moment, group.stages[worst_stage], table.host
    return Peaks(terms, total_of(terms.values()), stage, moment, host)


@dataclass(frozen=True, slots=True, eq=False)
class Ledger:
    """Bytes of every stage (C, S): `steady` terms hold at every moment, `moving` ones have one entry per moment;
    `runtime` and `host` are per candidate (C,)."""

    steady: Terms
    moving: tuple[Terms, ...]
    runtime: Reals
    host: Column

    def allocated(self, moment: int) -> Reals:
        """Bytes that tensors hold at one moment, (C, S)."""
        return total_of((*self.steady.values(), *self.moving[moment].values()))

    def worst(self) -> tuple[Column, Column]:
        """(moment, stage) of the largest total, the first of equals, each (C,)."""
        totals = [self.allocated(moment) for moment in range(len(MOMENTS))]
        peaks = np.stack([total.max(axis=1) for total in totals])
        stages = np.stack([total.argmax(axis=1) for total in totals])
        moment = peaks.argmax(axis=0)
        return moment, stages[moment, np.arange(len(moment))]

    def bytes_at(self, name: str, moment: Column, stage: Column) -> Column:
        """Whole bytes of one term at a moment and stage of each candidate, (C,)."""
        rows = np.arange(len(moment))
        if name == "runtime":
            return np.ceil(self.runtime).astype(np.int64)
        if name == "slack":
            values = [slack_bytes(self.allocated(m)[rows, stage]) for m in range(len(MOMENTS))]
        elif name in self.steady:
            return np.ceil(self.steady[name][rows, stage]).astype(np.int64)
        else:
            values = [terms[name][rows, stage] if name in terms else np.zeros(len(rows)) for terms in self.moving]
        return np.ceil(np.choose(moment, values)).astype(np.int64)


def ledger(job: Job, group: Group) -> Ledger:
    """Every term of the group's candidates on every stage that is looked at."""
    counts = elements(job.model, group)
    steady = {
        "parameters": parameter_bytes_CS(job, group, counts),
        "optimizer": optimizer_bytes_CS(job, group, counts),
        "bucket_buffers": bucket_bytes_CS(job, group, counts),
        "pipeline_buffers": receive_buffers_CS(job, group),
    }
    gradients, units = gradient_bytes_CS(job, group, counts), units_in_flight(job, group, counts)
    host = np.ceil(host_bytes_C(job, group, counts)).astype(np.int64)
    return Ledger(steady, _moving(job, group, gradients, units), runtime_bytes_C(job, group.candidates), host)


def _moving(job: Job, group: Group, gradients: Reals, units: InFlight) -> tuple[Terms, ...]:
    """Terms that differ between the moments: gradients outlive a step only when there are several micro-batches."""
    held = activation_bytes_CS(job, group)
    early = np.where((group.candidates["accumulation"] > 1)[:, None], gradients, 0.0)
    working = backward_temporaries_CS(job, group) + working_set_CS(job, group)
    logits = logits_bytes_CS(job, group)
    return (
        {"gradients": early, "activations": held, "gather_buffers": units.at_loss, "logits": logits},
        {"gradients": early, "activations": held, "gather_buffers": units.starting, "temporaries": working},
        {"gradients": gradients, "gather_buffers": units.ending},
        {"gradients": gradients},
    )
