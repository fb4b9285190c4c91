"""Compressed gradients: a choice that somebody must ask for, and that says what it gives up."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strategist import Plan, predict, recommend
from strategist.document.load import plan_from
from strategist.document.write import dump, seal_state, sealed
from strategist.errors import ImpossibleError
from strategist.planner.exhaustive import recheck
from strategist.space.candidates import WORDS
from tests.plans import make_plan

JOB: dict[str, Any] = {"seq_len": 1024, "global_batch": 32}
ALL = WORDS["compression"][1:]


def plan_for(pin: str | None, machines: str = "dgx-h100", **more: Any) -> Plan:
    """A plan for GPT-2."""
    return recommend("gpt2", machines, pin=pin, **JOB | more)


@pytest.mark.parametrize("word", ALL)
def test_compression_is_chosen_by_those_alone_who_ask_for_it(word: str) -> None:
    """Asked for, the plan is of whole replicas, names its setting, and assumes that inexact gradients will do."""
    plan = plan_for(f"compression={word}")
    assert (plan.strategy.compression, plan.mesh.dp_replicate, plan.strategy.zero) == (word, 8, 0)
    assert (plan.strategy.compression_rank > 0, plan.strategy.compression_share > 0) == (
        word == "powersgd",
        word == "topk",
    )
    assert [a.what for a in plan.assumptions if a.flag == "--pin compression"] == ["gradients are not exact"]


def test_unasked_nothing_is_compressed() -> None:
    """Neither the plan nor an assumption speaks of it, and asking for none is asking for nothing."""
    free, none = plan_for(None), plan_for("compression=none")
    assert free.strategy == none.strategy
    assert free.strategy.compression == "none"
    assert "gradients are not exact" not in [a.what for plan in (free, none) for a in plan.assumptions]


@pytest.mark.parametrize(
    ("pin", "more", "code"),
    [
        ("compression=topk", {"precision": "fp16"}, "UNSUPPORTED"),
        ("compression=bf16", {"method": "lora", "lora_rank": 8}, "UNSUPPORTED"),
        ("compression=bf16", {"frontend": "deepspeed"}, "UNSUPPORTED"),
        ("compression=bf16,replicas=threads", {}, "FRAMEWORK_LEGALITY"),
    ],
)
def test_compression_is_refused_where_it_would_be_wrong(pin: str, more: dict[str, Any], code: str) -> None:
    """Beside a loss scale that changes, adapters, engines without hooks, and threads."""
    with pytest.raises(ImpossibleError) as refused:
        plan_for(pin, **more)
    assert refused.value.code == code


@pytest.mark.parametrize("strategy", ["tp=2,compression=bf16", "zero=3,dp_shard=8,compression=topk"])
def test_those_that_compress_hold_whole_replicas(strategy: str) -> None:
    """A layout that cuts the model has no price with compression."""
    with pytest.raises(ImpossibleError, match="whole replicas"):
        predict("gpt2", "dgx-h100", strategy=strategy, **JOB)


@pytest.mark.slow
def test_every_layout_with_compression_is_found_and_tried() -> None:
    """The layouts one at a time are those of the search, and none of them is better than the chosen one."""
    plan = plan_for("compression=bf16", certificate=True)
    again = recheck(plan)
    assert plan.certificate is not None
    assert (again.enumerated, again.holds) == (plan.certificate.enumerated, True)


def test_fewer_bytes_take_less_time_between_nodes() -> None:
    """Between nodes a cast halves what is sent; PowerSGD sends less than that, and top-k less among few ranks."""

    def seconds(word: str) -> float:
        found = predict("llama-3.2-1b", "dgx-h100:4", strategy=f"dp=32,micro_batch=1{word}", **JOB)
        return sum(t.exposed_ns + t.hidden_ns for t in found.time.terms if t.name == "dp")

    exact, cast, low_rank, largest = (
        seconds(w) for w in ("", *(f",compression={w}" for w in ("bf16", "powersgd", "topk")))
    )
    assert exact / 2 < cast < 0.6 * exact
    assert low_rank < cast
    assert largest < cast


def test_a_plan_that_was_sealed_before_compression_had_a_word_keeps_its_seal() -> None:
    """The plain words are not signed, so that an older file without them reads as sealed; others are."""
    plan = sealed(make_plan(dp_replicate=2))
    older = json.loads(dump(plan))
    for name in ("compression", "compression_rank", "compression_share"):
        del older["strategy"][name]
    assert seal_state(plan_from(older, "PLAN")) == "sealed"
    older["strategy"]["compression"] = "bf16"
    assert seal_state(plan_from(older, "PLAN")) == "edited"
