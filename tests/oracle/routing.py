"""How many parts of its experts a token calls on: every choice that a router can make, one after the other."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import combinations
from math import prod

from strategist.facts.model import Moe


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


@cache
def expected(moe: Moe, parts: int) -> float:
    """The same for more experts than anybody can go through: a token's choices miss a part one after the other."""
    size = moe.experts // moe.groups
    part_of = [next(p for p in range(parts) if e < (p + 1) * moe.experts // parts) for e in range(moe.experts)]
    found = []
    for some in combinations(range(moe.groups), moe.top_groups):
        reach = [part_of[group * size + place] for group in some for place in range(size)]
        of_part = [reach.count(part) for part in set(reach)]
        missed = (prod((len(reach) - own - i) / (len(reach) - i) for i in range(moe.top_k)) for own in of_part)
        found.append(sum(1 - each for each in missed))
    return sum(found) / len(found)
