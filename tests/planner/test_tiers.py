"""The walk over the tiers of the decision tables: cp joins them where sequences are long, or where nothing else fits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist import NoPlanError, Plan, recommend
from strategist.facts.models import load_model
from strategist.planner.situation import threshold
from tests.examples import examples

B200_FOUR = {"format": "strategist-hardware/1", "gpu": "b200", "gpus_per_node": 4}
SHORT: tuple[dict[str, Any], ...] = (
    {"model": "llama-3.1-8b", "hardware": "dgx-b200"},
    {"model": "llama-3.1-8b", "hardware": "dgx-b200", "precision": "fp4"},
    {"model": "llama-3.1-8b", "hardware": "dgx-b200", "global_batch": 4},
    {"model": "llama-3.1-8b", "hardware": B200_FOUR},
    {"model": "qwen2.5-1.5b", "hardware": "aws-p4d.24xlarge"},
    {"model": "llama-3.1-70b", "hardware": "dgx-h100:16", "seq_len": 8192, "global_batch": 64},
)
"""Jobs whose first tier fits with cp alone, whose second does so without it, and whose batch is too small for any tier without it."""


def planned(**asked: Any) -> Plan | None:
    """The plan; None where nothing fits."""
    try:
        return recommend(**asked)
    except NoPlanError:
        return None


def is_preferred(plan: Plan | None) -> bool:
    """Whether a family that the rules name was found."""
    return plan is not None and "gap" not in [reason.rule for reason in plan.reasons]


def assert_cp_waits(asked: dict[str, Any]) -> None:
    """Where some tier has a layout that fits with cp = 1, the plan is the one of the question with cp pinned to 1."""
    plan, whole = planned(**asked), planned(**asked, pin="cp=1")
    assert plan is not None or whole is None
    if is_preferred(whole):
        assert plan is not None and whole is not None
        assert (plan.mesh, plan.strategy, plan.decision.family) == (whole.mesh, whole.strategy, whole.decision.family)


@pytest.mark.slow
@pytest.mark.parametrize("asked", SHORT, ids=str)
def test_no_tier_is_left_for_cp(asked: dict[str, Any]) -> None:
    """Of short sequences no plan has cp > 1 while a layout of some tier fits with cp = 1."""
    assert_cp_waits(asked)


@examples(8)
@given(
    st.sampled_from(("gpt2", "gpt2-xl", "llama-3.2-1b", "qwen2.5-1.5b", "llama-2-7b", "olmoe-1b-7b")),
    st.sampled_from(("ws-4x-4090", "aws-p4d.24xlarge", "dgx-h100:2", "dgx-b200", "aws-g5.12xlarge:2")),
    st.sampled_from((512, 1024, int(threshold("long_sequence").value))),
    st.sampled_from((2, 8, 96, 512)),
)
def test_no_tier_is_left_for_cp_anywhere(model: str, hardware: str, seq_len: int, batch: int) -> None:
    """The same of drawn models, machines, lengths up to the threshold and to learned positions, and batches."""
    longest = load_model(model).learned_positions or seq_len
    assert_cp_waits({"model": model, "hardware": hardware, "seq_len": min(seq_len, longest), "global_batch": batch})


def test_a_tier_may_still_be_found_with_cp() -> None:
    """Fewer sequences than devices, which no tier takes whole: the first tier has cp then, and the certificate says so."""
    plan = recommend("llama-3.1-8b", "dgx-b200", global_batch=4, certificate=True)
    assert not is_preferred(planned(model="llama-3.1-8b", hardware="dgx-b200", global_batch=4, pin="cp=1"))
    assert (plan.decision.family, plan.mesh.cp > 1) == ("ddp", True)
    assert plan.certificate is not None
    assert not plan.certificate.whole_sequences


@pytest.mark.parametrize("asked", [{"seq_len": 16384, "global_batch": 1}, {"pin": "cp=8"}], ids=str)
def test_cp_alone_is_no_ddp(asked: dict[str, Any]) -> None:
    """A single replica whose sequences are cut stands where DDP does, whole on every device, and is called by what it is."""
    plan = recommend("qwen2.5-0.5b", "dgx-h100", **asked)
    assert (plan.mesh.data_parallel, plan.mesh.cp, plan.strategy.zero) == (1, 8, 0)
    assert (plan.decision.family, [reason.rule for reason in plan.reasons]) == ("cp", ["HF201"])
    assert not [other for other in plan.alternatives if other.family == "ddp" and "dp_" not in other.layout]


def test_long_sequences_have_cp_at_once() -> None:
    """Above the threshold the first tier has cp although one with cp = 1 fits: the faster of the two is taken."""
    asked: dict[str, Any] = {"model": "qwen2.5-0.5b", "hardware": "dgx-h100", "seq_len": 16384, "global_batch": 4}
    plan, whole = recommend(**asked), planned(**asked, pin="cp=1")
    assert is_preferred(plan)
    assert plan.mesh.cp > 1
    assert whole is None or whole.time.step_ns > plan.time.step_ns
