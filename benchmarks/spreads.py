"""How far steps lie from their predictions, by what they are made of: what the catalogue's intervals of a step are fitted with.

ln(measured / predicted) of a run is taken to be drawn from Student's t with TAILS degrees of freedom, as far apart as

    exp(c + f) x sum over parts of the step of a x share

with an a for each part, a c for the device's design and an f for the framework. ln a lie around one number of their own with PARTS_VARY, c and f
around 0 with NAMES_VARY: of a framework with a run or two little is known, and it stays near all others. What is most likely then is found by
L-BFGS (scipy.optimize.minimize). The ends are the middle 80 % of errors over that distance, so they lean to the side to which errors do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from strategist.accuracy.bounds import OUTSIDE
from strategist.columns import Column, Reals
from strategist.facts.calibration import Part
from strategist.timing.calibrated import PARTS as SECONDS_OF
from strategist.timing.intervals import Bounds, Distance, mixed

PARTS: tuple[Part, ...] = tuple(part for part, terms in SECONDS_OF.items() if terms)
KINDS = ("chip", "framework")
TAILS = 4.0
"""Degrees of freedom: errors have tails, and a run that waited for something else must not decide."""
PARTS_VARY, NAMES_VARY = 0.6, 0.3
"""How far the logarithms of the parts' spreads, and those of devices and frameworks, are expected to lie apart: what makes the published runs likeliest
(Laplace's approximation; parts of 0.3, 0.6, 1 and 1.5, frameworks of 0.15, 0.3, 0.45 and 0.6). docs/decisions/0210 has what others do to sources left out."""
ALIKE = 0.2
"""How alike the errors of one source are, as the correlation of two of them (0.17 of the published runs, one-way analysis of variance with every source
counting the same): n runs of a source tell as much as n / (1 + (n - 1) x ALIKE) of as many sources, never more than five."""
SCORED_AT = 2.0 * OUTSIDE
"""The share of runs that an interval leaves out."""


class Timed(NamedTuple):
    """A run's source, its device's design, its framework, the seconds of its step by part, and ln(measured / predicted)."""

    source: str
    chip: str
    framework: str
    seconds: Mapping[Part, float]
    value: float

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """What has a distance of its own."""
        return tuple(zip(KINDS, (self.chip, self.framework), strict=True))


@dataclass(frozen=True)
class Spreads:
    """The bounds of a step that is all of one part, and how many times as far the runs of a device or a framework lie; `unknown` those of one that
    no run is of."""

    parts: Mapping[Part, Bounds]
    distances: Mapping[tuple[str, str], Distance]
    unknown: float

    def bounds(self, run: Timed) -> Bounds:
        """The interval of a run."""
        times = math.prod(self.distances[name].times if name in self.distances else self.unknown for name in run.names)
        return mixed(self.parts, run.seconds, times)


def weights(runs: Sequence[Timed]) -> Reals:
    """What every run counts."""
    sizes = Counter(run.source for run in runs)
    return np.array([1.0 / (1.0 + (sizes[run.source] - 1) * ALIKE) for run in runs])


def spreads_of(runs: Sequence[Timed]) -> Spreads:
    """What some runs say. Raises ValueError where the fit finds no end."""
    names = sorted({name for run in runs for name in run.names})
    shares, has, values, counts = _shares(runs), _has(runs, names), np.array([run.value for run in runs]), weights(runs)
    found = minimize(_unlikely(shares, has, values, counts), _start(len(names)), jac=True, method="L-BFGS-B", options={"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-8})  # fmt: skip
    if np.abs(found.jac).max() > LEVEL:
        raise ValueError(f"the spreads of {len(runs)} runs were not found: {found.message}")
    own, names_are = np.exp(found.x[0] + found.x[1 : 1 + len(PARTS)]), found.x[1 + len(PARTS) :]
    ends = _middle(values / (shares @ own * np.exp(has @ names_are)), counts)
    # How far a name's spread may be from what was found: what is not known of it spreads its runs further (the mean of exp(2 x) is exp(2 var) wider).
    uncertain = 1.0 / (NAMES_VARY**-2 + counts @ has * 2.0 * TAILS / (TAILS + 3.0))
    number, sources = has.sum(axis=0).astype(int).tolist(), [len({run.source for run in runs if name in run.names}) for name in names]  # fmt: skip
    return Spreads(
        {part: (ends[0] * spread, ends[1] * spread) for part, spread in zip(PARTS, own.tolist(), strict=True)},
        {name: Distance(*one) for name, *one in zip(names, np.exp(names_are + uncertain).tolist(), number, sources, strict=True)},
        math.exp(NAMES_VARY**2),
    )  # fmt: skip


def _shares(runs: Sequence[Timed]) -> Reals:
    seconds = np.array([[run.seconds[part] for part in PARTS] for run in runs])
    shares: Reals = seconds / seconds.sum(axis=1, keepdims=True)
    return shares


def _has(runs: Sequence[Timed], names: Sequence[tuple[str, str]]) -> Reals:
    """1 where a run has a name, (R, N)."""
    return np.array([[float(name in run.names) for name in names] for run in runs])


def _start(names: int) -> Reals:
    start = np.zeros(1 + len(PARTS) + names)
    start[0] = math.log(NEAR)
    return start


NEAR, LEVEL = 0.1, 1e-3
"""Where the search for the spread of parts begins, and the slope from which on it has not ended."""


def _unlikely(shares: Reals, has: Reals, values: Reals, counts: Reals) -> Callable[[Reals], tuple[float, Reals]]:
    """-ln of how likely the errors are, and its slopes, by: ln of the parts' common spread, what each part's and each name's differs by."""
    parts, names = shares.shape[1], has.shape[1]
    tight = np.concatenate([[0.0], np.full(parts, PARTS_VARY**-2), np.full(names, NAMES_VARY**-2)])

    def unlikely(x: Reals) -> tuple[float, Reals]:
        by_part = shares * np.exp(x[0] + x[1 : 1 + parts])
        spread = by_part.sum(axis=1) * np.exp(has @ x[1 + parts :])
        far = (values / spread) ** 2 / TAILS
        cost = counts @ (np.log(spread) + (TAILS + 1.0) / 2.0 * np.log1p(far)) + (tight * x * x).sum() / 2.0
        slope = counts * (1.0 - (TAILS + 1.0) * far / (1.0 + far))
        grows = np.column_stack([np.ones(len(values)), by_part / by_part.sum(axis=1, keepdims=True), has])
        return float(cost), slope @ grows + tight * x

    return unlikely


def _middle(values: Reals, counts: Reals) -> Bounds:
    """The middle 80 % of some values."""
    order: Column = np.argsort(values, kind="stable")
    below = np.cumsum(counts[order])
    low, high = np.interp((OUTSIDE, 1.0 - OUTSIDE), below / below[-1], values[order])
    return float(low), float(high)


def score(value: float, bounds: Bounds) -> float:
    """The interval score: the width, and what lies outside of it 2 / SCORED_AT times over; the less the better, and least on average for the
    true quantiles (Gneiting and Raftery 2007, Strictly proper scoring rules, JASA 102, section 6.2)."""
    low, high = bounds
    return high - low + 2.0 / SCORED_AT * (max(0.0, low - value) + max(0.0, value - high))


def over_sources(runs: Iterable[Timed], found: Iterable[float]) -> float:
    """The mean of some figures of runs, every source counting the same."""
    by_source: dict[str, list[float]] = {}
    for run, figure in zip(runs, found, strict=True):
        by_source.setdefault(run.source, []).append(figure)
    return float(np.mean([np.mean(own) for own in by_source.values()]))
