"""Replicas as threads of one process, nn.DataParallel: a choice that somebody must ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strategist import Plan, predict, recommend
from strategist.document.load import plan_from
from strategist.document.write import dump, seal_state, sealed
from strategist.errors import ImpossibleError
from strategist.planner.exhaustive import recheck
from tests.plans import make_plan

JOB: dict[str, Any] = {"seq_len": 1024, "global_batch": 32}


def plan_for(pin: str | None, machines: str = "dgx-h100", **more: Any) -> Plan:
    """A plan for GPT-2."""
    return recommend("gpt2", machines, pin=pin, **JOB | more)


def test_threads_are_chosen_by_those_alone_who_ask_for_them() -> None:
    """Unasked no layout has them, not among the alternatives either; asked for, the plan has them and no other layout."""
    free, asked = plan_for(None), plan_for("replicas=threads")
    assert free.strategy.replicas == "processes"
    assert "dataparallel" not in {
        free.decision.family,
        free.decision.other_family,
        *(a.family for a in free.alternatives),
    }
    assert (asked.strategy.replicas, asked.mesh.dp_replicate, asked.processes) == ("threads", 8, 1)
    assert asked.decision.family == "dataparallel"
    assert asked.alternatives == ()


@pytest.mark.slow
def test_a_plan_with_threads_says_that_ddp_takes_less_time() -> None:
    """The advice names DDP's share of the step, which is what DDP with the same batch is predicted to take."""
    asked = plan_for("replicas=threads,micro_batch=2,recompute=none")
    ddp = plan_for("dp_replicate=8,zero=0,micro_batch=2,recompute=none")
    (advice,) = (hint.sentence for hint in asked.hints if hint.code == "W_ADV205")
    share = 100 * ddp.time.step_ns / asked.time.step_ns
    assert share < 100
    assert f"DDP takes {share:.0f} % of this step's time" in advice


@pytest.mark.parametrize(
    ("machines", "more", "code"),
    [
        ("cpu:4", {"precision": "fp32"}, "HARDWARE_FEATURE"),
        ("dgx-h100:2", {}, "TOPOLOGY"),
        ("dgx-h100", {"frontend": "deepspeed"}, "UNSUPPORTED"),
    ],
)
def test_threads_are_refused_where_they_cannot_help(machines: str, more: dict[str, Any], code: str) -> None:
    """Without GPUs nothing is faster, a process has one node, and DeepSpeed starts processes."""
    with pytest.raises(ImpossibleError, match=r"nn\.DataParallel") as refused:
        plan_for("replicas=threads", machines, **more)
    assert refused.value.code == code


@pytest.mark.parametrize("strategy", ["tp=2,replicas=threads", "zero=3,dp_shard=8,replicas=threads"])
def test_threads_hold_whole_replicas(strategy: str) -> None:
    """A layout that cuts the model has no price with threads."""
    with pytest.raises(ImpossibleError, match="whole replicas"):
        predict("gpt2", "dgx-h100", strategy=strategy, **JOB)


@pytest.mark.slow
def test_every_layout_with_threads_is_found_and_tried() -> None:
    """The layouts one at a time are those of the search, and none of them is better than the chosen one."""
    plan = plan_for("replicas=threads", certificate=True)
    again = recheck(plan)
    assert plan.certificate is not None
    assert (again.enumerated, again.holds) == (plan.certificate.enumerated, True)


def test_device_0_holds_more_than_a_device_of_ddp_when_gradients_are_summed() -> None:
    """Its replica's gradients and their sum lie beside each other: one replica's gradients more than the update finds."""
    found = predict("gpt2", "dgx-h100", strategy="dp=8,replicas=threads,micro_batch=1", **JOB | {"seq_len": 8})
    held = {term.name: term.bytes for term in found.memory.worst.terms}
    assert found.memory.worst.moment == "end of backward"
    assert held["temporaries"] >= held["gradients"] / 2


def test_a_plan_that_was_sealed_before_replicas_had_a_word_keeps_its_seal() -> None:
    """The plain word is not signed, so that an older file without it reads as sealed; threads are signed."""
    plan = sealed(make_plan(dp_replicate=2))
    older = json.loads(dump(plan))
    del older["strategy"]["replicas"]
    assert seal_state(plan_from(older, "PLAN")) == "sealed"
    older["strategy"]["replicas"] = "threads"
    assert seal_state(plan_from(older, "PLAN")) == "edited"
