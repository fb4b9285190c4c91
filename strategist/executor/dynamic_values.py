"""The values that a byte stands for under dynamic quantisation (Dettmers et al. 2022, arXiv 2110.02861, section 2.2)."""

from __future__ import annotations

from functools import cache

DECADES = 7
"""Powers of ten that the table reaches down: one per bit that says how small a number is."""


@cache
def dynamic_table(*, signed: bool) -> tuple[float, ...]:
    """The 256 values of dynamic quantisation in ascending order, in [-1, 1] or, unsigned, in [0, 1].

    Each power of ten has twice as many evenly spaced values as the one below it; zero and one are there themselves
    (section 2.2 of the paper).
    """
    values = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        middles = [(0.1 + 0.9 * (place + 0.5) / count) * 10.0 ** (decade + 1 - DECADES) for place in range(count)]
        values += [*middles, *(-value for value in middles)] if signed else middles
    return tuple(sorted(values))
