"""An uneven batch: on nodes of several kinds a replica runs as many micro-batches as its kind of nodes has time for.

Replicas of DDP and ZeRO-1 meet once a step, behind their last micro-batch, so that nobody waits for anybody before. A step lasts as long as
that of the kind which is last: its own micro-batches, the exchange over the links of all machines behind its own last backward pass, and
its update. What is looked at is few beside a search (docs/decisions/0146-uneven-batches.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd, inf
from typing import Any

import numpy as np

from strategist.document.plan import Share
from strategist.facts.job import Job
from strategist.memory.estimate import peak_memory
from strategist.planner.kinds import UNEVEN, kinds
from strategist.planner.rank import complexity
from strategist.planner.search import Question, legality, limits_of
from strategist.planner.situation import one, question
from strategist.planner.weigh import fits
from strategist.records import dataclass, replace
from strategist.rulebook.apply import Refused, family_masks, forbid, sentence
from strategist.space.candidates import ASKED, Candidates, Column, Mask, Reals
from strategist.space.enumerate import MAX_MICRO_BATCH, Limits, as_asked, divisors, meshes, sequence_cuts
from strategist.space.grammar import forbidden, layout
from strategist.timing.estimate import StepTimes, step_times

ROUNDING_NS = 100
"""More than what rounding every term of two steps to nanoseconds makes of a third between them."""
SORTS = 3
"""Without a pipeline memory knows one, two and more micro-batches: those between the first and the last are alike."""
CHOSEN = ("dp_replicate", "dp_shard", "tp", "etp", "zero", "sequence_parallel", "micro_batch", "recompute", "mesh")
"""Choices of a layout that are open, and the number of its mesh."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Replicas of one kind: how many, nanoseconds of a step with one micro-batch, and of each further one."""

    replicas: int
    first_ns: float
    each_ns: float

    def finish_ns(self, micro_batches: Column) -> Reals:
        """When the kind is through with a step, by the micro-batches of each of its replicas."""
        later: Reals = self.first_ns + self.each_ns * (micro_batches - 1)
        return later


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """An uneven batch in one layout (a single row; its accumulation is the largest): the shares by kind, times and ledger of the step of
    the kind that is last, and the kind with the least room, as its job and its row. `devices` are the names of
    the kinds."""

    candidate: Candidates
    shares: tuple[Share, ...]
    times: StepTimes
    tightest: tuple[Job, Candidates]
    devices: tuple[str, ...]

    @property
    def step_ns(self) -> int:
        """Nanoseconds per step."""
        return int(self.times.step[0])

    @property
    def is_even(self) -> bool:
        """Whether all replicas run as many: the search's own layouts do."""
        return len({share.micro_batches for share in self.shares}) == 1

    @property
    def layout(self) -> str:
        """The layout in words, with the micro-batches of each kind for accumulation."""
        return uneven_words(self.candidate.row(0), self.shares)

    @property
    def words(self) -> str:
        """Who runs how many micro-batches."""
        each = zip(self.shares, self.devices, strict=True)
        return "micro-batches per replica " + ", ".join(f"{share.micro_batches} on {device}" for share, device in each)

    @property
    def rank(self) -> tuple[int, int]:
        """What is sooner, and of equally soon ones simpler, is smaller."""
        return self.step_ns, int(complexity(self.candidate)[0])


@dataclass(frozen=True, slots=True, eq=False)
class Looked:
    """The best uneven batch, if any fits, and whether it is of a family that the policy takes; and why there is none, where a rule
    refuses every layout."""

    split: Split | None
    why: str = ""
    is_preferred: bool = True


def uneven_words(row: Mapping[str, int | str], shares: Sequence[Share]) -> str:
    """A layout in words, with the micro-batches of each kind for accumulation: `dp_replicate=16, micro_batch=4, accumulation=3/1`."""
    return layout({**row, "accumulation": "/".join(str(share.micro_batches) for share in shares)})


def jobs_of_kinds(job: Job) -> tuple[Job, ...]:
    """The job on the nodes of each kind, whose replicas meet over all machines."""
    return tuple(replace(job, cluster=alone, all_machines=job.cluster) for alone in kinds(job.cluster))


def balanced(speeds: Sequence[Speed], total: int) -> tuple[int, ...] | None:
    """How many micro-batches each replica of each kind runs, at least one, so that all run `total` and the kind that is last is through as
    soon as can be; None where no whole numbers add up.

    One kind after the other: of all ways to hand out a number of micro-batches to the kinds so far, the one that ends first.
    """
    unit = gcd(*(speed.replicas for speed in speeds))
    if total % unit:
        return None
    latest = np.full(total // unit + 1, inf)
    latest[0] = 0.0
    chosen = []
    for speed in speeds:
        latest, numbers = _with_kind(latest, replace(speed, replicas=speed.replicas // unit))
        chosen.append(numbers)
    if latest[-1] == inf:
        return None
    left, shares = len(latest) - 1, []
    for speed, numbers in zip(reversed(speeds), reversed(chosen), strict=True):
        shares.append(int(numbers[left]))
        left -= shares[-1] * speed.replicas // unit
    return tuple(reversed(shares))


def _with_kind(latest: Reals, speed: Speed) -> tuple[Reals, Column]:
    """When all kinds are through at the soonest with one kind more, by how much was handed out, and the micro-batches of each of its
    replicas then."""
    best, chosen = np.full(len(latest), inf), np.zeros(len(latest), np.int64)
    numbers = np.arange(1, (len(latest) - 1) // speed.replicas + 1)
    for number, finish in zip(numbers.tolist(), speed.finish_ns(numbers).tolist(), strict=True):
        taken = number * speed.replicas
        ends = np.maximum(latest[: len(latest) - taken], finish)
        sooner = ends < best[taken:]
        best[taken:][sooner], chosen[taken:][sooner] = ends[sooner], number
    return best, chosen


def best_split(asked: Question, among: tuple[str, ...] = ()) -> Looked:
    """The soonest uneven batch of a question about several kinds of nodes that fits each of them, of some families or of all; of equally
    soon ones the simplest."""
    facts, everything = question(asked.job), layouts(asked)
    if not len(everything):
        return Looked(None)
    keep, refused = forbid(legality(asked), facts, everything)
    legal = everything.where(keep)
    if not len(legal):
        return Looked(None, _sentence_of(refused[0], facts, everything))
    if asked.frontend is not None:
        says = asked.frontend.says(asked.job, legal)
        if not says.any():
            return Looked(None, " ".join(asked.frontend.obstacles(asked.job, legal, 0)))
        legal = legal.where(says)
    if among and len(legal):
        masks = family_masks(legal, facts)
        legal = legal.where(np.any([masks[name] for name in among], axis=0))
    return Looked(_first_that_fits(asked.job, legal))


def _sentence_of(refused: Refused, facts: Mapping[str, Any], everything: Candidates) -> str:
    """Why a rule refuses the first layout that it refuses."""
    row = everything.row(refused.example)
    return sentence(refused.rule.because, {**facts, **row, "dp": int(everything.data_parallel[refused.example])})


def layouts(asked: Question) -> Candidates:
    """Replicas, whole or cut by tp inside nodes of every kind, in micro-batches of every size; accumulation is still to be chosen."""
    limits = limits_of(asked)
    sizes = [
        size
        for size in divisors(limits.global_batch)
        if size <= MAX_MICRO_BATCH or size == limits.pinned("micro_batch")
    ]
    rows = [
        (*mesh, sequence, size, recompute, number)
        for number, mesh in enumerate(_meshes(asked.job, limits))
        for sequence in sequence_cuts(limits, 1, mesh[2])
        for size in sizes
        for recompute in range(3)
    ]
    chosen = np.array(rows, np.int64).reshape(len(rows), len(CHOSEN)).T
    found = as_asked(_plain(dict(zip(CHOSEN, chosen, strict=True)), len(rows)), UNEVEN, 1)
    for name in ASKED:
        if value := limits.pinned(name):
            found = as_asked(found, name, value)
    keep = np.ones(len(found), np.bool_)
    for pin in limits.pins:
        keep &= pin.holds(found)
    for word in limits.forbids:
        keep &= ~forbidden(word, found)
    return found.where(keep)


def _meshes(job: Job, limits: Limits) -> Iterator[tuple[int, ...]]:
    """(dp_replicate, dp_shard, tp, etp, zero) of all ranks, replicas of one kind alone each."""
    inside = gcd(*(gcd(group.node.gpus, group.node.fast_domain) for group in job.cluster.groups))
    for pp, replicate, shard, cp, tp, ep, etp, zero in meshes(limits):
        if pp == cp == ep == 1 and inside % tp == 0 and replicate * shard > 1:
            yield replicate, shard, tp, etp, zero


def _plain(columns: dict[str, Column], size: int) -> Candidates:
    """Layouts with some choices made and all others plain."""
    return Candidates({name: np.repeat(plain, size) for name, plain in one().columns.items()} | columns)


def _first_that_fits(job: Job, legal: Candidates) -> Split | None:
    """The soonest uneven batch that every kind has room for. Layouts are tried in the order of a bound, until it is behind the best."""
    if not len(legal):
        return None
    totals = job.workload.global_batch // legal["micro_batch"]
    every = [_Speeds(kind, legal, totals) for kind in jobs_of_kinds(job)]
    least, best = _least_ns(every, totals), None
    for row in least.argsort(kind="stable").tolist():
        if best is not None and least[row] > best.step_ns + ROUNDING_NS:
            break
        shares = balanced([speeds.of(row) for speeds in every], int(totals[row]))
        if shares is None or not all(own.has_room(row, number) for own, number in zip(every, shares, strict=True)):
            continue
        split = priced(job, legal.where(np.array([row])), shares)
        if best is None or split.rank < best.rank:
            best = split
    return best


class _Speeds:
    """The speed of one kind in many layouts, (C,) each, and whether it has room for them."""

    def __init__(self, kind: Job, legal: Candidates, totals: Column) -> None:
        self.replicas = kind.cluster.world // legal["tp"]
        most = np.maximum(2, totals)
        self.first = step_times(kind, _running(legal, np.ones_like(most))).step.astype(np.float64)
        self.each = (step_times(kind, _running(legal, most)).step - self.first) / (most - 1)
        self._room = [_has_room(kind, _running(legal, np.full_like(most, number))) for number in range(1, SORTS + 1)]

    def has_room(self, row: int, micro_batches: int) -> bool:
        """Whether the kind's devices hold one layout."""
        return bool(self._room[min(micro_batches, SORTS) - 1][row])

    def of(self, row: int) -> Speed:
        """The speed in one layout."""
        return Speed(int(self.replicas[row]), float(self.first[row]), float(self.each[row]))


def _least_ns(every: Sequence[_Speeds], totals: Column) -> Reals:
    """What no step is below, (C,): all kinds end together, if micro-batches could be cut."""
    per_ns = sum(speeds.replicas / speeds.each for speeds in every)
    at_once = sum(speeds.replicas * (1.0 - speeds.first / speeds.each) for speeds in every)
    least: Reals = (totals - at_once) / per_ns
    return least


def _running(candidates: Candidates, micro_batches: Column) -> Candidates:
    """The layouts as a kind sees them whose replicas run so many micro-batches."""
    return Candidates({**candidates.columns, "accumulation": micro_batches})


def priced(job: Job, candidate: Candidates, micro_batches: Sequence[int]) -> Split:
    """An uneven batch in one layout, whose replicas run so many micro-batches by kind: when it is through, and whether each kind has room."""
    own, rows = jobs_of_kinds(job), [_running(candidate, np.array([number])) for number in micro_batches]
    times = [step_times(kind, row) for kind, row in zip(own, rows, strict=True)]
    rooms = [kind.usable_bytes - int(peak_memory(kind, row).device[0]) for kind, row in zip(own, rows, strict=True)]
    tightest = int(np.argmin(rooms))
    replicas = [kind.cluster.world // int(candidate["tp"][0]) for kind in own]
    return Split(
        candidate=_running(candidate, np.array([max(micro_batches)])),
        shares=tuple(Share(replicas=r, micro_batches=m) for r, m in zip(replicas, micro_batches, strict=True)),
        times=max(times, key=lambda found: int(found.step[0])),
        tightest=(own[tightest], rows[tightest]),
        devices=tuple(kind.cluster.smallest.title for kind in own),
    )


def _has_room(job: Job, rows: Candidates) -> Mask:
    """Which layouts fit the devices, (C,)."""
    peaks = peak_memory(job, rows)
    return fits(job, rows, peaks.device, peaks.host)
