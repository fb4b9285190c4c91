"""Seconds under a calibration: parts of a step are multiplied by factors that measured runs asked for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from strategist.space.candidates import Column, Reals, total_of

PARTS: Mapping[str, tuple[str, ...]] = {
    "matmul": ("matmul",),
    "attention": ("attention",),
    "memory": ("elementwise", "loss", "moe_dispatch", "optimizer", "offload"),
    "host": ("host",),
    "network": ("tp", "cp", "ep", "pp", "dp"),
}
"""Terms that one factor moves; the bubble follows all of them."""


def part_seconds(exposed: Mapping[str, Column]) -> dict[str, Reals]:
    """Seconds of every part, (C,) each: its exposed terms, and its share of the bubble."""
    sums = {part: total_of(exposed[term] for term in terms) / 1e9 for part, terms in PARTS.items()}
    busy = total_of(sums.values())
    idle = 1.0 + np.divide(exposed["bubble"] / 1e9, busy, out=np.zeros_like(busy), where=busy > 0)
    return {part: seconds * idle for part, seconds in sums.items()}


def scaled(terms: Mapping[str, Column], factors: tuple[tuple[str, float], ...]) -> dict[str, Column]:
    """Nanoseconds of every term under some factors, whole again, (C,) each."""
    by_part = dict(factors)
    by_term = {term: by_part.get(part, 1.0) for part, members in PARTS.items() for term in members}
    moved = {term: np.round(terms[term] * factor).astype(np.int64) for term, factor in by_term.items()}
    before = total_of(terms[term] for term in by_term).astype(np.float64)
    after = total_of(moved.values())
    ratio = np.divide(after, before, out=np.ones_like(before), where=before > 0)
    return moved | {"bubble": np.round(terms["bubble"] * ratio).astype(np.int64)}
