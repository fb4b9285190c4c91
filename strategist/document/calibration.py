"""A Calibration: factors on terms of the step, fitted to measured runs, and how well they hold on runs left out."""

from __future__ import annotations

from typing import Literal

from strategist.records import dataclass

CALIBRATION_FORMAT = "strategist-calibration/1"
Share = Literal["matmul", "attention", "memory", "host", "network"]
"""Parts of a step that one factor moves: efficiency of products, of attention, of memory-bound work, of launches, of links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """What the seconds of a part are multiplied by, on a device of the catalogue (`gpu`) or under a profile (`framework`);
    the empty one means any. Factors that apply to a job multiply."""

    part: Share
    value: float
    gpu: str = ""
    framework: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Errors of step times before and after, each group of runs judged by factors fitted without it: the median factor
    exp(median |ln(predicted / measured)|) averaged over groups, and the share of runs within a quarter."""

    before: float
    after: float
    before_within_25: float
    after_within_25: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors, the number of runs and groups they rest on, and what they are worth on groups that were left out."""

    format: Literal["strategist-calibration/1"] = "strategist-calibration/1"
    made_by: str
    runs: int
    groups: int
    grouped_by: str
    factors: tuple[Factor, ...]
    held_out: Held


def factors_for(calibration: Calibration, gpu: str, framework: str) -> tuple[tuple[str, float], ...]:
    """(part, factor) of every part that a calibration moves for a device and a framework."""
    found: dict[str, float] = {}
    for factor in calibration.factors:
        if factor.gpu in ("", gpu) and factor.framework in ("", framework):
            found[factor.part] = found.get(factor.part, 1.0) * factor.value
    return tuple(sorted(found.items()))
