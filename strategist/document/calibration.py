"""A Calibration: factors on parts of the step, fitted to measured runs, and how well they hold on runs left out."""

from __future__ import annotations

from typing import Literal

from strategist.facts.calibration import Factor, Near
from strategist.records import dataclass

CALIBRATION_FORMAT = "strategist-calibration/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Errors of step times before and after, each group of runs judged by factors fitted without it: the median factor
    exp(median |ln(predicted / measured)|) averaged over groups, and the share of runs within a quarter."""

    before: float
    after: float
    before_within_25: float
    after_within_25: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """A run that the factors do not explain, and its measured step over what is predicted under them."""

    id: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors, the number of runs and groups they rest on, what they are worth on groups that were left out, how far they could stray
    (the spread of their logarithms; none in files of before it was chosen), and the runs that they do not explain, farthest first.
    `near` is how far runs left out lie from what is predicted, where there are enough of them: the intervals of steps predicted under the factors."""

    format: Literal["strategist-calibration/1"] = "strategist-calibration/1"
    made_by: str
    runs: int
    groups: int
    grouped_by: str
    factors: tuple[Factor, ...]
    held_out: Held
    spread: float | None = None
    apart: tuple[Apart, ...] = ()
    near: tuple[Near, ...] = ()
