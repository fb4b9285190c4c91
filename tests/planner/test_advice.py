"""What plans are told of their links: rates are those of the ranks that talk, and nothing is advised that the search found slower."""

from __future__ import annotations

import re
from typing import Any

import pytest

from strategist import load_cluster, recommend
from strategist.facts.groups import group_bandwidth
from strategist.facts.tiers import tiers
from strategist.reports.brief import option_words, policy_words

JOB: dict[str, Any] = {"seq_len": 4096, "global_batch": 32}


def warning(code: str, model: str, machines: Any, **fields: Any) -> str:
    """The sentence of a warning of a plan; empty without it."""
    hints = recommend(model, machines, **JOB | fields).hints
    return next((hint.sentence for hint in hints if hint.code == code), "")


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_slow_links_are_those_of_the_ranks_that_share_a_layer(tp: int) -> None:
    """On pairs of bridged devices tp=2 stays on a bridge, and nothing is said of the PCIe that joins the pairs; tp=4 and tp=8 cross it,
    and the rate that is named is what such a group gets."""
    machines = "ws-8x-h100-nvl"
    reached = group_bandwidth(tiers(load_cluster(machines)), tp).all_reduce_Bps / 1e9
    said = warning("W_ADV002", "llama-3.1-8b", machines, pin=f"tp={tp}")
    assert bool(said) == (tp > 2) == (reached < 100)
    assert not said or f"{reached:.0f} GB/s" in re.sub(r"\s+", " ", said)


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-2-13b"])
def test_sharding_over_a_slow_network_is_told_without_a_layout_that_is_slower(model: str) -> None:
    """A plan under ZeRO-3 over Ethernet has been held against every hybrid layout, so the warning sends nobody to one."""
    plan = recommend(model, "aws-g5.48xlarge:2", global_batch=256, pin="pp=1,tp=1,zero=3")
    said = next(hint.sentence for hint in plan.hints if hint.code == "W_ADV202")
    assert "HSDP" not in said
    hybrid = [one for one in plan.alternatives if one.family == "hsdp" and one.fits]
    assert all(one.relative_time is not None and one.relative_time >= 1 for one in hybrid)


def test_a_last_stage_that_has_fewer_layers_already_is_not_advised_to() -> None:
    """Where the head is counted the last stage owns less, which the report says; where stages are cut evenly whatever the head, it is advised."""
    job: dict[str, Any] = {"global_batch": 64, "policy": "fastest"}
    weighted = {"pin": "pp=4,stage_split=weighted,schedule=1f1b"}
    plan = recommend("llama-3.1-8b", "dgx-h100", **JOB | job | weighted)
    last = plan.strategy.stages[-1].layer_count
    assert last < min(stage.layer_count for stage in plan.strategy.stages[:-1])
    assert f"{last} layers on the last stage" in option_words(plan)
    assert not warning("W_ADV103", "llama-3.1-8b", "dgx-h100", **job, **weighted)
    assert warning("W_ADV103", "llama-3.1-8b", "dgx-h100", **job, pin="pp=4,schedule=interleaved")


@pytest.mark.parametrize(
    ("model", "machines", "job"),
    [
        ("llama-3.1-8b", "dgx-h100", {"method": "lora", "seq_len": 65536, "global_batch": 16, "pin": "loss=chunked"}),
        ("mamba2-2.7b", "dgx-h100", {"seq_len": 131072, "global_batch": 16}),
        ("llama-3.1-8b", "dgx-h100", {"seq_len": 32768, "global_batch": 64}),
        ("llama-3.1-8b", "dgx-h100", {"seq_len": 32768, "global_batch": 64, "forbid": "offload,pp,tp"}),
    ],
)
def test_context_parallelism_is_advised_where_it_is_sooner(model: str, machines: str, job: dict[str, Any]) -> None:
    """Never for a model or a method that it does not go with, nor where it takes longer; where it is named, the pin makes a plan that is sooner."""
    plan = recommend(model, machines, **JOB | job)
    said = next((hint.sentence for hint in plan.hints if hint.code == "W_ADV302"), "")
    if said:
        pins = ",".join(filter(None, (job.get("pin"), said.rpartition("--pin ")[2].rstrip("."))))
        assert recommend(model, machines, **JOB | job | {"pin": pins}).time.step_ns < plan.time.step_ns


def test_ddp_is_advised_only_where_it_is_not_slower() -> None:
    """A T5 fits one device, and shards all the same because larger micro-batches come of it: nothing is said. With zero pinned DDP was not looked at."""
    job: dict[str, Any] = {"seq_len": 512, "global_batch": 256}
    plan = recommend("t5-3b", "hgx-a100-4:2", policy="fastest", **job)
    slower = [one for one in plan.alternatives if one.family == "ddp" and one.fits]
    assert plan.strategy.zero >= 2 and slower
    assert not warning("W_ADV201", "t5-3b", "hgx-a100-4:2", policy="fastest", **job)
    assert warning("W_ADV201", "llama-3.2-1b", "dgx-h100", pin="zero=3")


def test_a_device_that_nobody_described_the_design_of_is_named_by_its_name() -> None:
    """A file's own device has no architecture: there is nothing in brackets behind it."""
    card = {"name": "foo-card", "memory": "36GiB", "memory_bw": "1.2TB/s", "bf16_TFLOPs": 210, "host_bw": "31.5GB/s"}
    machines = {"format": "strategist-hardware/1", "gpus": [card], "nodes": [{"gpu": "foo-card", "gpu_count": 2, "topology": "pcie-host"}]}  # fmt: skip
    assert "devices like foo-card were" in warning("W_UNCALIBRATED", "llama-3.2-1b", machines)


def test_policies_that_take_the_same_layout_agree_whatever_its_family_is_called() -> None:
    """The tables call state on a drive offloading, and the time model offloading to NVMe."""
    plan = recommend("llama-3.1-8b", "ws-dgx-spark-2")
    assert plan.decision.family != plan.decision.other_family
    assert policy_words(plan) == "hf and fastest agree."
