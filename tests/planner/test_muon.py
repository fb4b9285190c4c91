"""Muon: an optimizer that somebody must ask for, and what plans say of it."""

from __future__ import annotations

from typing import Any

import pytest

from strategist import Plan, predict, recommend
from strategist.errors import ImpossibleError
from strategist.facts.models import load_model
from strategist.facts.parameters import count, hidden_matrices
from strategist.planner.exhaustive import recheck

JOB: dict[str, Any] = {"seq_len": 2048, "global_batch": 64}


def plan_for(optimizer: str, pin: str | None = "dp_shard=8,zero=3,micro_batch=2,recompute=none", **more: Any) -> Plan:
    """A plan for a model most of whose weights are matrices of layers."""
    return recommend("llama-3.1-8b", "dgx-h100", pin=pin, optimizer=optimizer, **JOB | more)


def test_muon_keeps_one_momentum_and_takes_longer() -> None:
    """The same layout has less state than under AdamW, by four bytes per element of a hidden matrix, gathers each matrix once, and
    its update takes longer."""
    adamw, muon = (plan_for(optimizer) for optimizer in ("adamw", "muon"))
    held = [next(t.bytes for t in plan.memory.worst.terms if t.name == "optimizer") for plan in (adamw, muon)]
    assert held[0] - held[1] == 4 * hidden_matrices(load_model("llama-3.1-8b")) // 8
    exposed = [{t.name: t.exposed_ns for t in plan.time.terms} for plan in (adamw, muon)]
    assert exposed[1]["optimizer"] > exposed[0]["optimizer"]
    assert exposed[1]["dp"] > exposed[0]["dp"]


def test_hidden_matrices_are_all_but_tables_and_vectors() -> None:
    """Of Llama 3.1 8B: seven matrices in each of 32 layers; the rest are two tables and norms."""
    shape = load_model("llama-3.1-8b")
    assert hidden_matrices(shape) == 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    assert count(shape).total - hidden_matrices(shape) == 2 * 128256 * 4096 + 65 * 4096


def test_muon_is_chosen_by_those_alone_who_ask_for_it() -> None:
    """Unasked the optimizer is AdamW; asked for, no layout splits a matrix in a way that its update could not undo."""
    assert recommend("llama-3.1-8b", "dgx-h100", **JOB).strategy.optimizer == "adamw"
    plan = plan_for("muon", None)
    assert plan.strategy.optimizer == plan.workload.optimizer == "muon"
    assert plan.mesh.tp == 1 or plan.strategy.zero != 1
    assert (plan.strategy.offload, plan.strategy.tiling) == ("none", 1)


def test_cut_matrices_are_gathered_by_those_who_have_their_parts() -> None:
    """Beside tp the ranks of a node send one message for each matrix more than under AdamW, of all its elements in two bytes."""
    adamw, muon = (plan_for(name, "tp=8,micro_batch=2,recompute=none") for name in ("adamw", "muon"))
    sent = [{t.name: t.exposed_ns for t in plan.time.terms}["tp"] for plan in (adamw, muon)]
    assert sent[1] > sent[0]


@pytest.mark.slow
@pytest.mark.parametrize("forbid", ["recompute,cp", "pp,cp", pytest.param(None, marks=pytest.mark.nightly)])
def test_every_layout_under_muon_is_found_and_tried(forbid: str | None) -> None:
    """The layouts one at a time are those of the search, and none of them is better than the chosen one."""
    plan = recommend("llama-3.2-1b", "dgx-h100", optimizer="muon", certificate=True, forbid=forbid, **JOB)
    again = recheck(plan)
    assert plan.certificate is not None
    assert (again.enumerated, again.holds) == (plan.certificate.enumerated, True)


@pytest.mark.parametrize(
    "strategy", ["tp=2,dp_shard=4,zero=1", "dp_shard=8,zero=3,offload=parameters", "dp_shard=8,zero=3,tiling=4"]
)
def test_what_muon_cannot_run_is_said(strategy: str) -> None:
    """A prediction of parts of matrices that are not gathered names the rule that it breaks."""
    said = predict("llama-3.1-8b", "dgx-h100", strategy=strategy, optimizer="muon", **JOB)
    assert "LEG753" in [violation.rule for violation in said.violations]


def test_muon_is_refused_where_nobody_tried_it() -> None:
    """Experts, adapters, DeepSpeed's own Muon, another framework's formulas, and a model of another kind."""
    for model, more in (
        ("mixtral-8x7b", {}),
        ("llama-3.1-8b", {"method": "lora"}),
        ("llama-3.1-8b", {"frontend": "deepspeed"}),
        ("vit-l-16", {"seq_len": None}),
    ):
        with pytest.raises(ImpossibleError):
            recommend(model, "dgx-h100:4", optimizer="muon", **JOB | more)
    with pytest.raises(ImpossibleError, match="muon"):
        predict("llama-3.1-8b", "dgx-h100", strategy="dp=8", optimizer="muon", framework="megatron-core", **JOB)


@pytest.mark.parametrize(
    ("model", "strategy", "more"),
    [
        ("llama-3.1-8b", "dp=32", {"method": "lora"}),
        ("llama-3.1-8b", "dp=16,tp=2", {"method": "qlora"}),
        ("moonlight-16b-a3b", "dp=32,ep=8", {}),
        ("dbrx", "dp=16,tp=2,ep=8", {"precision": "fp8"}),
    ],
)
def test_what_is_forbidden_beside_muon_has_bytes_all_the_same(model: str, strategy: str, more: dict[str, Any]) -> None:
    """Weights that are frozen, or lie on other ranks, take no momentum away from a prediction: none of its terms is below zero, and state is
    no more than under AdamW."""
    said, plain = (
        predict(model, "dgx-h100:4", strategy=strategy, optimizer=name, **JOB | more) for name in ("muon", "adamw")
    )
    assert "LEG751" in [violation.rule for violation in said.violations]
    state, usual = ({t.name: t.bytes for t in one.memory.worst.terms}.get("optimizer", 0) for one in (said, plain))
    assert min(term.bytes for stage in said.memory.stages for term in stage.terms) >= 0
    assert 0 < state <= usual
