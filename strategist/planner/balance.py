"""How many layers each stage of a pipeline owns and how many of them it runs again, chosen together (`stage_split=balanced`).

A stage of 1F1B holds as many micro-batches as there are stages from it to the last. So the first ones run most layers again where each
has its own number (planner/depth.py) and pace the others, which have time left: layers that move to a later stage run there once.
How long a micro-batch occupies a stage depends on the layers of that stage alone, each with the fewest layers again with which it
fits; m micro-batches take (m - 1) max + sum over stages. Of all numbers of layers that add up, a small dynamic programme finds those under which
that is least. Liu et al. 2024 (Aceso, EuroSys) and Zhu et al. 2025 (Mist, arXiv 2503.19050) search for both numbers; the programme is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strategist.facts.job import Job
from strategist.facts.model import layer_sequence
from strategist.planner.depth import alike, fits_CS
from strategist.records import replace
from strategist.space.candidates import Candidates, Column, Mask, Reals
from strategist.space.stages import chunk_lengths
from strategist.timing.estimate import NANO, stage_seconds_CS


def balanced_CS(job: Job, c: Candidates) -> tuple[Column, Column]:
    """Layers of every stage of some pipelines of equal layers, and how many of them it runs again, (C, S) each with as many columns as the
    longest has stages; 0 where one has no such stage. Where nothing fits layers are spread evenly and all of them run again."""
    layers, again = (np.zeros((len(c), int(c["pp"].max(initial=0))), np.int64) for _ in range(2))
    for pp in sorted(set(c["pp"].tolist())):
        rows = np.flatnonzero(c["pp"] == pp)
        own, numbers = _of_one_length(job, c.where(rows), pp)
        layers[rows, :pp], again[rows, :pp] = own, numbers
    return layers, again


def _of_one_length(job: Job, c: Candidates, pp: int) -> tuple[Column, Column]:
    """The same of pipelines of as many stages, (C, S) each."""
    nanoseconds, numbers = stage_tables(job, c, pp)
    own = soonest(nanoseconds, c["accumulation"], len(layer_sequence(job.model)))
    even = np.array(chunk_lengths(job.model, pp, 1, is_weighted=False))
    again = np.take_along_axis(numbers, np.maximum(0, own - 1)[:, :, None], axis=2)[:, :, 0]
    fits = own > 0
    return np.where(fits, own, even), np.where(fits, again, even)


def stage_tables(job: Job, c: Candidates, pp: int) -> tuple[Reals, Column]:
    """For every stage of some pipelines of `pp` stages and n = 1, 2, ... layers on it, (C, S, N): whole nanoseconds that a micro-batch
    occupies it, infinite where it does not fit, and how many of the n layers run again.

    First an equal share, then more, as long as some stage has room for so many and is not slower alone than all stages with as many as were
    found to be enough; then less, as long as the others have room for the rest. Elsewhere n is in no split that is soonest, and infinite.
    """
    tables = _Tables(job, c, pp)
    share = tables.layers // pp
    for number in range(share, tables.layers - pp + 2):
        if not tables.look(number, tables.may_own_more(number, share)):
            break
    for number in reversed(range(1, share)):
        if not tables.look(number, tables.must_own_less(number)):
            break
    return tables.nanoseconds, tables.again


class _Tables:
    """What is known of the stages of some pipelines: nanoseconds and layers that run again, (C, S, N) each; the `longest` stages that fit so far,
    (C, S), and a time in which all micro-batches can be through, (C,)."""

    def __init__(self, job: Job, c: Candidates, pp: int) -> None:
        self.job, self.even, self.rounds = job, c.without("stage_split"), c["accumulation"]
        self.layers = len(layer_sequence(job.model))
        size = len(c), pp, self.layers - pp + 1
        self.nanoseconds, self.again = np.full(size, np.inf), np.zeros(size, np.int64)
        self.longest, self.within = np.zeros(size[:2], np.int64), np.full(len(c), np.inf)

    def may_own_more(self, number: int, share: int) -> Mask:
        """Stages that may own so many layers in a split that is soonest, (C, S): they own one less."""
        return np.asarray((self.longest == number - 1) | (number == share))

    def must_own_less(self, number: int) -> Mask:
        """Stages that own so many layers where the others own as many as they can, (C, S), those that have room for no more layers, too."""
        most = np.where(self.longest > 0, self.longest, number)
        others = most.sum(axis=1)[:, None] - most
        return np.asarray(others + number >= self.layers)

    def look(self, number: int, wanted: Mask) -> bool:
        """Look at some stages with so many layers, (C, S); whether any was to be looked at."""
        rows = np.flatnonzero(wanted.any(axis=1))
        if not len(rows):
            return False
        before = self.again[rows, :, number - 2] if number > 1 else np.zeros_like(self.longest[rows])
        took, again = self._with_layers(number, rows, before, wanted[rows])
        self.nanoseconds[rows, :, number - 1], self.again[rows, :, number - 1] = took, again
        self.longest[rows] = np.where(np.isfinite(took), np.maximum(self.longest[rows], number), self.longest[rows])
        enough = rows[(self.longest[rows] > 0).all(axis=1) & (self.longest[rows].sum(axis=1) >= self.layers)]
        last = np.take_along_axis(self.nanoseconds[enough], self.longest[enough][:, :, None] - 1, axis=2)[:, :, 0]
        through = (self.rounds[enough] - 1) * last.max(axis=1) + last.sum(axis=1)
        self.within[enough] = np.minimum(self.within[enough], through)
        return True

    def _with_layers(self, layers: int, rows: Column, least: Column, wanted: Mask) -> tuple[Reals, Column]:
        """Nanoseconds and layers that run again of some rows, (rows, S) each, with so many layers on every stage; `least` run again in any case,
        as they do with fewer layers."""
        stages = least.shape[1]
        owning = replace(self.job, split=(layers,) * stages)
        all_again = alike(self.even.where(rows), np.full(len(rows), layers))
        took, again, wanted = (
            np.full(least.shape, np.inf),
            np.zeros_like(least),
            wanted & fits_CS(owning, all_again, stages),
        )
        for number in range(layers + 1):
            some = np.flatnonzero((wanted & (least <= number)).any(axis=1))
            if not len(some):
                continue
            same = alike(self.even.where(rows[some]), np.full(len(some), number))
            alone = np.round(stage_seconds_CS(owning, same, stages) * NANO)
            wanted[some] &= self.rounds[rows[some], None] * alone <= self.within[rows[some], None]
            asked = np.flatnonzero((wanted[some] & (least[some] <= number)).any(axis=1))
            some, alone = some[asked], alone[asked]
            fit = wanted[some] & fits_CS(owning, same.where(asked), stages)
            took[some], again[some] = np.where(fit, alone, took[some]), np.where(fit, number, again[some])
            wanted[some] &= ~fit
        return took, again


def soonest(nanoseconds: Reals, rounds: Column, layers: int) -> Column:
    """The layers of every stage, (C, S), under which so many `rounds`, (C,), of micro-batches are through as soon as can be, by what one takes
    of a stage with 1, 2, ... layers, (C, S, N); 0 where no numbers that fit add up to `layers`. Of equally soon ones those whose slowest stage
    is faster, then those with the fewest layers on the first stage, and so on.

    For one limit of the slowest stage after the other, from the least that allows all layers: the least sum within it.
    """
    found, best = np.zeros(nanoseconds.shape[:2], np.int64), np.full(len(rounds), np.inf)
    limit, shortest = _least_limit(nanoseconds, layers), _least_sums(nanoseconds, layers)[0][:, layers]
    rows = np.flatnonzero(np.isfinite(limit))
    while len(rows):
        within = nanoseconds[rows]
        within = np.where(within <= limit[rows, None, None], within, np.inf)
        sums = _least_sums(within, layers)
        total = (rounds[rows] - 1) * limit[rows] + sums[0][:, layers]
        better = total < best[rows]
        best[rows[better]] = total[better]
        found[rows[better]] = _chosen(within[better], [each[better] for each in sums], layers)
        later = nanoseconds[rows] > limit[rows, None, None]
        limit[rows] = np.where(later, nanoseconds[rows], np.inf).min(axis=(1, 2))
        rows = rows[np.isfinite(limit[rows])]
        rows = rows[(rounds[rows] - 1) * limit[rows] + shortest[rows] < best[rows]]
    return found


def _least_limit(nanoseconds: Reals, layers: int) -> Reals:
    """The least time of the slowest stage with which all layers have a stage, (C,); infinite where there is none. A stage with more layers takes
    longer, so it owns any number up to the largest within the limit."""
    steps = np.sort(nanoseconds.reshape(len(nanoseconds), -1), axis=1)
    rows, low, high = np.arange(len(steps)), np.zeros(len(steps), np.int64), np.full(len(steps), steps.shape[1])
    numbers, most_ns = 1 + np.arange(nanoseconds.shape[2]), np.finfo(float).max
    while (low < high).any():  # as long as a row does not know the first step that is enough
        middle = np.minimum((low + high) // 2, steps.shape[1] - 1)
        most = np.where(nanoseconds <= np.minimum(steps[rows, middle], most_ns)[:, None, None], numbers, 0).max(axis=2)
        enough = (most > 0).all(axis=1) & (most.sum(axis=1) >= layers)
        low, high = np.where(enough | (low >= high), low, middle + 1), np.where(enough, middle, high)
    return np.where(low < steps.shape[1], steps[rows, np.minimum(low, steps.shape[1] - 1)], np.inf)


def _least_sums(nanoseconds: Reals, layers: int) -> list[Reals]:
    """For every stage the least sum over it and all behind it of owning 0, 1, ... `layers` layers, (C, layers + 1) each; behind the last stage
    there is none to own."""
    behind = np.full((len(nanoseconds), layers + 1), np.inf)
    behind[:, 0] = 0.0
    sums = [behind]
    for stage in reversed(range(nanoseconds.shape[1])):
        here = np.full_like(behind, np.inf)
        for own in range(1, min(layers, nanoseconds.shape[2]) + 1):
            with_own = nanoseconds[:, stage, own - 1, None] + sums[0][:, : layers + 1 - own]
            np.minimum(here[:, own:], with_own, out=here[:, own:])
        sums.insert(0, here)
    return sums


def _chosen(nanoseconds: Reals, sums: Sequence[Reals], layers: int) -> Column:
    """The layers of every stage of the least sum, (C, S), as few as can be on the first, and so on."""
    left, rows = np.full(len(nanoseconds), layers), np.arange(len(nanoseconds))
    found = np.zeros(nanoseconds.shape[:2], np.int64)
    for stage in range(nanoseconds.shape[1]):
        ways = np.full((len(rows), nanoseconds.shape[2]), np.inf)
        for own in range(1, min(layers, ways.shape[1]) + 1):
            rest = sums[stage + 1][rows, np.maximum(0, left - own)]
            ways[:, own - 1] = np.where(left >= own, nanoseconds[:, stage, own - 1] + rest, np.inf)
        found[:, stage] = ways.argmin(axis=1) + 1
        left = left - found[:, stage]
    return found
