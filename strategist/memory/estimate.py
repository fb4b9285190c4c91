"""The fold: the terms of memory at each moment of a step, on every stage; the worst of them is the peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

import numpy as np

from strategist.columns import entries
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
from strategist.memory.step import Instant, added
from strategist.records import dataclass
from strategist.space.candidates import Candidates, Column, Reals, total_of
from strategist.space.shares import Elements, Group, elements, groups

Terms = Mapping[str, Reals]

UNREAD = "context_parallel"
"""What the bound does not read: an all-to-all keeps one tensor more than a ring. Such layouts stand behind one another."""


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
    for group in groups(job, candidates):
        table = ledger(job, group)
        worst, worst_stage = table.worst()
        for name, held in table.bytes_at(worst, worst_stage).items():
            terms[name][group.rows] = held
        moment[group.rows] = table.moments[worst]
        stage[group.rows], host[group.rows] = group.stages[worst_stage], table.host
        last[group.rows] = table.on_stage(-1).max(axis=0)
    return Peaks(terms, total_of(terms.values()), stage, moment, host, last)


@dataclass(frozen=True, slots=True, eq=False)
class Floors:
    """Per candidate (C): bytes that it holds at the loss, which its peak is never below, and host bytes."""

    device: Column
    host: Column


def least_memory(job: Job, candidates: Candidates) -> Floors:
    """A bound of every candidate's peak for a tenth of the work. Few layouts hold much more at any other instant."""
    looked_at, run = candidates.runs(UNREAD)
    least = candidates.where(looked_at).without(UNREAD)
    device, host = (np.zeros(len(looked_at), np.int64) for _ in range(2))
    for group in groups(job, least):
        table = ledger(job, group, at_loss=True)
        held = table.on_any_stage().max(axis=0)
        device[group.rows] = np.floor(held + slack_bytes(job, held) + table.runtime).astype(np.int64)
        host[group.rows] = table.host
    return Floors(device[run], host[run])


@dataclass(frozen=True, slots=True, eq=False)
class Ledger:
    """Bytes of every stage (C, S): `steady` terms hold at every instant, `moving` are the others, `allocated` is what tensors
    hold at the instants of each of them, (..., C, S); `runtime` and `host` are per candidate (C,).

    All instants have one number each, in the order of `moving` and of the axes in front of (C, S) there."""

    job: Job
    steady: Terms
    moving: tuple[Instant, ...]
    allocated: tuple[Reals, ...]
    runtime: Reals
    host: Column

    @property
    def moments(self) -> Column:
        """The moment that every instant belongs to, (T,)."""
        moments = [instant.moment for instant in self.moving]
        return np.repeat(moments, [prod(total.shape[:-2]) for total in self.allocated])

    def on_stage(self, stage: int) -> Reals:
        """What tensors hold on one of the stages at every instant, (T, C)."""
        return _one_behind_the_other(total[..., stage] for total in self.allocated)

    def on_any_stage(self) -> Reals:
        """What tensors hold on the fullest of the stages at every instant, (T, C): one column after the other, because there are
        three of them and many rows."""
        return _one_behind_the_other(
            np.maximum.reduce([total[..., stage] for stage in range(total.shape[-1])]) for total in self.allocated
        )

    def worst(self) -> tuple[Column, Column]:
        """(instant, stage) of the largest total, the first of equals, each (C,)."""
        instant = self.on_any_stage().argmax(axis=0)
        stage = np.zeros_like(instant)
        for total, _, rows, places in self._places(instant):
            stage[rows] = total[*places, rows].argmax(axis=1)
        return instant, stage

    def bytes_at(self, instant: Column, stage: Column) -> Mapping[str, Column]:
        """Whole bytes of every term at an instant and stage of each candidate, (C,) each."""
        found = {name: np.zeros(len(stage)) for name in MEMORY_TERMS}
        for name, held in self.steady.items():
            found[name] += held[np.arange(len(stage)), stage]
        for total, terms, rows, places in self._places(instant):
            at = *places, rows, stage[rows]
            for name, held in terms.items():
                found[name][rows] += entries(held, at)
            found["slack"][rows] = slack_bytes(self.job, total[at])
        found["runtime"] += self.runtime
        return {name: np.ceil(held).astype(np.int64) for name, held in found.items()}

    def _places(self, instant: Column) -> Iterator[tuple[Reals, Terms, Column, tuple[Column, ...]]]:
        """Totals and terms of `moving`, the rows whose instant is one of theirs, and where along the axes in front it is."""
        first = 0
        for moving, held in zip(self.moving, self.allocated, strict=True):
            axes = held.shape[:-2]
            size = prod(axes)
            rows = np.flatnonzero((instant >= first) & (instant < first + size))
            if len(rows):
                yield held, moving.terms, rows, np.unravel_index(instant[rows] - first, axes) if axes else ()
            first += size


def _one_behind_the_other(held: Iterable[Reals]) -> Reals:
    """(..., C) arrays as one, (T, C)."""
    return np.concatenate([part.reshape(-1, part.shape[-1]) for part in held])


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
    allocated = tuple(added(held, *instant.terms.values()) for instant in moving)
    host = np.ceil(host_bytes_C(job, group, counts)).astype(np.int64)
    return Ledger(job, steady, moving, allocated, runtime_bytes_C(job, group.candidates), host)
