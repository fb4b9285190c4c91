"""Factors on parts of the time model: what measured runs ask for beyond the formulas, and those that ship."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Literal

from strategist.catalog import rows
from strategist.records import dataclass

Part = Literal["matmul", "attention", "memory", "host", "network", "overlap"]
"""Parts of a step that one factor moves: efficiency of products, of attention, of memory-bound work, of launches, of links; and the share of
compute that collectives may run behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """What the seconds of a part, or the share that `overlap` is, are multiplied by, on a device of the catalogue (`gpu`) or under a profile (`framework`);
    the empty one means any. Factors that apply to a job multiply."""

    part: Part
    value: float
    gpu: str = ""
    framework: str = ""

    def applies(self, gpu: str, framework: str) -> bool:
        """Whether it moves the times of a device and a framework."""
        return self.gpu in ("", gpu) and self.framework in ("", framework)


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """The middle 80 % of measured over predicted steps of somebody's own runs, each under factors that its group had no part in: on
    devices of one design (`chip`), under a profile (`framework`) and for models of a class of widths (`width`); the empty one means any."""

    chip: str
    framework: str = ""
    width: str = ""
    low: float
    high: float
    runs: int


@cache
def shipped_factors() -> tuple[Factor, ...]:
    """Those that published runs ask for (catalogue: calibration)."""
    return tuple(
        Factor(part=row["part"], value=row["value"], gpu=row["gpu"], framework=row["framework"])
        for row in rows("calibration")
    )


def on_parts(factors: Iterable[Factor], gpu: str, framework: str) -> dict[Part, float]:
    """What every part that is moved on a device and under a framework is multiplied by."""
    found: dict[Part, float] = {}
    for factor in factors:
        if factor.applies(gpu, framework):
            found[factor.part] = found.get(factor.part, 1.0) * factor.value
    return found
