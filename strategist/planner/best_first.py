"""A search for the best layout of every family: what a bound of its step puts behind all of them is neither weighed nor timed.

A layout waits until somebody looks at it. Those with the least bounds of each sort, which belong to the same families, are
looked at first, some more every time; as soon as one of a family fits, nothing waits in that family whose bound is above its
step. What is left out is thus slower than the best of every family that it belongs to, and of every union of families.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from strategist.facts.job import Job
from strategist.planner.search import Pace, Tried
from strategist.planner.weigh import NEAREST, Weights, fits
from strategist.space.candidates import Candidates, Column, Mask
from strategist.timing.estimate import StepTimes, joined_times, least_step_ns, step_times

BOUNDED, WEIGHED = 2**11, 2**2
"""Layouts of each sort that are bounded in memory, and weighed, the first time."""
MORE_BOUNDED, MORE_WEIGHED = 2**4, 2**2
"""How many times as many the next time."""
STEPS = 2**5
"""Steps that are worked out for each layout that is weighed: those of sorts that were asked once cost little more."""
BOUNDED_SOON, WEIGHED_SOON = 2**16, 2**7
"""Layouts of all sorts that are bounded, and weighed, together sooner than some of them first."""
NEVER = np.iinfo(np.int64).max


class Sort:
    """Layouts of the same families: the `scopes` that each of them is among, and rows that are `unseen`, or `possible` because
    the bound of their memory allows them, in no order."""

    def __init__(self, scopes: Sequence[int], rows: Column) -> None:
        self.scopes, self.unseen, self.possible = list(scopes), rows, rows[:0]


def scopes_of(cp: Column, families: Mapping[str, Mask]) -> tuple[Column, list[list[int]]]:
    """The sort of every layout, (C,), and the scopes of every sort. The rules choose among families, and in them among layouts with
    cp = 1: a family is two scopes, all of it and those of cp = 1. Layouts of no family are one more."""
    number = (cp == 1).astype(np.int64)
    for place, members in enumerate(families.values(), start=1):
        number += members.astype(np.int64) << place
    present = np.flatnonzero(np.bincount(number))
    place_of = np.zeros(int(present.max(initial=0)) + 1, np.int64)
    place_of[present] = np.arange(len(present))
    return place_of[number], [_scopes(int(each), len(families)) for each in present]


def _scopes(number: int, families: int) -> list[int]:
    own = [place for place in range(families) if number >> (place + 1) & 1] or [families]
    return [2 * place + whole for place in own for whole in range(1 + number % 2)]


class BestFirst:
    """The state of such a search: `best` is the shortest step in nanoseconds of what fits in every scope, `seen` which legal
    layouts are known to fit or not to; `least` bounds every step, and is the step itself of what was timed, in `parts`."""

    def __init__(self, job: Job, legal: Candidates, families: Mapping[str, Mask]) -> None:
        self.job, self.legal = job, legal
        self.least = least_step_ns(job, legal)
        self.weights = Weights.unseen(job, legal)
        self.seen, self.timed = (np.zeros(len(legal), np.bool_) for _ in range(2))
        self.sort_of, scopes = scopes_of(legal["cp"], families)
        starts = np.bincount(self.sort_of).cumsum()[:-1]
        rows = np.split(self.sort_of.astype(np.int16).argsort(kind="stable"), starts)
        self.sorts = [Sort(own, members) for own, members in zip(scopes, rows, strict=True)]
        self.best = np.full(2 * len(families) + 2, NEVER)
        self.parts: list[tuple[Column, StepTimes]] = []
        self.has_misses = False

    def rounds(self) -> Iterator[int]:
        """Look at some more layouts until none waits; the number that still waits after each look."""
        bounded, weighed = BOUNDED, WEIGHED
        while waiting := sum(len(sort.unseen) + len(sort.possible) for sort in self.sorts):
            if self.best.min() < NEVER:
                yield waiting
            self._bound(bounded)
            self._weigh(weighed)
            self._leave_out()
            bounded, weighed = MORE_BOUNDED * bounded, MORE_WEIGHED * weighed

    def tried(self, untried: int) -> Tried:
        """What is known of the layouts that were looked at."""
        seen = np.flatnonzero(self.seen)
        kept, weights = self.legal.where(seen), self.weights.where(seen)
        fitting = np.flatnonzero(weights.fits)
        times = joined_times(self.parts, seen[fitting]) if self.parts else step_times(self.job, kept.where(fitting))
        slower = len(self.legal) - len(seen) - untried
        return Tried(kept, weights, fitting, kept.where(fitting), times, untried, slower, seen)

    def _leave_out(self) -> None:
        """Let nothing wait that is slower than the best of all its scopes."""
        for sort in self.sorts:
            sort.unseen, sort.possible = (self._possibly_best(sort, rows) for rows in (sort.unseen, sort.possible))

    def _possibly_best(self, sort: Sort, rows: Column) -> Column:
        """Those of some rows of a sort that are not known to be behind the best of all its scopes."""
        limit = self.best[sort.scopes].max()
        return rows if limit == NEVER else rows[self.least[rows] <= limit]

    def _bound(self, few: int) -> None:
        """Ask the bound of memory for the next layouts."""
        taken = self._taken([sort.unseen for sort in self.sorts], few, BOUNDED_SOON)
        rows = _in_order(taken)
        if len(rows):
            self.weights.bound(rows)
            self.seen[rows] = ~self._fit(rows)
        for sort, (own, rest) in zip(self.sorts, taken, strict=True):
            sort.possible, sort.unseen = np.concatenate([sort.possible, own[~self.seen[own]]]), rest

    def _weigh(self, few: int) -> None:
        """Of the next layouts that the bound of memory allows work out the steps, which takes less than their peaks, leave out those that
        are too slow now, and weigh of the others those with the shortest."""
        misses = self._misses()
        near = self._taken([sort.possible for sort in self.sorts], STEPS * few, STEPS * WEIGHED_SOON)
        self._time(_in_order(near))
        quick = [self._possibly_best(sort, rows) for sort, (rows, _) in zip(self.sorts, near, strict=True)]
        taken = self._taken(quick, few, WEIGHED_SOON)
        for sort, (_, later), (_, far) in zip(self.sorts, taken, near, strict=True):
            sort.possible = np.concatenate([later, far])
        rows = _in_order(taken)
        asked = np.zeros(len(self.legal), np.bool_)
        asked[rows] = asked[misses] = True
        self.weights.weigh(np.flatnonzero(asked))
        self.seen[rows] = True
        self._beat(rows[self._fit(rows)])

    def _misses(self) -> Column:
        """The nearest misses, as soon as everything was bounded: who asks for them later pays less in this company."""
        if self.has_misses or any(len(sort.unseen) for sort in self.sorts):
            return self.sort_of[:0]
        self.has_misses = True
        return self.weights.nearest(np.flatnonzero(self.seen & ~self.weights.known), NEAREST)

    def _time(self, rows: Column) -> None:
        """Replace bounds by steps."""
        rows = rows[~self.timed[rows]]
        if len(rows):
            times = step_times(self.job, self.legal.where(rows))
            self.parts.append((rows, times))
            self.least[rows], self.timed[rows] = times.step, True

    def _fit(self, rows: Column) -> Mask:
        return fits(self.job, self.legal.where(rows), self.weights.device[rows], self.weights.host[rows])

    def _beat(self, fitting: Column) -> None:
        """Lower what is to be beaten in every scope of some layouts that fit."""
        shortest = np.full(len(self.sorts), NEVER)
        np.minimum.at(shortest, self.sort_of[fitting], self.least[fitting])
        for sort, step_ns in zip(self.sorts, shortest, strict=True):
            self.best[sort.scopes] = np.minimum(self.best[sort.scopes], step_ns)

    def _taken(self, waiting: Sequence[Column], few: int, soon: int) -> list[tuple[Column, Column]]:
        """Of every sort a few, and the rest; all where they are not many together."""
        most = few if sum(map(len, waiting)) > soon else soon
        return [self._nearest(rows, most) for rows in waiting]

    def _nearest(self, rows: Column, few: int) -> tuple[Column, Column]:
        """A few rows with the least bounds of their steps, and the rest."""
        if len(rows) <= few:
            return rows, rows[:0]
        order = self.least[rows].argpartition(few - 1)
        return rows[order[:few]], rows[order[few:]]


def _in_order(taken: Sequence[tuple[Column, Column]]) -> Column:
    """All rows that were taken, ascending."""
    return np.sort(np.concatenate([rows for rows, _ in taken]))


def best_first(job: Job, legal: Candidates, families: Mapping[str, Mask], pace: Pace | None = None) -> Tried:
    """What became of the legal layouts, `families` being masks of them; of what is left out only how much it is. With a `pace`
    whose time has run out only what was looked at until then, but never before something fits."""
    state = BestFirst(job, legal, families)
    untried = 0
    for waiting in state.rounds():
        if pace is not None and pace.is_over:
            untried = waiting
            break
        if pace is not None:
            pace.tick("layouts weighed or left out", len(legal) - waiting, len(legal), float(state.best.min()) / 1e9)
    return state.tried(untried)
