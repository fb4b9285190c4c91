"""A loss of a few tokens at a time: a choice that somebody must ask for."""

from __future__ import annotations

from typing import Any

import pytest

from strategist import Plan, predict, recommend
from strategist.errors import ImpossibleError, NoPlanError
from strategist.planner.exhaustive import recheck

JOB: dict[str, Any] = {"seq_len": 2048, "global_batch": 64}


def plan_for(pin: str | None, **more: Any) -> Plan:
    """A plan for a model whose vocabulary outweighs its layers."""
    return recommend("llama-3.2-1b", "dgx-h100", pin=pin, **JOB | more)


def test_chunks_are_chosen_by_those_alone_who_ask_for_them() -> None:
    """Unasked every loss is whole; asked for, the same layout holds fewer logits and less in all, and takes no less time."""
    layout = "dp_shard=8,zero=3,micro_batch=4,recompute=none"
    whole, chunked = plan_for(layout), plan_for(f"{layout},loss=chunked")
    assert (plan_for(None).strategy.loss, whole.strategy.loss, chunked.strategy.loss) == ("whole", "whole", "chunked")
    assert chunked.memory.peak.value < whole.memory.peak.value
    assert chunked.time.step_ns >= whole.time.step_ns


@pytest.mark.slow
def test_every_layout_with_chunks_is_found_and_tried() -> None:
    """The layouts one at a time are those of the search, and none of them is better than the chosen one."""
    plan = plan_for("loss=chunked", certificate=True)
    again = recheck(plan)
    assert plan.certificate is not None
    assert (again.enumerated, again.holds) == (plan.certificate.enumerated, True)


@pytest.mark.parametrize("strategy", ["tp=2,loss=chunked", "pp=2,loss=chunked"])
def test_chunks_need_the_whole_head(strategy: str) -> None:
    """A layout that cuts or moves the head has no price with them."""
    with pytest.raises(ImpossibleError, match="whole head"):
        predict("llama-3.2-1b", "dgx-h100", strategy=strategy, **JOB)


def test_chunks_are_refused_where_nobody_computes_them() -> None:
    """DeepSpeed's engine, another framework's formulas, and a model without a vocabulary."""
    with pytest.raises(ImpossibleError):
        plan_for("loss=chunked", frontend="deepspeed")
    with pytest.raises(ImpossibleError, match="loss=chunked"):
        predict("llama-3.2-1b", "dgx-h100", strategy="dp=8,loss=chunked", framework="megatron-core", **JOB)
    with pytest.raises(ImpossibleError):
        recommend("vit-l-16", "dgx-h100", pin="loss=chunked", global_batch=64)


@pytest.mark.slow
def test_where_logits_are_too_much_a_loss_in_chunks_is_the_first_way_out() -> None:
    """It changes nothing of the training: a quarter of a million tokens fit eight devices with it and nothing else said."""
    job: dict[str, Any] = {"model": "llama-3.1-70b", "hardware": "dgx-h100", "seq_len": 2**18, "global_batch": 8}
    with pytest.raises(NoPlanError) as none:
        recommend(**job)
    assert none.value.fixes[0].startswith("--pin loss=chunked    fits:")
    assert recommend(**job, pin="loss=chunked").strategy.loss == "chunked"
    with pytest.raises(NoPlanError) as none:
        recommend(**job, frontend="deepspeed")
    assert not any("chunked" in fix for fix in none.value.fixes)


@pytest.mark.parametrize(
    ("seq_len", "pin", "is_advised"), [(131_072, None, True), (131_072, "loss=chunked", False), (4096, None, False)]
)
def test_logits_that_fill_a_device_are_pointed_out(seq_len: int, pin: str | None, is_advised: bool) -> None:
    """And only those, and not to who already does what is advised."""
    plan = recommend("llama-3.1-70b", "dgx-h100:2", seq_len=seq_len, global_batch=16, pin=pin)
    assert any(hint.code == "W_ADV802" for hint in plan.hints) == is_advised
    share = plan.memory.worst.term("logits") / plan.memory.worst.device
    assert (share > 0.33) == is_advised
