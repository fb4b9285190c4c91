"""Seconds under a calibration: parts of a step are multiplied by factors that measured runs asked for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from strategist.facts.calibration import Part
from strategist.space.candidates import Column, Reals, total_of

PARTS: Mapping[Part, tuple[str, ...]] = {
    "matmul": ("matmul",),
    "attention": ("attention",),
    "memory": ("elementwise", "loss", "moe_dispatch", "optimizer", "offload"),
    "host": ("host",),
    "network": ("tp", "cp", "ep", "pp", "dp", "straggler"),
    "overlap": (),
}
"""Terms whose seconds one factor multiplies; the bubble follows all of them. Overlap multiplies none: it moves what is exposed (Job.overlaps)."""


LONGEST_NS = 2.0**58
"""Nine years: terms of a step are counted up to it, so that all of them together are a number of 64 bits."""
TOO_LONG_NS = LONGEST_NS / 4
"""Steps from here on are not told of: some term may have ended at the longest, and a factor may have made it less."""


def counted(nanoseconds: Reals) -> Column:
    """Whole nanoseconds, no more than the longest that are counted."""
    rounded: Column = np.round(np.minimum(nanoseconds, LONGEST_NS)).astype(np.int64)
    return rounded


def part_seconds(exposed: Mapping[str, Column]) -> dict[Part, Reals]:
    """Seconds of every part that has some, (C,) each: its exposed terms, and its share of the bubble."""
    sums = {part: total_of(exposed[term] for term in terms) / 1e9 for part, terms in PARTS.items() if terms}
    busy = total_of(sums.values())
    idle = 1.0 + np.divide(exposed["bubble"] / 1e9, busy, out=np.zeros_like(busy), where=busy > 0)
    return {part: seconds * idle for part, seconds in sums.items()}


def parts_of_one(exposed: Mapping[str, Column]) -> dict[Part, float]:
    """The same of one candidate."""
    return {part: float(spent[0]) for part, spent in part_seconds(exposed).items()}


def scaled(terms: Mapping[str, Column], factors: Mapping[Part, float]) -> dict[str, Column]:
    """Nanoseconds of every term under some factors, whole again, (C,) each. Terms that nothing moves stay the columns that they were."""
    moved = {
        term: counted(terms[term] * factor)
        for part, factor in factors.items()
        for term in PARTS[part]
        if terms[term].any()
    }
    if not terms["bubble"].any():
        return {**terms, **moved}
    before = total_of(terms.values()) - terms["bubble"]
    more = total_of(column - terms[term] for term, column in moved.items()) if moved else np.zeros_like(before)
    ratio = 1.0 + np.divide(more, before, out=np.zeros(before.shape), where=before > 0)
    return {**terms, **moved, "bubble": counted(terms["bubble"] * ratio)}


def least_factor(factors: Mapping[Part, float]) -> float:
    """What no step falls below under some factors, as a share of what it takes with the same overlap and without them: every term is one
    part's, and the bubble follows them all."""
    return min((1.0, *(factor for part, factor in factors.items() if PARTS[part])))
