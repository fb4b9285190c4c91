"""The fold: the terms of memory at each moment of a step, on every stage; the worst of them is the peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from math import prod

import numpy as np

from strategist.columns import entries, on_stages
from strategist.document.estimate import MEMORY_TERMS
from strategist.facts.job import Job
from strategist.memory.activations import receive_buffers_CS
from strategist.memory.buffers import runtime_bytes_C, slack_share
from strategist.memory.instant import Instant, Terms
from strategist.memory.instants import instants
from strategist.memory.layers import Layers
from strategist.memory.model_states import (
    gradient_bytes_CS,
    host_bytes_C,
    optimizer_bytes_CS,
    parameter_bytes_CS,
    settled_bytes_CS,
)
from strategist.memory.reserved import Pools
from strategist.records import cached_property, dataclass
from strategist.space.candidates import Candidates, Column, Reals, total_of
from strategist.space.engines import as_run
from strategist.space.shares import Elements, Group, elements, groups

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
    return as_run(_peaks, job, candidates)


def _peaks(job: Job, candidates: Candidates) -> Peaks:
    size = len(candidates)
    terms = {name: np.zeros(size, np.int64) for name in MEMORY_TERMS}
    stage, moment, host, last = (np.zeros(size, np.int64) for _ in range(4))
    for group in groups(job, candidates):
        held, *others = _at_worst(job, group)
        for column, own in zip((*terms.values(), stage, moment, host, last), (*held.values(), *others), strict=True):
            column[group.rows] = own
    return Peaks(terms, total_of(terms.values()), stage, moment, host, last)


def _at_worst(job: Job, group: Group) -> tuple[Mapping[str, Column], Column, Column, Column, Column]:
    """The peaks of a group, as `Peaks` has them: bytes by term, stage, moment, host bytes, and what the last stage holds. Its ledger's
    memory is the next one's."""
    table = ledger(job, group)
    worst, stage = table.worst()
    last = _counted(table.fullest[:, -1])
    return table.bytes_at(worst, stage), group.stages[stage], table.moments[worst], table.host, last


MOST_BYTES = 2.0**57
"""128 PiB, which nothing has: terms are counted up to it, so that all of them together are a number of 64 bits."""


def _counted(total: Reals) -> Column:
    """Whole bytes, no more than the most that are counted."""
    found: Column = np.minimum(total, MOST_BYTES).astype(np.int64)
    return found


def device_bytes_CS(job: Job, candidates: Candidates, stages: int) -> Reals:
    """What every stage of every candidate holds at its worst moment, (C, S) for so many `stages`; 0 where a candidate has no such stage."""

    def held(own: Job, some: Candidates) -> Reals:
        device = np.zeros((len(some), stages))
        for group in groups(own, some, every_stage=True):
            table = ledger(own, group)
            device[group.rows, : group.pp] = table.reserved + table.runtime[:, None]
        return device

    return as_run(held, job, candidates)


@dataclass(frozen=True, slots=True, eq=False)
class Floors:
    """Per candidate (C): bytes that it holds at the loss, which its peak is never below, and host bytes."""

    device: Column
    host: Column


def least_memory(job: Job, candidates: Candidates) -> Floors:
    """A bound of every candidate's peak for a tenth of the work. Few layouts hold much more at any other instant."""
    return as_run(_floors, job, candidates)


def _floors(job: Job, candidates: Candidates) -> Floors:
    looked_at, run = candidates.runs(UNREAD)
    least = candidates.where(looked_at).without(UNREAD)
    device, host = (np.zeros(len(looked_at), np.int64) for _ in range(2))
    for group in groups(job, least):
        device[group.rows], host[group.rows] = _at_loss(job, group)
    return Floors(device[run], host[run])


def _at_loss(job: Job, group: Group) -> tuple[Column, Column]:
    """The bounds of a group, device and host bytes."""
    table = ledger(job, group, at_loss=True)
    return _counted(np.floor(table.reserved.max(axis=1) + table.runtime)), table.host


@dataclass(frozen=True, eq=False)
class Ledger:
    """Bytes of every stage (C, S): `steady` terms hold at every instant, together they are `held`, `moving` are the others; `pools`
    knows the allocator's blocks, `runtime` and `host` are per candidate (C,).

    All instants have one number each, in the order of `moving` and of the axes in front of (C, S) there."""

    job: Job
    steady: Terms
    held: Reals
    moving: tuple[Instant, ...]
    pools: Pools
    runtime: Reals
    host: Column

    @property
    def moments(self) -> Column:
        """The moment that every instant belongs to, (T,)."""
        moments = [instant.moment for instant in self.moving]
        return np.repeat(moments, [prod(instant.axes) for instant in self.moving])

    @cached_property
    def allocated(self) -> tuple[Reals, ...]:
        """What tensors hold at the instants of each of `moving`, (..., C, S)."""
        return tuple(instant.total(self.held) for instant in self.moving)

    def on_stage(self, stage: int) -> Reals:
        """What tensors hold on one of the stages at every instant, (T, C)."""
        held = (total[..., stage] for total in self.allocated)
        return np.concatenate([part.reshape(-1, part.shape[-1]) for part in held])

    @cached_property
    def _most(self) -> tuple[Reals, ...]:
        """The largest that tensors hold at the instants of each of `moving`, (C, S)."""
        return tuple(_fullest(instant.total(self.held)) for instant in self.moving)

    @cached_property
    def fullest(self) -> Reals:
        """What tensors hold on every stage at its worst instant, (C, S)."""
        return reduce(np.maximum, self._most)

    @cached_property
    def reserved(self) -> Reals:
        """What the caching allocator holds on every stage, (C, S): by its blocks in frameworks of units with fixed segments, else
        by a share."""
        profile = self.job.profile
        if not profile.has_units or profile.segments != "fixed":
            return self.fullest * (1.0 + slack_share(self.job))
        at_loss = [most for most, moving in zip(self._most, self.moving, strict=True) if moving.is_loss]
        return self.pools.reserved(reduce(np.maximum, at_loss), self.fullest)

    def worst(self) -> tuple[Column, Column]:
        """(instant, stage) of the stage that reserves most and its largest total, the first of equals, each (C,)."""
        stage = self.reserved.argmax(axis=1)
        entry = stage * len(stage) + np.arange(len(stage))  # where stages lie one behind the other
        kind = np.stack([most.ravel("F").take(entry) for most in self._most]).argmax(axis=0)
        instant, first = np.zeros_like(stage), 0
        for place, moving in enumerate(self.moving):
            own = np.flatnonzero(kind == place)
            if len(own):
                held = moving.on(self.held, own, stage[own])
                instant[own] = first + held.reshape(-1, len(own)).argmax(axis=0)
            first += prod(moving.axes)
        return instant, stage

    def bytes_at(self, instant: Column, stage: Column) -> Mapping[str, Column]:
        """Whole bytes of every term at an instant and stage of each candidate, which is the stage's worst, (C,) each."""
        found = {name: np.zeros(len(stage)) for name in MEMORY_TERMS}
        for name, held in self.steady.items():
            found[name] += entries(held, (np.arange(len(stage)), stage))
        for moving, rows, places in self._places(instant):
            own = stage[rows]
            for terms, at in moving.apart(rows):
                for name, held in terms.items():
                    found[name][rows] += entries(held, (*places, at, own))
        at_most = np.arange(len(stage)), stage
        found["slack"] += entries(self.reserved, at_most) - entries(self.fullest, at_most)
        found["runtime"] += self.runtime
        return {name: _counted(np.ceil(held)) for name, held in found.items()}

    def _places(self, instant: Column) -> Iterator[tuple[Instant, Column, tuple[Column, ...]]]:
        """Of `moving` those that are asked for, the rows whose instant is one of theirs, and where along the axes in front it is."""
        first, present = 0, np.flatnonzero(np.bincount(instant)).tolist()
        for moving in self.moving:
            axes = moving.axes
            size = prod(axes)
            if any(first <= number < first + size for number in present):
                rows = np.flatnonzero((instant >= first) & (instant < first + size))
                yield moving, rows, np.unravel_index(instant[rows] - first, axes) if axes else ()
            first += size


def _fullest(held: Reals) -> Reals:
    """The largest along all axes in front of (C, S), (C, S)."""
    if held.ndim == 2:
        return held
    stages_first = held.swapaxes(-1, -2)  # as it lies in memory
    return stages_first.reshape(-1, *stages_first.shape[-2:]).max(axis=0).T


def _moving(
    job: Job, group: Group, counts: Elements, layers: Layers, settled: Reals, *, at_loss: bool
) -> tuple[Instant, ...]:
    """The instants of the job's framework; of those in units only the ones at the loss where they are enough."""
    if not job.profile.has_units:
        from strategist.memory.buffered import buffered_instants  # other frameworks' order of work

        return buffered_instants(job, group, counts, layers, settled)
    at_rest = gradient_bytes_CS(job, group, counts, settled)
    if group.again_SK is None:
        return instants(job, group, counts, layers, at_rest, settled, at_loss=at_loss)
    from strategist.memory.partly import partly_recomputed

    return partly_recomputed(job, group, counts, layers, at_rest, settled, at_loss=at_loss)


def _layers(job: Job, group: Group) -> Layers:
    """What layers keep, or of those some of which are computed again the side that is not."""
    if group.again_SK is None:
        return Layers(job, group)
    from strategist.memory.partly import SideLayers  # few ask for it

    return SideLayers(job, group, again=False)


def ledger(job: Job, group: Group, *, at_loss: bool = False) -> Ledger:
    """Every term of the group's candidates on every stage that is looked at, at every instant or only at the loss."""
    counts = elements(job.model, group)
    steady = {
        "parameters": parameter_bytes_CS(job, group, counts),
        "optimizer": optimizer_bytes_CS(job, group, counts),
        "pipeline_buffers": receive_buffers_CS(job, group),
    }
    if job.profile.reduce_bucket:
        from strategist.memory.reduced import standing_bytes_C  # DeepSpeed's alone

        steady["bucket_buffers"] = on_stages(standing_bytes_C(job, group), np.ones(len(group.stages)))
    if "compression" in group.candidates.columns:
        from strategist.memory.compression import remembered_CS  # few ask for any

        steady["bucket_buffers"] = remembered_CS(job, group)
    layers, settled = _layers(job, group), settled_bytes_CS(job, group, counts)
    moving = _moving(job, group, counts, layers, settled, at_loss=at_loss)
    held = total_of(steady.values())
    host = _counted(np.ceil(host_bytes_C(job, group, counts)))
    pools = Pools(job, group, counts, layers, settled)
    return Ledger(job, steady, held, moving, pools, runtime_bytes_C(job, group.candidates), host)
