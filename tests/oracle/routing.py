"""How many parts of its experts a token calls on: every choice that a router can make, one after the other."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations


def called(experts: int, top_k: int, groups: int, top_groups: int, parts: int) -> Fraction:
    """The mean over all choices of groups, and of experts in them, of the parts that have a chosen one."""
    of_group = [expert * groups // experts for expert in range(experts)]
    of_part = [next(p for p in range(parts) if expert < (p + 1) * experts // parts) for expert in range(experts)]
    counts = [
        len({of_part[expert] for expert in chosen})
        for some in combinations(range(groups), top_groups)
        for chosen in combinations([expert for expert in range(experts) if of_group[expert] in some], top_k)
    ]
    return Fraction(sum(counts), len(counts))
