"""The same machines in other words get the same plan: what has no number may stand in any order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import pytest

from strategist import Plan, recommend

Machines = Mapping[str, Any]
FAST = {"name": "fast", "count": 2, "gpu": "h100-sxm-80gb", "gpu_count": 8, "inter_bw": "3200Gb/s"}
SLOW = {"name": "slow", "count": 2, "gpu": "a100-sxm-80gb", "gpu_count": 8, "inter_bw": "1600Gb/s"}
HALF = {"name": "half", "count": 1, "gpu": "h100-sxm-80gb", "gpu_count": 4, "inter_bw": "400Gb/s"}
BONDS = [("gpu0", "gpu1", "nvlink", "56.25GB/s"), ("gpu2", "gpu3", "nvlink", "56.25GB/s")]
LINKS = [
    *({"a": a, "b": b, "kind": kind, "bw": rate} for a, b, kind, rate in BONDS),
    *({"a": f"gpu{n}", "b": "root0", "kind": "pcie-host", "bw": "25GB/s"} for n in range(4)),
]
LEAVES = {
    "nodes": [{"name": name, "count": 2, "gpu": "h100-sxm-80gb", "gpu_count": 8} for name in ("a", "b")],
    "switches": ["leaf0", "leaf1"],
    "links": [
        {"a": "a", "b": "leaf0", "kind": "infiniband", "bw": "400GB/s"},
        {"a": "b", "b": "leaf1", "kind": "infiniband", "bw": "400GB/s"},
        {"a": "leaf0", "b": "leaf1", "kind": "infiniband", "bw": "200GB/s"},
    ],
}


def turned(links: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The links from their other ends."""
    return [{**link, "a": link["b"], "b": link["a"]} for link in links]


def shuffled(links: Sequence[Mapping[str, str]], seed: int) -> list[Mapping[str, str]]:
    """The links in another order."""
    return random.Random(seed).sample(links, len(links))


def of_pairs(links: Sequence[Mapping[str, str]]) -> Machines:
    """A node of four cards in two bonded pairs."""
    return {"nodes": [{"gpu": "rtx-3090", "gpu_count": 4, "links": list(links)}]}


SAME: Mapping[str, Sequence[Machines]] = {
    "kinds of nodes": [{"nodes": list(some)} for some in permutations((FAST, SLOW, HALF))],
    "a group or its nodes": [
        {"nodes": [FAST]},
        {"nodes": [{**FAST, "count": 1, "name": "x"}, {**FAST, "count": 1, "name": "y"}]},
        {"nodes": [{**FAST, "count": 1, "name": "y"}, {**FAST, "count": 1, "name": "x"}]},
    ],
    "links inside a node": [of_pairs(some) for some in (LINKS, turned(LINKS), *(shuffled(LINKS, n) for n in range(4)))],
    "links and switches between nodes": [
        LEAVES,
        {**LEAVES, "switches": LEAVES["switches"][::-1]},
        {**LEAVES, "nodes": LEAVES["nodes"][::-1]},
        {**LEAVES, "links": LEAVES["links"][::-1]},
        {**LEAVES, "links": turned(LEAVES["links"])},  # type: ignore[arg-type]
    ],
}


def chosen(plan: Plan) -> tuple[Any, ...]:
    """All that the planner decided, and what it expects of it."""
    return plan.mesh, plan.strategy, plan.time, plan.memory, plan.alternatives, plan.reasons, plan.decision


MANY = "kinds of nodes"
"""Six orders of a search over three kinds."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "sort", [pytest.param(sort, marks=pytest.mark.slow) if sort == MANY else sort for sort in SAME]
)
def test_order_makes_no_difference(sort: str) -> None:
    """Layout, bytes, seconds, alternatives and reasons are those of the first way to write the machines."""
    first, *others = [chosen(recommend("llama-3.2-1b", machines, seq_len=4096)) for machines in SAME[sort]]
    assert others.count(first) == len(others)


def test_flags_make_no_difference_by_their_order() -> None:
    """Pins, and what is left out, are sets."""
    one = recommend("llama-3.1-8b", "dgx-h100", pin="tp=2,micro_batch=1", forbid="pp,offload")
    other = recommend("llama-3.1-8b", "dgx-h100", pin="micro_batch=1,tp=2", forbid="offload,pp")
    assert chosen(one) == chosen(other)
