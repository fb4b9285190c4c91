"""Front ends: a plan for a target of `emit` is one that the target writes files for, and nothing that it could say was left out."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from strategist import Plan, emit, recommend
from strategist.ask import Given, complete, frontend_named
from strategist.catalog import rows
from strategist.emitters import EMITTERS, find_emitter
from strategist.errors import ImpossibleError, NoPlanError
from strategist.frontend import Target
from strategist.planner.exhaustive import recheck
from strategist.planner.predict import layout_of
from strategist.planner.search import limits_of
from strategist.planner.write import mesh_of, strategy_of
from strategist.records import replace
from strategist.space.enumerate import enumerate_candidates
from tests.cli.harness import call
from tests.planner.properties import Properties

PROPERTIES = Properties()

TARGETS = tuple(emitter.name for emitter in EMITTERS)
QUESTIONS: tuple[dict[str, Any], ...] = (
    {"model": "gpt2-medium", "hardware": "ws-2x-4090", "seq_len": 1024, "global_batch": 16},
    {"model": "llama-3.2-1b", "hardware": "dgx-h100", "global_batch": 64},
    {"model": "llama-3.1-8b", "hardware": "dgx-h100", "global_batch": 64},
    {"model": "llama-3.1-8b", "hardware": "dgx-h100", "global_batch": 64, "precision": "fp16"},
    {"model": "llama-3.1-8b", "hardware": "dgx-h100:2", "global_batch": 64, "seq_len": 16384},
    {"model": "llama-3.1-70b", "hardware": "dgx-h100:4", "global_batch": 64, "optimizer": "sgd"},
    {"model": "mixtral-8x7b", "hardware": "dgx-h100:2", "global_batch": 64},
    {"model": "deepseek-moe-16b", "hardware": "dgx-h100:2", "global_batch": 64, "policy": "fastest"},
    {"model": "llama-debug", "hardware": "cpu:4", "global_batch": 16},
    {"model": "gpt2-medium", "hardware": "ws-2x-4090", "seq_len": 1024, "global_batch": 16, "pin": "replicas=threads"},
    {"model": "llama-3.2-1b", "hardware": "dgx-h100", "global_batch": 64, "pin": "compression=powersgd"},
    {"model": "llama-3.1-8b", "hardware": "dgx-h100", "global_batch": 64, "pin": "loss=chunked"},
    {"model": "llama-3.1-8b", "hardware": "ws-4x-4090", "global_batch": 64, "method": "lora"},
    {"model": "bert-large-uncased", "hardware": "mi300x-platform", "seq_len": 512, "global_batch": 64},
)
"""Dense models, experts, adapters, an encoder, several precisions, on one node, several and CPUs."""

questions = st.sampled_from(range(len(QUESTIONS)))
targets = st.sampled_from(TARGETS)


@cache
def planned(number: int, frontend: str) -> Plan | ImpossibleError:
    """What comes of a question for a front end."""
    try:
        return recommend(**QUESTIONS[number], frontend=frontend)
    except ImpossibleError as refusal:
        return refusal


def test_every_target_is_a_front_end() -> None:
    """The catalogue has each target under its name with the engine whose rules count; no other front end is a target."""
    engines = {row["name"]: row["engine"] for row in rows("frontends")}
    assert engines == {"any": "any", "strategist": "strategist"} | {e.name: e.engine for e in EMITTERS}
    assert [name for name in engines if frontend_named(name) is not None] == list(TARGETS)


@pytest.mark.slow
@PROPERTIES.holds(15, questions, targets)
def test_a_plan_for_a_target_is_emitted_by_it(number: int, target: str) -> None:
    """Whatever is planned for a target is written by it without a refusal, and where our executor runs it, is not faster than what the
    same policy may choose of everything under `fastest`: others' kernels may be faster. Where nothing is left, the error says why and
    has exit code 3."""
    plan = planned(number, target)
    if isinstance(plan, Plan):
        assert emit(plan, target)
        free = plan.unrestricted
        assert free is not None
        relative = 1 if free.relative_time is None else free.relative_time
        assert free.step_s == pytest.approx(relative * plan.time.step.value, rel=1e-12)
        is_ours = plan.strategy.profile == "strategist"
        assert is_ours or find_emitter(target).engine != "strategist"
        assert plan.request.policy == "hf" or not is_ours or free.step_s <= plan.time.step.value
    else:
        assert plan.exit_code == 3
        assert plan.hint


@PROPERTIES.holds(12, questions, targets, st.integers(0, 2**31))
def test_a_row_is_shown_as_the_plan_it_would_be(number: int, target: str, seed: int) -> None:
    """What a target says of a row of columns is what it says of the Plan with that layout, sentence for sentence; and a row among
    others, of which some are not looked at, has the answer that it has alone."""
    asked = complete(Given(**QUESTIONS[number])).question
    everything = enumerate_candidates(limits_of(asked))
    row = int(np.random.default_rng(seed).integers(len(everything)))
    alone, base = everything.where(np.array([row])), planned(number, "any")
    assert isinstance(base, Plan)
    words = alone.row(0)
    plan = replace(base, mesh=mesh_of(words), strategy=strategy_of(asked.job, words))
    obstacles = tuple(find_emitter(target).obstacles(plan))
    assert Target(target).obstacles(asked.job, alone, 0) == obstacles
    assert bool(Target(target).says(asked.job, everything)[row]) == (not obstacles)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["megatron", "torchtitan", "accelerate", "torchrun"])
def test_what_is_given_up_is_said(target: str) -> None:
    """The plan names the layout that would be chosen without the front end, as that question answers it, how much slower its own
    is, and what the target cannot say of it; the report prints it."""
    question = {"model": "mixtral-8x7b", "hardware": "dgx-h100:2", "global_batch": 64}
    plan, free = recommend(**question, frontend=target), recommend(**question)
    assert plan.unrestricted is not None
    assert plan.unrestricted.step_s == free.time.step.value
    assert plan.unrestricted.layout == layout_of(free)
    same = plan.unrestricted.layout == layout_of(plan)
    assert ("cannot be said" in plan.unrestricted.sentence) == (not same)
    assert free.unrestricted is None
    printed = call("plan", *words_of(question), "--frontend", target)
    assert f"without --frontend {target}" in " ".join(printed.out.split())


def words_of(question: dict[str, Any]) -> list[str]:
    """A question as flags."""
    return [word for name, value in question.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_what_a_target_cannot_say_at_all_is_refused_with_reasons() -> None:
    """Exit 3, a chain of what is in the way of the nearest layout, and changes that were planned again."""
    asked = ("--model", "deepseek-v2-lite", "--hardware", "dgx-h100", "--frontend", "megatron")
    answer = call("plan", *asked, "--json")
    error = json.loads(answer.out)["error"]
    assert (answer.code, error["code"], error["flag"], error["value"]) == (3, "E_NO_PLAN", "--frontend", "megatron")
    assert error["because"][0].startswith("because the nearest that megatron could say is ")
    assert any("stacks of attention" in link for link in error["because"])
    assert error["fixes"][0].startswith("without --frontend megatron    fits: ")


def test_a_target_that_has_one_part_behind_the_other_is_no_way_to_train_both_side_by_side() -> None:
    """Megatron-LM's arguments cannot say GPT-NeoX's layers, which have as many norms and matrices as those of GPT-3."""
    asked = ("--hardware", "dgx-h100", "--frontend", "megatron", "--json")
    assert call("plan", "--model", "megatron-gpt-1.7b", *asked).code == 0
    answer = call("plan", "--model", "pythia-1b", *asked)
    assert answer.code == 3
    error = json.loads(answer.out)["error"]
    assert any("stacks of attention" in link for link in error["because"])


@pytest.mark.slow
def test_what_fits_nowhere_names_the_front_end_too() -> None:
    """Where the target can say layouts and none fits, the chain counts those that it cannot say."""
    with pytest.raises(NoPlanError) as refused:
        recommend("llama-3.1-70b", "dgx-h100", frontend="byteps")
    assert any("byteps cannot say" in link for link in refused.value.chain)


def test_a_certificate_counts_what_was_not_said() -> None:
    """The account of a search for a target adds up, and trying every layout alone finds the same."""
    question = {"model": "llama-debug", "hardware": "cpu:2", "global_batch": 2, "forbid": "offload,recompute"}
    plan = recommend(**question, frontend="fabric", certificate=True)
    found = recheck(plan, frontend=frontend_named("fabric"))
    assert [claim.sentence for claim in found.claims if not claim.holds] == []
    assert plan.certificate is not None
    assert {each.rule: each.count for each in plan.certificate.refused}["frontend"] > 0
    assert found.refused == plan.certificate.refused


def test_a_given_layout_is_judged_by_the_target_too() -> None:
    """`predict --frontend` names what the target cannot say beside the rules that are broken."""
    layout = "dp=16,ep=8,zero=3,recompute=selective"
    asked = ("--model", "mixtral-8x7b", "--hardware", "dgx-h100:2", "--strategy", layout)
    answers = {
        name: json.loads(call("predict", *asked, "--frontend", name, "--json").out) for name in ("any", "megatron")
    }
    assert [fault["rule"] for fault in answers["any"]["violations"]] == []
    assert [fault["rule"] for fault in answers["megatron"]["violations"]] == ["frontend"]
    assert not answers["megatron"]["legal"]


@pytest.mark.slow
def test_targets_of_our_executor_are_limited_by_its_rules() -> None:
    """A front end that our executor serves has layouts that it can run: no plan for it carries W_NOT_EXECUTABLE."""
    for number in range(len(QUESTIONS)):
        plan = planned(number, "torchrun")
        assert not isinstance(plan, Plan) or "W_NOT_EXECUTABLE" not in {hint.code for hint in plan.hints}


@pytest.mark.nightly
@pytest.mark.parametrize("check", PROPERTIES.at_length, ids=lambda check: check.__name__)
def test_at_length(check: Any) -> None:
    """Both properties, over hundreds of new examples."""
    check()
