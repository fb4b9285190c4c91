"""Machines that may stay idle: the plan is then that of the part on which it is best."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist import Plan, recommend
from strategist.errors import ImpossibleError
from strategist.facts.clusters import cluster_from_flags
from strategist.facts.hardware import Cluster
from strategist.planner.check import faults
from strategist.planner.idle import uses
from strategist.units import format_seconds, parse_rate
from tests.cli.harness import call
from tests.examples import examples

JOB: dict[str, Any] = {"model": "gpt2", "seq_len": 1024, "forbid": "cp,offload,recompute"}


def cluster(gpus: int, nodes: int = 1, link: str = "8GB/s") -> Cluster:
    """Cards on slow links."""
    rate = parse_rate(link, "--intra-bw")
    return cluster_from_flags("rtx-4090", gpus, nodes, intra_Bps=rate, inter_Bps=rate / 4).cluster


def planned(hardware: Any, batch: int, **more: Any) -> Plan | None:
    """The plan that may leave devices idle; None where nothing fits."""
    try:
        return recommend(hardware=hardware, **(JOB | {"global_batch": batch, "allow_idle": True} | more))
    except ImpossibleError:
        return None


@pytest.mark.parametrize(
    ("batch", "policy"),
    [
        (1, "hf"),
        *(pytest.param(batch, policy, marks=pytest.mark.slow) for batch, policy in ((6, "fastest"), (8, "hf"))),
    ],
)
def test_the_plan_is_the_best_of_all_parts(batch: int, policy: str) -> None:
    """Planning each number of devices alone finds nothing sooner, the plan is one of them, and it says how many are idle."""
    hardware = cluster(4, link="1GB/s")
    plan = planned(hardware, batch, policy=policy)
    assert plan is not None
    alone = [planned(cluster(count, link="1GB/s"), batch, policy=policy, allow_idle=False) for count in (1, 2, 3, 4)]
    steps = {made.mesh.world: made.time.step_ns for made in alone if made is not None}
    assert plan.time.step_ns == min(steps.values()) == steps[plan.mesh.world]
    assert plan.mesh.world + plan.idle == hardware.world
    assert faults(plan) == ()
    assert ("W_IDLE" in {hint.code for hint in plan.hints}) == bool(plan.idle)


@pytest.mark.slow
@examples(8)
@given(st.integers(1, 5), st.integers(1, 3), st.sampled_from((1, 3, 4, 8, 30)), st.sampled_from(("1GB/s", "20GB/s")))
def test_more_machines_never_make_it_later(gpus: int, nodes: int, batch: int, link: str) -> None:
    """P37: where devices may stay idle a node more, or a device more in the only node, does not make the step longer."""
    fewer = planned(cluster(gpus, nodes, link), batch)
    more = planned(cluster(gpus, nodes + 1, link), batch)
    assert more is not None
    assert fewer is not None
    assert more.time.step_ns <= fewer.time.step_ns
    wider = planned(cluster(gpus + 1, 1, link), batch)
    narrow = planned(cluster(gpus, 1, link), batch)
    assert wider is not None
    assert narrow is not None
    assert wider.time.step_ns <= narrow.time.step_ns


@pytest.mark.slow
def test_cost_counts_devices() -> None:
    """With objective cost no part takes fewer device-seconds per step than the plan."""
    plan = planned(cluster(4), 8, objective="cost")
    assert plan is not None
    alone = [planned(cluster(count), 8, objective="cost", allow_idle=False) for count in (1, 2, 3, 4)]
    least = min(made.time.step_ns * made.mesh.world for made in alone if made is not None)
    assert plan.time.step_ns * plan.mesh.world == least


def test_every_size_is_looked_at() -> None:
    """Of up to 64 nodes every number of nodes is a part, and every number of devices of one; of more, 63 numbers of them."""
    sizes = [(part.nodes, part.groups[0].node.gpus) for part in uses(cluster(4, 5))]
    assert sizes == [(1, 4), (2, 4), (3, 4), (4, 4), (1, 1), (1, 2), (1, 3)]
    many = [part.nodes for part in uses(cluster(1, 1000))]
    assert len(many) == 63
    assert many == sorted(set(many))


def mixed(*kinds: tuple[str, int]) -> Cluster:
    """Nodes of eight devices, so many of each kind, on one fabric."""
    groups = tuple(cluster_from_flags(name, 8, count).cluster.groups[0] for name, count in kinds)
    return replace(cluster_from_flags(kinds[0][0], 8, 1).cluster, groups=groups)


def test_every_kind_and_every_mixture_is_looked_at() -> None:
    """Of few nodes each kind alone, in every number, and every mixture that leaves some out, once; of many some."""
    hardware = mixed(("h100-sxm-80gb", 2), ("a100-sxm-80gb", 3))
    said = [tuple((g.node.gpu.name, g.count, g.node.gpus) for g in part.groups) for part in uses(hardware)]
    assert len(said) == len(set(said))
    counts = {tuple(count for _, count, _ in part) for part in said if len(part) == 2}
    assert counts == {(a, b) for a in (1, 2) for b in (1, 2, 3)} - {(2, 3)}
    alone = {part[0] for part in said if len(part) == 1}
    names = (("h100-sxm-80gb", 2), ("a100-sxm-80gb", 3))
    assert {(n, c, 8) for n, most in names for c in range(1, most + 1)} <= alone
    assert {(n, 1, g) for n, _ in names for g in range(1, 8)} <= alone
    assert hardware.groups not in [part.groups for part in uses(hardware)]
    many = [part for part in uses(mixed(("h100-sxm-80gb", 512), ("a100-sxm-80gb", 512))) if len(part.groups) == 2]
    assert 0 < len(many) < 200


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["time", "cost"])
@pytest.mark.parametrize("fast", [1, 2])
def test_one_kind_alone_stands_beside_all(fast: int, objective: str) -> None:
    """A plan for several kinds says what the best of them does alone under the same policy, with both numbers, and calls it better
    where nothing that all can do is as good; where devices may stay idle the plan is no worse than any of them."""
    job: dict[str, Any] = {"model": "llama-3.2-1b", "seq_len": 2048, "global_batch": 64, "objective": objective}
    hardware = mixed(("h100-sxm-80gb", fast), ("a100-sxm-80gb", 2))
    plan = recommend(hardware=hardware, **job)
    fastest = recommend(hardware=hardware, policy="fastest", **job)
    alone = [recommend(hardware=replace(hardware, groups=(group,)), **job) for group in hardware.groups]

    def price(made: Plan) -> float:
        return made.time.step_ns * (made.mesh.world if objective == "cost" else 1)

    best = min(alone, key=price)
    (hint,) = [hint for hint in plan.hints if hint.code == "W_ONE_KIND"]
    assert format_seconds(best.time.step_ns / 1e9) in hint.sentence
    assert format_seconds(plan.time.step_ns / 1e9) in hint.sentence
    assert ("--allow-idle" in hint.sentence) == (price(best) < price(fastest))
    free = recommend(hardware=hardware, allow_idle=True, **job)
    assert price(free) <= min(price(best), price(plan))


def test_idle_devices_are_allowed_by_a_word() -> None:
    """The flag makes the plan of the command line the part's; without it all devices are used and no plan has idle ones."""
    words = ("plan", "--model", "gpt2", "--seq-len", "1024", "--gpu", "rtx-4090", "--gpus-per-node", "4", "--nodes", "1", "--intra-bw", "1GB/s", "--global-batch", "1", "--json")  # fmt: skip
    part, whole = (json.loads(call(*words, *more).out) for more in (("--allow-idle",), ()))
    assert part["idle"] == 4 - part["cluster"]["groups"][0]["node"]["gpus"] > 0
    assert (whole["idle"], whole["cluster"]["groups"][0]["node"]["gpus"]) == (0, 4)


@pytest.mark.parametrize(
    ("batch", "said"), [(7, "no layout of all of them is allowed"), (8, "Leave --allow-idle out to use them all")]
)
def test_all_devices_are_offered_where_they_have_a_plan(batch: int, said: str) -> None:
    """Leaving --allow-idle out is advised exactly where a plan for all devices comes of it: seven sequences are no batch of four replicas."""
    hardware = cluster(4, link="10MB/s")
    plan = planned(hardware, batch, forbid="cp,tp,pp,offload,recompute")
    every = planned(hardware, batch, forbid="cp,tp,pp,offload,recompute", allow_idle=False)
    assert plan is not None
    (hint,) = [hint for hint in plan.hints if hint.code == "W_IDLE"]
    assert said in hint.sentence
    assert ("Leave --allow-idle out" in hint.sentence) == (every is not None)
