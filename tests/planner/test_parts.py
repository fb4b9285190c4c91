"""Parts of machines whose nodes are joined link by link: groups behind the same switches, and single nodes."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import strategist.planner.fewer as module
from strategist import Plan, recommend
from strategist.ask import Given, complete
from strategist.facts.clusters import load_cluster
from strategist.facts.groups import group_bandwidth
from strategist.facts.hardware_file import cluster_from_document
from strategist.facts.tiers import tiers
from strategist.planner.fewer import Part, halves, price, seconds_at_best, smaller_cluster_hint
from strategist.planner.idle import uses
from strategist.planner.predict import filled
from strategist.planner.search import Found
from strategist.planner.situation import one
from strategist.records import replace
from strategist.timing.estimate import model_FLOP
from strategist.timing.rates import matmul_rates

JOB: dict[str, Any] = {"model": "llama-2-13b", "seq_len": 4096, "global_batch": 192}


def leaves(*nodes: int, between: str = "2GB/s") -> dict[str, Any]:
    """DGX H100 nodes on one switch for each number, and a slow link from each switch to the next."""
    names = [f"n{number}" for number in range(len(nodes))]
    described = [
        {"name": name, "count": count, "gpu": "h100-sxm-80gb", "gpu_count": 8}
        for name, count in zip(names, nodes, strict=True)
    ]
    own = [{"a": name, "b": f"leaf-{name}", "kind": "infiniband", "bw": "400GB/s"} for name in names]
    up = [{"a": f"leaf-{a}", "b": f"leaf-{b}", "kind": "infiniband", "bw": between} for a, b in pairwise(names)]
    return {"nodes": described, "switches": [f"leaf-{name}" for name in names], "links": [*own, *up]}


def planned(machines: Any, **more: Any) -> Plan:
    """A plan of the small job."""
    return recommend(hardware=machines, **JOB | more)


def codes(plan: Plan) -> set[str]:
    """Codes of its hints."""
    return {hint.code for hint in plan.hints}


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "best"), [((2, 2), 2), ((3, 1), 3)])
def test_a_switch_that_slow_links_leave_alone_is_a_part(nodes: tuple[int, ...], best: int) -> None:
    """Two switches with a slow link between them may leave one idle: the plan is then, to the nanosecond, that of the nodes behind the
    other one described as machines of their own."""
    plan, alone = planned(leaves(*nodes), allow_idle=True), planned(leaves(best))
    assert plan.time.step_ns == alone.time.step_ns
    assert plan.idle == 8 * (sum(nodes) - best)
    assert {"W_IDLE", "W_IDLE_PARTS"} <= codes(plan)
    assert planned(leaves(*nodes)).time.step_ns > plan.time.step_ns


@pytest.mark.slow
def test_half_of_linked_machines_that_is_faster_is_hinted_at() -> None:
    """Without --allow-idle the hint names what the nodes behind one switch take, and how to ask for them; on a fast link nothing is."""
    (said,) = [hint.sentence for hint in planned(leaves(2, 2)).hints if hint.code == "W_FEWER_NODES"]
    assert "2 nodes are predicted" in said
    assert "--allow-idle" in said
    assert "W_FEWER_NODES" not in codes(planned(leaves(2, 2, between="400GB/s")))


def test_parts_of_linked_nodes_are_what_hangs_together() -> None:
    """Of three switches in a row, the slower link left out first: the two groups that the faster one joins, every group, a node of each, and
    parts of such a node; each part keeps its own links and switches and no others."""
    document = leaves(2, 1, 3)
    document["links"][-1]["bw"] = "1GB/s"
    cluster = cluster_from_document(document).cluster
    found = list(uses(cluster))
    assert {tuple((g.name, g.count) for g in part.groups) for part in found} == {
        (("n0", 2), ("n1", 1)), (("n0", 2),), (("n1", 1),), (("n2", 3),), (("n0", 1),), (("n2", 1),),
    }  # fmt: skip
    for part in found:
        assert set(part.links) <= set(cluster.links)
        ends = {end for link in part.links for end in (link.a, link.b)}
        assert set(part.switches) <= ends
        assert part.nodes == 1 or part.switches


BRIDGED: dict[str, Any] = {
    "gpu": "rtx-3090",
    "gpu_count": 4,
    "links": [
        *({"a": f"gpu{a}", "b": f"gpu{a + 1}", "kind": "nvlink", "bw": "56.25GB/s"} for a in (0, 2)),
        *({"a": f"gpu{i}", "b": "root0", "kind": "pcie-host", "bw": "25GB/s"} for i in range(4)),
    ],
}
"""A node of two bridged pairs on one root, link by link."""


def test_what_is_not_looked_at_is_said_where_it_was_asked_for() -> None:
    """Several devices of a node whose links are listed one by one are used all or none, which --allow-idle says; where all parts are looked at, or nobody
    asks for parts, nothing is said. One device alone is a part of every node."""
    small: dict[str, Any] = {"model": "llama-3.2-1b", "global_batch": 16}
    listed = {"format": "strategist-hardware/1", "nodes": [BRIDGED]}
    assert "W_IDLE_PARTS" in codes(planned(listed, allow_idle=True, **small))
    assert "W_IDLE_PARTS" not in codes(planned(listed, **small))
    assert "W_IDLE_PARTS" not in codes(planned("ws-4x-4090", allow_idle=True, **small))
    assert [part.world for part in uses(cluster_from_document(listed).cluster)] == [1]


@pytest.mark.parametrize(
    "name", ["ws-8x-h100-nvl", "mi300x-platform", "dgx-1-v100", "hgx-a100-4", "ws-4x-3090-nvlink-pairs"]
)
def test_the_first_devices_of_pairs_and_meshes_are_parts(name: str) -> None:
    """Every number of devices is a part; where so many tile the whole, they are joined as it joins each such group."""
    cluster = load_cluster(name)
    parts = {part.world: part for part in uses(cluster)}
    assert set(parts) == set(range(1, cluster.world))
    assert tiers(parts[1]) == ()
    for count in range(2, cluster.world):
        there, here = (group_bandwidth(tiers(each), count).Bps for each in (cluster, parts[count]))
        assert here == there if cluster.world % count == 0 else 0 < here < math.inf


def test_a_lone_device_trains_what_no_pair_can_share() -> None:
    """Seven sequences are no batch of two replicas; one of two bridged devices has the plan that it has alone, and says so."""
    job: dict[str, Any] = {"model": "gpt2", "seq_len": 1024, "global_batch": 7, "forbid": "tp,pp,cp"}
    plan = planned("ws-2x-3090-nvlink", allow_idle=True, **job)
    assert (plan.mesh.world, plan.idle) == (1, 1)
    assert "W_IDLE" in codes(plan)


def test_halves_are_powers_of_two_up_to_half() -> None:
    """Of every number of nodes or devices."""
    for count in range(1, 70):
        assert list(halves(count)) == [2**power for power in range(7) if 2 * 2**power <= count]


@pytest.mark.parametrize("hardware", ["dgx-h100:2", "ws-4x-4090", "cpu:4"])
def test_no_product_of_any_size_beats_the_best_rate(hardware: str) -> None:
    """The bound of a step that other machines are left out by: its useful FLOP at the rate of the largest products, on every device."""
    job = complete(Given(model="gpt2", hardware=hardware)).question.job
    rates = matmul_rates(job.cluster.slowest.gpu, job.workload.precision)
    sizes = 2.0 ** np.arange(3, 24)
    best = rates.at(sizes[:, None], sizes[None, :]).max()
    assert seconds_at_best(replace(job, factors=())) == pytest.approx(model_FLOP(job) / (best * job.cluster.world))


@pytest.mark.parametrize(
    ("hardware", "part", "percent"), [("dgx-h100", (1, 2), 50), ("dgx-h100:4", (2, 8), 0), ("dgx-h100:4", (1, 8), 50)]
)
def test_cheaper_is_less_of_devices_times_seconds(
    hardware: str, part: tuple[int, int], percent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a part takes twice as long as all of the machines: a quarter of their devices cost half as much, and half of them the same."""
    asked = replace(complete(Given(model="gpt2", hardware=hardware)).question, objective="cost")
    times = SimpleNamespace(step=np.array([10**9]))
    alone = {"candidates": one(**filled(asked.job, {})), "device_bytes": np.array([7])}
    found = cast(Found, SimpleNamespace(question=asked, times=times, step_seconds=lambda _row: 1.0, **alone))
    monkeypatch.setattr(module, "_best_part", lambda *_: Part(*part, 2.0, "zero=0", "H100"))
    (hint,) = smaller_cluster_hint(found, 0, complete(Given(model="gpt2", hardware=hardware)).request)
    assert hint.sentence.startswith(f"Fewer machines are {percent} % cheaper: ")
    assert price(found, 0) == (1e9 * asked.job.cluster.world,)
