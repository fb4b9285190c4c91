"""The words of the decision tables: each is yes on one side of its own border and no on the other."""

from __future__ import annotations

from typing import Any

import pytest

from strategist.ask import Given, complete
from strategist.facts.hardware import with_gpus
from strategist.facts.job import Job
from strategist.planner.predict import predict
from strategist.planner.situation import describe, near_thresholds, threshold, unsplit_bytes
from strategist.records import replace
from strategist.space.grammar import parse_pins
from strategist.timing.collectives import bus_bandwidth, device_bandwidth_between_nodes
from strategist.units import GB


def job_of(hardware: str, **more: Any) -> Job:
    """A small job on some machines, a sequence for each of eight devices."""
    return complete(
        Given(**{"model": "gpt2", "hardware": hardware, "seq_len": 1024, "global_batch": 8} | more)
    ).question.job


@pytest.mark.parametrize(
    "hardware", ["dgx-h100:2", "aws-g5.48xlarge:2", "lambda-8x-h100:2", "ws-4x-4090", "aws-p4d.24xlarge:2"]
)
def test_links_are_fast_by_borders_of_their_own(hardware: str) -> None:
    """Those inside a node by what an all-reduce reaches, those between nodes by a device's share."""
    job = job_of(hardware)
    found = describe(job)
    inside, between = bus_bandwidth(job.cluster) / GB, device_bandwidth_between_nodes(job.cluster) / GB
    assert found["fast_intra"] is (inside >= threshold("fast_intra").value)
    assert found["fast_inter"] is (between >= threshold("fast_inter").value)
    assert (found["intra_bandwidth"], found["inter_bandwidth"]) == (inside, between)


def test_a_sequence_is_long_beyond_the_border() -> None:
    """At the border itself it is not."""
    border = int(threshold("long_sequence").value)
    lengths = border - 1, border, border + 1
    found = [describe(job_of("dgx-h100", model="llama-3.2-1b", seq_len=length))["long_sequence"] for length in lengths]
    assert found == [False, False, True]


@pytest.mark.parametrize("allowed", [True, False])
def test_one_device_and_all_of_them_hold_what_such_layouts_hold(allowed: bool) -> None:
    """On one device the leanest that runs the whole batch in micro-batches of one; on all the states cut over all of them, layers run again where
    that is allowed."""
    job = job_of("dgx-h100")
    (group,) = job.cluster.groups
    single = replace(job, cluster=replace(job.cluster, groups=(replace(group, node=with_gpus(group.node, 1)),)))
    policies = ("none", "selective", "full") if allowed else ("none",)
    alone = [
        predict(single, parse_pins(f"micro_batch=1,recompute={policy}")).memory.worst.device for policy in policies
    ]
    leanest = predict(job, parse_pins(f"zero=3,dp_shard=8,micro_batch=1,recompute={policies[-1]}")).memory.worst.device
    assert unsplit_bytes(job, allowed) == (min(alone), leanest)


@pytest.mark.parametrize("side", [-1, 1])
def test_a_value_is_near_its_border_on_either_side(side: int) -> None:
    """Within the declared factor above or below it, of a machine that has such links."""
    border, factor = 100.0, threshold("near_factor").value
    for times, is_near in ((1.0, True), (0.999 * factor, True), (1.001 * factor, False)):
        for name, other in (("intra", "inter"), ("inter", "intra")):
            rates = {f"{name}_bandwidth": border * times**side, f"{other}_bandwidth": 1.0}
            rates |= {f"{each}_threshold": border for each in (name, other)}
            found = near_thresholds(rates | {"gpus_per_node": 8, "nodes": 2})
            assert found == ((f"{name}_bandwidth",) if is_near else ())
            assert near_thresholds(rates | {"gpus_per_node": 1, "nodes": 1}) == ()
