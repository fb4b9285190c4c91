"""Parts of machines whose nodes are joined link by link: groups behind the same switches, and single nodes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from strategist import Plan, recommend
from strategist.facts.hardware_file import cluster_from_document
from strategist.planner.idle import uses

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


@pytest.mark.parametrize(("nodes", "best"), [((2, 2), 2), ((3, 1), 3)])
def test_a_switch_that_slow_links_leave_alone_is_a_part(nodes: tuple[int, ...], best: int) -> None:
    """Two switches with a slow link between them may leave one idle: the plan is then, to the nanosecond, that of the nodes behind the
    other one described as machines of their own."""
    plan, alone = planned(leaves(*nodes), allow_idle=True), planned(leaves(best))
    assert plan.time.step_ns == alone.time.step_ns
    assert plan.idle == 8 * (sum(nodes) - best)
    assert {"W_IDLE", "W_IDLE_PARTS"} <= codes(plan)
    assert planned(leaves(*nodes)).time.step_ns > plan.time.step_ns


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


def test_what_is_not_looked_at_is_said_where_it_was_asked_for() -> None:
    """Devices of a node that are wired in pairs are used all or none, which --allow-idle says; where all parts are looked at, or nobody
    asks for parts, nothing is said."""
    small: dict[str, Any] = {"model": "llama-3.2-1b", "global_batch": 16}
    assert "W_IDLE_PARTS" in codes(planned("ws-8x-h100-nvl", allow_idle=True, **small))
    assert "W_IDLE_PARTS" not in codes(planned("ws-8x-h100-nvl", **small))
    assert "W_IDLE_PARTS" not in codes(planned("ws-4x-4090", allow_idle=True, **small))
