"""GPUs wired to each other without a switch: what a group inside such a node gets, by its narrowest cut.

Definition (the graph of facts/topology.py uses the same words): a ring crosses every division of its members at least
once, so its rate is at most the smallest sum of links between two parts of the members. Links of other groups are not
borrowed, since all groups of an axis talk at the same time. Members that no mesh link joins meet over the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from strategist.facts.hardware import Link

Rates = dict[tuple[int, int], float]
"""Bytes per second between two devices, lower index first."""


def full_mesh(gpus: int, pair_Bps: float) -> Rates:
    """Every pair joined at the same rate."""
    return {(a, b): pair_Bps for b in range(gpus) for a in range(b)}


def rates_of(links: Sequence[Link]) -> Rates:
    """The rates of links between ids such as gpu0 and gpu5."""
    rates: Rates = {}
    for link in links:
        a, b = sorted((int(link.a.removeprefix("gpu")), int(link.b.removeprefix("gpu"))))
        rates[a, b] = rates.get((a, b), 0.0) + link.Bps
    return rates


def is_mesh(links: Sequence[Link]) -> bool:
    """True when every link joins two GPUs directly."""
    return bool(links) and all(end.startswith("gpu") for link in links for end in (link.a, link.b))


def layouts(gpus: int) -> Iterator[tuple[int, int]]:
    """Every (members, stride) with which a group can lie inside `gpus` devices."""
    return ((m, s) for m in range(2, gpus + 1) for s in range(1, (gpus - 1) // (m - 1) + 1))


def placements(gpus: int, members: int, stride: int) -> Iterator[tuple[int, ...]]:
    """The groups that may lie in the domain: the aligned ones where they tile it, else every start that fits."""
    block = members * stride
    starts: Iterator[int] | range
    if gpus % block == 0:
        starts = (first + j for first in range(0, gpus, block) for j in range(stride))
    else:
        starts = range(gpus - (members - 1) * stride)
    return (tuple(range(start, start + block, stride)) for start in starts)


def worst_group(rates: Rates, gpus: int, members: int, stride: int, host_Bps: float) -> tuple[float, bool]:
    """The rate of the worst placed group, and whether the host path is what limits it."""
    return min(group_rate(rates, group, host_Bps) for group in placements(gpus, members, stride))


def group_rate(rates: Rates, group: Sequence[int], host_Bps: float) -> tuple[float, bool]:
    """The rate of one group: the narrowest cut inside its islands and, between them, the host links of an island."""
    parts = islands(rates, group)
    inside = min((narrowest_cut(rates, part) for part in parts if len(part) > 1), default=float("inf"))
    outside = min(map(len, parts)) * host_Bps if len(parts) > 1 else float("inf")
    return min(inside, outside), outside < inside


def islands(rates: Rates, group: Sequence[int]) -> list[list[int]]:
    """The members of `group`, split where no link of the mesh joins them."""
    left, found = list(group), []
    while left:
        island, front = [], [left.pop(0)]
        while front:
            island.append(front.pop())
            near = [x for x in left if rates.get((min(x, island[-1]), max(x, island[-1])), 0.0) > 0.0]
            left = [x for x in left if x not in near]
            front += near
        found.append(sorted(island))
    return found


def narrowest_cut(rates: Rates, group: Sequence[int]) -> float:
    """The smallest total rate between two parts of a connected group (Stoer and Wagner 1997, Journal of the ACM 44)."""
    weight = {a: {b: rates.get((min(a, b), max(a, b)), 0.0) for b in group if b != a} for a in group}
    best = float("inf")
    while len(weight) > 1:
        last, before, cut = _most_tightly_last(weight)
        best = min(best, cut)
        _merge(weight, before, last)
    return best


def _most_tightly_last(weight: dict[int, dict[int, float]]) -> tuple[int, int, float]:
    """One phase: add the most tightly joined device until all are in; the last one's links are a cut."""
    order = [next(iter(weight))]
    tightness = dict(weight[order[0]])
    cut = 0.0
    while tightness:
        chosen = max(tightness, key=lambda device: tightness[device])
        cut = tightness.pop(chosen)
        order.append(chosen)
        for other in tightness:
            tightness[other] += weight[chosen][other]
    before, last = list(pairwise(order))[-1]
    return last, before, cut


def _merge(weight: dict[int, dict[int, float]], into: int, gone: int) -> None:
    for other, rate in weight.pop(gone).items():
        del weight[other][gone]
        if other != into:
            weight[into][other] += rate
            weight[other][into] += rate
