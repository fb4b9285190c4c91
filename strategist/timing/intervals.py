"""How far a measured step may lie from its prediction: the middle 80 % of published runs, by what the step is made of.

A part of the step (timing/calibrated.py) has bounds of its own: those that a step of nothing else would have. The logarithms of a step's bounds
are the mean of its parts', weighted by their seconds, times the distances of its device and its framework: how many times as far as most their
published runs lie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from strategist.catalog import rows
from strategist.facts.calibration import Part
from strategist.facts.hardware import Cluster
from strategist.facts.model import ModelShape
from strategist.records import dataclass

UNKNOWN = "default"
"""The row for devices and frameworks that no published run is of."""
Bounds = tuple[float, float]
"""ln of what a prediction is multiplied by, low and high."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An 80 % interval as factors on a value."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Distance:
    """How many times as far as most the runs of a device or a framework lie from their predictions, and how many of how many sources there are."""

    times: float
    runs: int
    sources: int


def mixed(bounds: Mapping[Part, Bounds], seconds: Mapping[Part, float], distance: float) -> Bounds:
    """The bounds of a step that takes so many seconds in each part."""
    scale = distance / sum(seconds.values())
    low, high = (scale * sum(bounds[part][side] * own for part, own in seconds.items()) for side in (0, 1))
    return low, high


class Names(NamedTuple):
    """What a step's runs are known by: the design of its devices, and its framework."""

    chip: str
    framework: str

    @property
    def distances(self) -> dict[str, Distance]:
        """How far the runs of either lie."""
        return {kind: distance_of(kind, name) for kind, name in self._asdict().items()}


def names_of(cluster: Cluster, model: ModelShape, framework: str) -> Names:
    """The names of a step; none is known of a network of convolutions, for no published run of one is among them."""
    return Names(UNKNOWN, UNKNOWN) if model.is_convolutional else Names(cluster.slowest.gpu.chip, framework)


def published_interval(names: Names, seconds: Mapping[Part, float]) -> Interval:
    """The interval of a step that takes so many seconds in each part, from published runs."""
    distance = math.prod(own.times for own in names.distances.values())
    low, high = mixed(bounds_of_parts(), seconds, distance)
    return Interval(math.exp(low), math.exp(high))


def widths(seconds: Mapping[Part, float]) -> dict[Part, float]:
    """The share of the interval's width, in logarithms, that is every part's."""
    own = {part: spent * (bounds_of_parts()[part][1] - bounds_of_parts()[part][0]) for part, spent in seconds.items()}
    whole = sum(own.values())
    return {part: width / whole for part, width in own.items()}


@cache
def bounds_of_parts() -> Mapping[Part, Bounds]:
    """The bounds of a step that is all of one part (catalogue: intervals)."""
    return {
        row["part"]: (math.log(row["low"]), math.log(row["high"])) for row in rows("intervals") if row["name"] == "time"
    }


def distance_of(kind: str, name: str) -> Distance:
    """How far the runs of a `chip` or a `framework` lie (catalogue: distances); those of one without runs as far as any may, which is farther than
    most do."""
    known = _distances()
    return known.get((kind, name), known[kind, UNKNOWN])


def is_known(kind: str, name: str) -> bool:
    """Whether runs of a device or a framework were held against predictions."""
    return (kind, name) in _distances()


@cache
def _distances() -> Mapping[tuple[str, str], Distance]:
    return {
        (row["kind"], row["name"]): Distance(row["times"], row["runs"], row["sources"]) for row in rows("distances")
    }
