"""The fold: the terms of memory at each moment of a step, on every stage; the worst of them is the peak."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from strategist.document.estimate import MEMORY_TERMS
from strategist.facts.job import Job
from strategist.memory.activations import receive_buffers_CS
from strategist.memory.buffered import buffered_instants
from strategist.memory.buffers import runtime_bytes_C, slack_bytes
from strategist.memory.instants import instants
from strategist.memory.model_states import (
    gradient_bytes_CS,
    host_bytes_C,
    optimizer_bytes_CS,
    parameter_bytes_CS,
    settled_bytes_CS,
)
from strategist.memory.step import Instant
from strategist.records import dataclass
from strategist.space.candidates import Candidates, Column, Reals, total_of
from strategist.space.shares import Elements, Group, elements, groups

Terms = Mapping[str, Reals]


@dataclass(frozen=True, slots=True, eq=False)
class Peaks:
    """Per candidate (C): bytes by term at the worst moment of the worst stage, where that is, host bytes, and what tensors
    hold on the last stage at its own worst moment."""

    terms: Mapping[str, Column]
    device: Column
    stage: Column
    moment: Column
    host: Column
    last_allocated: Column


def peak_memory(job: Job, candidates: Candidates) -> Peaks:
    """The peak of every candidate. Whole bytes; the terms add up to `device` exactly."""
    size = len(candidates)
    terms = {name: np.zeros(size, np.int64) for name in MEMORY_TERMS}
    stage, moment, host, last = (np.zeros(size, np.int64) for _ in range(4))
    for group in groups(job.model, candidates, split=job.split):
        table = ledger(job, group)
        worst, worst_stage = table.worst()
        for name, held in table.bytes_at(worst, worst_stage).items():
            terms[name][group.rows] = held
        moment[group.rows] = np.array([instant.moment for instant in table.moving])[worst]
        stage[group.rows], host[group.rows] = group.stages[worst_stage], table.host
        last[group.rows] = np.max([total[:, -1] for total in table.allocated], axis=0)
    return Peaks(terms, total_of(terms.values()), stage, moment, host, last)


@dataclass(frozen=True, slots=True, eq=False)
class Floors:
    """Per candidate (C): bytes that it holds at the loss, which its peak is never below, and host bytes."""

    device: Column
    host: Column


def least_memory(job: Job, candidates: Candidates) -> Floors:
    """A bound of every candidate's peak for a tenth of the work. Few layouts hold much more at any other instant."""
    device, host = (np.zeros(len(candidates), np.int64) for _ in range(2))
    for group in groups(job.model, candidates, split=job.split):
        table = ledger(job, group, at_loss=True)
        held = _widest(np.maximum.reduce(table.allocated))
        device[group.rows] = np.floor(held + slack_bytes(job, held) + table.runtime).astype(np.int64)
        host[group.rows] = table.host
    return Floors(device, host)


def _widest(held_CS: Reals) -> Reals:
    """The largest of the stages, (C,): one column after the other, because there are three of them and many rows."""
    return np.maximum.reduce(tuple(held_CS.T))


@dataclass(frozen=True, slots=True, eq=False)
class Ledger:
    """Bytes of every stage (C, S): `steady` terms hold at every instant, `moving` are the others by instant, `allocated`
    is what tensors hold at each instant; `runtime` and `host` are per candidate (C,)."""

    job: Job
    steady: Terms
    moving: tuple[Instant, ...]
    allocated: tuple[Reals, ...]
    runtime: Reals
    host: Column

    def worst(self) -> tuple[Column, Column]:
        """(instant, stage) of the largest total, the first of equals, each (C,)."""
        instant = np.stack([_widest(total) for total in self.allocated]).argmax(axis=0)
        stage = np.zeros_like(instant)
        for place in np.unique(instant):
            rows = np.flatnonzero(instant == place)
            stage[rows] = self.allocated[place][rows].argmax(axis=1)
        return instant, stage

    def bytes_at(self, instant: Column, stage: Column) -> Mapping[str, Column]:
        """Whole bytes of every term at an instant and stage of each candidate, (C,) each."""
        found = {name: np.zeros(len(stage)) for name in MEMORY_TERMS}
        for name, held in self.steady.items():
            found[name] += held[np.arange(len(stage)), stage]
        for place in np.unique(instant):
            rows = np.flatnonzero(instant == place)
            at = rows, stage[rows]
            for name, held in self.moving[place].terms.items():
                found[name][rows] += held[at]
            found["slack"][rows] = slack_bytes(self.job, self.allocated[place][at])
        found["runtime"] += self.runtime
        return {name: np.ceil(held).astype(np.int64) for name, held in found.items()}


def _moving(job: Job, group: Group, counts: Elements, *, at_loss: bool) -> tuple[Instant, ...]:
    """The instants of the job's framework; of those in units only the ones at the loss where they are enough."""
    settled = settled_bytes_CS(job, group, counts)
    if not job.profile.has_units:
        return buffered_instants(job, group, counts, settled)
    return instants(job, group, counts, gradient_bytes_CS(job, group, counts), settled, at_loss=at_loss)


def ledger(job: Job, group: Group, *, at_loss: bool = False) -> Ledger:
    """Every term of the group's candidates on every stage that is looked at, at every instant or only at the loss."""
    counts = elements(job.model, group)
    steady = {
        "parameters": parameter_bytes_CS(job, group, counts),
        "optimizer": optimizer_bytes_CS(job, group, counts),
        "pipeline_buffers": receive_buffers_CS(job, group),
    }
    moving = _moving(job, group, counts, at_loss=at_loss)
    held = total_of(steady.values())
    allocated = tuple(total_of((held, *instant.terms.values())) for instant in moving)
    host = np.ceil(host_bytes_C(job, group, counts)).astype(np.int64)
    return Ledger(job, steady, moving, allocated, runtime_bytes_C(job, group.candidates), host)
