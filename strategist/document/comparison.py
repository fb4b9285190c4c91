"""A Comparison: several layouts side by side, every term of their memory and of their time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from strategist import __version__
from strategist.document.estimate import MEMORY_TERMS, TIME_TERMS, Estimate
from strategist.document.plan import Costed
from strategist.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One layout that is compared: the word that named it, what it trains on which machines, whether a rule forbids it,
    whether it fits, and its totals. `unit` is what a token is: to convolutions an image."""

    name: str
    layout: str
    model: str
    hardware: str
    seq_len: int
    global_batch: int
    legal: bool
    fits: bool
    memory: Estimate
    usable_bytes: int
    time: Estimate
    tokens_per_second: float
    unit: Literal["tokens", "images"]
    mfu: float
    target_len: int | None = None


@dataclass(frozen=True, slots=True)
class ComparedTerm:
    """One term, one value per side: bytes of the fullest stage or exposed nanoseconds; 0 where a side has none."""

    name: str
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Sides in the order in which they were named. `memory` adds up to each side's peak in bytes, `time` to its step in
    nanoseconds."""

    format: Literal["strategist-comparison/1"] = "strategist-comparison/1"
    made_by: str
    sides: tuple[Side, ...]
    memory: tuple[ComparedTerm, ...]
    time: tuple[ComparedTerm, ...]


def comparison(sides: Sequence[Side], costed: Sequence[Costed]) -> Comparison:
    """The terms of some layouts beside each other; terms that none of them has are left out."""
    worst = [one.memory.worst for one in costed]
    seconds = [{term.name: term.exposed_ns for term in one.time.terms} for one in costed]
    return Comparison(
        made_by=f"strategist {__version__}",
        sides=tuple(sides),
        memory=_rows(MEMORY_TERMS, lambda name: tuple(stage.term(name) for stage in worst)),
        time=_rows(TIME_TERMS, lambda name: tuple(terms.get(name, 0) for terms in seconds)),
    )


def _rows(names: Sequence[str], values: Callable[[str], tuple[int, ...]]) -> tuple[ComparedTerm, ...]:
    rows = (ComparedTerm(name, values(name)) for name in names)
    return tuple(row for row in rows if any(row.values))
