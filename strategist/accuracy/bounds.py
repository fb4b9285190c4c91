"""How far runs lie from their predictions: the middle 80 % of the errors of runs that no factor was fitted to, by neighbourhood."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from strategist.facts.calibration import Near
from strategist.planner.write import ANYWHERE, Place
from strategist.timing.intervals import Bounds

NOISE = 0.03
"""ln of how far repeats of one run differ, which no bound is closer than: 2 to 5 % in the middle (benchmarks/truth/README.md)."""
OUTSIDE = 0.1
"""The share of runs that lies below an interval of 80 %, and above it."""
FARTHEST = 10.0
"""No interval of a calibration goes beyond so many times a prediction, as no factor does."""


class Error(NamedTuple):
    """A run's source, its neighbourhoods from the nearest on, and ln(measured / predicted)."""

    source: str
    places: tuple[Place, ...]
    value: float


def bounds(known: Iterable[Error], place: Place, sources: int, runs: int, *, of_few: bool = False) -> Bounds | None:
    """The middle 80 % of the errors in a neighbourhood, None with fewer `sources` or `runs` there. A source of n runs weighs sqrt(n):
    neither one big source nor the number of sources alone decides. The prediction itself lies inside, by NOISE at least. Where runs may be
    `of_few` the ranks are those under which one more run of their kind lies inside as often: 1 - 0.1 of n + 1 places instead of n
    (Lei et al. 2018, Distribution-free predictive inference for regression, JASA 113, section 2.2)."""
    own = [error for error in known if place == ANYWHERE or place in error.places]
    sizes = Counter(error.source for error in own)
    if len(sizes) < sources or len(own) < runs:
        return None
    edge = max(0.0, OUTSIDE - (1.0 - OUTSIDE) / len(own)) if of_few else OUTSIDE
    ordered = sorted((error.value, sizes[error.source] ** -0.5) for error in own)
    weights = np.cumsum([weight for _, weight in ordered])
    low, high = np.interp((edge, 1.0 - edge), weights / weights[-1], [value for value, _ in ordered])
    return min(-NOISE, float(low)), max(NOISE, float(high))


def near_runs(known: Sequence[Error], sources: int, runs: int) -> Iterator[Near]:
    """The interval of a step, as factors, in every neighbourhood of somebody's own runs that has enough of them."""
    for place in sorted({place for error in known for place in error.places}):
        own = bounds(known, place, sources, runs, of_few=True)
        if own is not None:
            number = sum(place in error.places for error in known)
            low, high = (round(min(max(1 / FARTHEST, math.exp(side)), FARTHEST), 3) for side in own)
            yield Near(**place._asdict(), low=low, high=high, runs=number)
