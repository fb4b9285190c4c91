"""On how many parts of its experts a token calls, when all experts are called as often.

A dispatcher that sends a copy of a token to every node once (catalogue: dispatchers) sends as many copies as parts are called on. Routers that
choose groups of experts first call on fewer parts: experts of one group lie together (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.3
"device-limited routing"; arXiv 2412.19437, section 2.1.2 "node-limited routing"). Balanced experts and groups are chosen like cards from a
pack, so what is expected is a ratio of numbers of choices.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from math import comb

import numpy as np

from strategist.columns import Column, Reals
from strategist.facts.model_parts import Moe


@cache
def called(moe: Moe, parts: int) -> float:
    """How many of so many equal parts of the experts, in order, a token is expected to call on."""
    borders = [part * moe.experts // parts for part in range(parts + 1)]
    alike = Counter(_pieces(moe, first, last) for first, last in pairwise(borders))
    return sum(number * (1.0 - _passed_over(moe, pieces)) for pieces, number in alike.items())


def called_on(moe: Moe, parts: Column) -> Reals:
    """The same of a column of numbers of parts."""
    known, at = np.unique(parts, return_inverse=True)
    found: Reals = np.array([called(moe, int(number)) for number in known])[at]
    return found


def copies_for_nodes(moe: Moe, ranks: Column, nodes: Column) -> Reals:
    """Copies of a token that go to nodes where `ranks` share the experts and are on `nodes`, columns: one to each that it calls on. Where several
    nodes cut the same experts, one to each of these."""
    return called_on(moe, np.minimum(ranks, nodes)) * np.maximum(1.0, nodes / ranks)


def _pieces(moe: Moe, first: int, last: int) -> tuple[int, ...]:
    """How many experts each group has among those from `first` to before `last`; groups that have none are left out."""
    size = moe.experts // moe.groups
    overlaps = (min(last, start + size) - max(first, start) for start in range(0, moe.experts, size))
    return tuple(overlap for overlap in overlaps if overlap > 0)


def _passed_over(moe: Moe, pieces: tuple[int, ...]) -> float:
    """The probability that none of a token's experts is among pieces of some groups: over all choices of groups, that of choosing from
    theirs without these."""
    ways = Counter({(0, 0): 1})  # (groups chosen, experts of theirs that must not be) in so many choices
    for piece in pieces:
        for (groups, left_out), number in list(ways.items()):
            ways[groups + 1, left_out + piece] += number
    others, reach = moe.groups - len(pieces), moe.top_groups * (moe.experts // moe.groups)
    missed = sum(
        number * comb(others, moe.top_groups - groups) * comb(reach - left_out, moe.top_k)
        for (groups, left_out), number in ways.items()
        if groups <= moe.top_groups
    )
    return missed / (comb(moe.groups, moe.top_groups) * comb(reach, moe.top_k))
