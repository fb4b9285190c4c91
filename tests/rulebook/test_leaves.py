"""Every leaf of the decision table with a real model on real machines."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from strategist import NoPlanError, Plan, recommend
from strategist.ask import Given, complete
from strategist.catalog import rows
from strategist.document.plan import Policy
from strategist.errors import StrategistError
from strategist.planner.situation import describe
from strategist.rulebook.rule import load_rules

POLICIES: tuple[Policy, ...] = ("hf", "fastest")
RULES = {rule.id: rule for rule in load_rules("hf_decisions")}

LEAVES: tuple[tuple[str, str, str, dict[str, Any], str], ...] = (
    ("HF101", "gpt2-medium", "ws-1x-4090", {"seq_len": 1024}, "single"),
    ("HF102", "llama-3.2-3b", "ws-1x-4090", {}, "offload"),
    ("HF201", "gpt2-medium", "dgx-h100", {}, "ddp"),
    ("HF201", "gpt2", "aws-g5.12xlarge", {"seq_len": 1024}, "ddp"),
    ("HF202", "llama-2-7b", "dgx-a100-80gb", {}, "zero"),
    ("HF202", "llama-2-7b", "dgx-h100", {}, "zero"),
    ("HF203", "gpt2-xl", "aws-g5.12xlarge", {"seq_len": 1024}, "pp"),
    ("HF203", "llama-3.2-3b", "ws-8x-3090", {"seq_len": 2048}, "pp"),
    ("HF301", "llama-2-7b", "dgx-h100:2", {}, "zero"),
    ("HF301", "llama-3.1-70b", "dgx-h100:8", {}, "zero"),
    ("HF302", "llama-3.1-8b", "aws-g5.48xlarge:8", {"seq_len": 12288}, "pp+tp+zero1"),
    ("HF302", "qwen2.5-14b", "aws-g5.48xlarge:8", {"seq_len": 8192}, "pp+tp+zero1"),
    ("HF901", "gpt2-medium", "dgx-h100:2", {}, "ddp"),
    ("HF902", "gpt2-medium", "aws-g5.12xlarge:2", {}, "hsdp"),
    ("HF902", "gpt2", "aws-g4dn.12xlarge:2", {}, "ddp"),
    ("HF902", "llama-3.2-3b", "aws-g5.12xlarge:2", {"seq_len": 2048}, "pp"),
    ("HF902", "qwen2.5-32b", "lambda-8x-h100:2", {}, "pp+tp+zero"),
)
"""Rule, model, machines, workload, and the family that is chosen."""


@cache
def planned(model: str, machines: str, policy: Policy = "hf", **workload: Any) -> Plan:
    """The plan for a question; several tests look at the same ones."""
    return recommend(model, machines, policy=policy, **workload)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "model", "machines", "workload", "family"), LEAVES)
def test_leaves_are_reached(rule: str, model: str, machines: str, workload: dict[str, Any], family: str) -> None:
    """The plan's reason names the rule, and the family that was chosen belongs to the first of its tiers that fits."""
    plan = planned(model, machines, **workload)
    assert [reason.rule for reason in plan.reasons] == [rule]
    assert plan.decision.family == family
    tiers = RULES[rule].families
    tier = next(number for number, names in enumerate(tiers) if family in names)
    better = {name for names in tiers[:tier] for name in names}
    assert not better & {alternative.family for alternative in plan.alternatives if alternative.fits}


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "model", "machines", "workload", "family"), LEAVES)
def test_both_policies_are_recorded(
    rule: str, model: str, machines: str, workload: dict[str, Any], family: str
) -> None:
    """Each policy's plan holds the other's answer, and the ratios of their step times are each other's inverse."""
    ours, theirs = (planned(model, machines, policy, **workload) for policy in POLICIES)
    assert ours.decision.other_family == theirs.decision.family
    assert theirs.decision.other_family == ours.decision.family
    assert ours.decision.other_step_s == theirs.time.step.value
    assert ours.decision.difference == pytest.approx(theirs.time.step.value / ours.time.step.value)
    assert ours.decision.difference * theirs.decision.difference == pytest.approx(1)
    assert ours.decision.difference <= 1
    assert rule in [reason.rule for reason in theirs.reasons]


def test_policies_differ_somewhere() -> None:
    """There are machines on which the tables' answer is slower than the fastest, and the plan says by how much."""
    plan = planned("llama-3.2-3b", "dgx-a100-80gb")
    assert plan.decision.difference < 0.9
    assert plan.decision.other_family != plan.decision.family


@pytest.mark.slow
def test_more_memory_on_a_slow_network_is_never_slower() -> None:
    """Beside the border between short and enough memory, and beyond it, a plan for larger devices takes no longer."""
    steps = []
    for size in (50, 52, 56, 64, 80, 120):
        machines = {"format": "strategist-hardware/1", "gpu": "h100-sxm-80gb", "gpus_per_node": 8, "nodes": 4}
        machines |= {"inter_bw": "100Gb/s", "gpu_memory": f"{size}GiB"}
        plan = recommend("llama-2-70b", machines, global_batch=512)
        steps.append((plan.reasons[0].rule, plan.time.step_ns))
    assert {rule for rule, _ in steps} == {"HF302", "HF902"}
    assert all(before >= after for (_, before), (_, after) in pairwise(steps))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "machines"),
    [
        ("llama-3.2-1b", "lambda-8x-h100:8"),
        ("llama-3.2-1b", "aws-g5.48xlarge:4"),
        ("llama-2-7b", "lambda-8x-h100:2"),
        ("llama-2-7b", "ws-8x-4090:2"),
        ("mixtral-8x7b", "lambda-8x-h100:8"),
    ],
)
def test_a_gap_takes_no_layout_that_pipelines_beat(model: str, machines: str) -> None:
    """On a slow network with enough memory no replicas, shards or pipelines that fit with cp = 1 are faster than the plan."""
    asked: dict[str, Any] = {"model": model, "hardware": machines, "seq_len": 2048, "pin": "cp=1", "forbid": "offload"}
    plan, fastest = recommend(**asked), recommend(**asked, policy="fastest")
    assert [reason.rule for reason in plan.reasons] == ["HF902"]
    assert plan.time.step_ns == fastest.time.step_ns or fastest.decision.family in ("tp", "tp+zero")


WIDE: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("HF103", "deepseek-v3", "rtx-4090", {"gpu_count": 1, "ram": "14TB"}),
    ("HF204", "deepseek-v3", "a100-sxm-40gb", {"gpu_count": 8, "ram": "16TB", "topology": "nvswitch"}),
)
"""Layers too wide for one device belong to models whose state no catalogued node can hold: the host is described larger."""


@pytest.mark.parametrize(("rule", "model", "gpu", "node"), WIDE)
def test_leaves_for_layers_too_wide_for_a_device(rule: str, model: str, gpu: str, node: dict[str, Any]) -> None:
    """With enough host memory the leaf's family is chosen: offloading, the widest matrices in pieces where every rank gathers all
    experts."""
    plan = recommend(model, {"nodes": [{"gpu": gpu, **node}]}, seq_len=512, forbid="ep")
    assert [reason.rule for reason in plan.reasons] == [rule]
    assert plan.decision.family in {name for tier in RULES[rule].families for name in tier}
    assert (plan.strategy.offload, plan.strategy.tiling) == ("parameters", 8)


def test_experts_apart_need_no_pieces() -> None:
    """Ranks that gather their own experts alone hold the widest layer whole, and the leaf stays the same."""
    rule, model, gpu, node = WIDE[-1]
    plan = recommend(model, {"nodes": [{"gpu": gpu, **node}]}, seq_len=512)
    assert [reason.rule for reason in plan.reasons] == [rule]
    assert (plan.strategy.offload, plan.strategy.tiling) == ("parameters", 1)
    assert plan.mesh.ep > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "model", "machines"),
    [
        ("HF103", "deepseek-v3", "ws-1x-4090"),
        ("HF204", "deepseek-v3", "dgx-a100-40gb"),
    ],
)
def test_leaves_that_catalogued_machines_cannot_hold(rule: str, model: str, machines: str) -> None:
    """Where the leaf's family does not fit, the refusal names the leaf and what it would have chosen."""
    with pytest.raises(NoPlanError) as refused:
        recommend(model, machines, seq_len=512)
    assert any(f"[{rule}]" in link and "tiling" in link for link in refused.value.chain)


def test_a_gap_is_said_aloud() -> None:
    """Where no family of the answering rule fits, the plan names the rule, the gap, and who decides instead."""
    plan = recommend("llama-2-7b", "aws-g5.12xlarge", seq_len=2048)
    assert [(reason.rule, reason.kind) for reason in plan.reasons] == [("HF203", "decision"), ("gap", "gap")]
    fitting = {alternative.family for alternative in plan.alternatives if alternative.fits} | {plan.decision.family}
    assert not fitting & {name for tier in RULES["HF203"].families for name in tier}


@pytest.mark.slow
def test_implications_hold_for_real_models() -> None:
    """What the table rules out never happens: a job that fits one device has no layer too wide for it and no shortage."""
    seen = set()
    for row in rows("models")[::7]:
        for machines in ("ws-1x-4090", "dgx-a100-40gb", "aws-g5.12xlarge:2"):
            found = _described(row["name"], machines)
            if found is None:
                continue
            assert not found["fits_one_gpu"] or (found["largest_layer_fits"] and not found["memory_short"])
            assert found["largest_layer_fits"] or found["memory_short"]
            seen.add((found["fits_one_gpu"], found["largest_layer_fits"], found["memory_short"]))
    assert len(seen) >= 3


def _described(model: str, machines: str) -> dict[str, Any] | None:
    """The predicates for a model; None where it is no model that can be planned."""
    try:
        return describe(complete(Given(model=model, hardware=machines)).question.job)
    except StrategistError:
        return None


def test_reasons_carry_their_numbers() -> None:
    """Each predicate of the rule stands in the plan with its value, its threshold and its unit."""
    plan = planned("llama-2-7b", "dgx-h100")
    numbers = {quantity.name: quantity for quantity in plan.reasons[0].quantities}
    assert {"fits_one_gpu", "largest_layer_fits", "fast_intra", "intra_bandwidth", "intra_threshold"} <= numbers.keys()
    fast = numbers["intra_bandwidth"].value >= numbers["intra_threshold"].value
    assert fast == bool(numbers["fast_intra"].value)
    assert (numbers["peak_one_gpu"].value <= numbers["usable"].value) == bool(numbers["fits_one_gpu"].value)
