"""Offloading beside other axes: where sequences are shared and where ranks hold different experts."""

from __future__ import annotations

import pytest

from strategist import recommend
from strategist.errors import NoPlanError
from strategist.facts.clusters import cluster_from_flags


@pytest.mark.slow
def test_long_sequences_train_on_few_devices_with_weights_on_the_host() -> None:
    """A sequence that only several devices can hold and weights that only the host can: together there is a plan, and
    without either there is none."""
    job = {"model": "llama-3.1-70b", "hardware": "dgx-h100", "seq_len": 131_072, "global_batch": 8}
    plan = recommend(**job)
    assert plan.mesh.cp > 1
    assert plan.strategy.offload == "parameters"
    for word in ("offload", "cp"):
        with pytest.raises(NoPlanError):
            recommend(**job, forbid=word)


def test_experts_apart_leave_room_for_larger_micro_batches() -> None:
    """Weights are on the host either way; a rank that gathers its own experts alone computes more tokens at a time."""
    job = {"model": "mixtral-8x7b", "hardware": "dgx-a100-40gb"}
    apart, together = recommend(**job), recommend(**job, forbid="ep")
    assert apart.mesh.ep > 1
    assert {plan.strategy.offload for plan in (apart, together)} == {"parameters"}
    assert apart.strategy.micro_batch > together.strategy.micro_batch
    assert apart.time.step_ns < together.time.step_ns


def test_over_a_slow_network_groups_of_a_node_keep_a_copy_on_every_host() -> None:
    """Weights are gathered inside a node and gradients cross the network once a step; sharded over all they cross it for every
    micro-batch."""
    machines = cluster_from_flags("rtx-4090", 8, 2, inter_Bps=1.25e9).cluster
    plan = recommend("llama-2-13b", machines, policy="fastest", forbid="tp,pp")
    assert (plan.mesh.dp_replicate, plan.mesh.dp_shard) == (2, 8)
    assert plan.strategy.offload == "parameters"


def test_what_no_drive_holds_is_no_matter_of_host_memory() -> None:
    """Of nodes without drives a layout that offloads to one is said to lack the drive; with drives, or host memory, that is too little, that."""
    machines = {"format": "strategist-hardware/1", "gpu": "t4", "gpus_per_node": 2}
    plan = recommend("gpt2", machines, precision="fp16", global_batch=4)
    (bare,) = [other.sentence for other in plan.alternatives if other.family == "offload-nvme"]
    assert "no drive of" in bare
    poor = {"gpu": "h100-sxm-80gb", "gpu_count": 8, "ram": "8GB", "topology": "nvswitch", "intra_bw": "450GB/s"}
    short = recommend("llama-2-7b", {"format": "strategist-hardware/1", "nodes": [poor]})
    (said,) = [other.sentence for other in short.alternatives if other.family == "offload"]
    assert "of host memory per device, and 0.838 GiB are free for it" in said


def test_the_smaller_model_that_is_offered_may_rest_beside_the_device() -> None:
    """A card that holds 1B of parameters trains 7B with its state on the host and the drive: that is what a refusal of 70B offers; where nothing
    may leave the device it offers what fits there."""
    job = {"model": "llama-2-70b", "hardware": "ws-1x-4090", "global_batch": 16, "seq_len": 2048}
    for forbid, offered in ((None, "6.7B"), ("offload", "774M")):
        with pytest.raises(NoPlanError) as refused:
            recommend(**job, forbid=forbid)
        (fix,) = [fix for fix in refused.value.fixes if fix.startswith("--model-size")]
        assert fix.startswith(f"--model-size {offered} "), fix
