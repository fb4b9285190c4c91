"""What would change the choice: every border that a plan names was planned on both sides, and planning there again says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strategist import Plan, recommend
from strategist.ask import Given, complete
from strategist.document.load import load_plan
from strategist.facts.hardware import Cluster
from strategist.planner.recommend import choice
from strategist.planner.search import Question, search
from strategist.planner.sensitivity import OCTAVE, UNNAMED, assumptions, factor_of
from strategist.records import replace
from strategist.reports.front import sensitivity_lines
from strategist.reports.lines import text_of
from tests.cli.harness import call

SMALL = {"model": "llama-debug", "hardware": "cpu:4", "global_batch": 8}
QUESTIONS: tuple[dict[str, Any], ...] = (
    SMALL,
    {"model": "llama-3.1-8b", "hardware": "dgx-h100", "global_batch": 16, "forbid": "offload,cp"},
    {
        "model": "llama-2-13b",
        "hardware": "aws-p4d.24xlarge:2",
        "global_batch": 16,
        "policy": "fastest",
        "forbid": "cp,recompute",
    },
)


def planned(question: dict[str, Any]) -> Plan:
    """The plan with what would change it."""
    return recommend(**question, sensitivity=True)


def chosen(question: Question, policy: Any) -> tuple[str, ...] | None:
    """The layout that a policy takes, whatever its micro-batch; None where nothing fits."""
    found = search(question)
    if not len(found.fitting):
        return None
    row = found.candidates.row(choice(found, policy).row)
    return tuple(f"{key}={value}" for key, value in row.items() if key not in UNNAMED)


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_the_choice_changes_at_every_turn_and_not_before(question: dict[str, Any]) -> None:
    """At the factor of each turn another layout is chosen than the plan's, one step nearer to 1 it is the plan's; assumptions
    that are called steady leave the choice as it is at both ends."""
    plan = planned(question)
    found = plan.sensitivity
    assert found is not None
    asked = complete(Given(**question)).question
    ours = chosen(asked, plan.decision.policy)
    named = {assumed.name: assumed for assumed in assumptions(asked.job)}
    assert {turn.assumption for turn in found.turns} | set(found.steady) == set(named)
    for turn in found.turns:
        changed = named[turn.assumption].changed
        there, before = changed(turn.factor), changed(turn.holds_at)
        assert there is not None
        assert before is not None
        assert chosen(replace(asked, job=there), plan.decision.policy) != ours
        assert chosen(replace(asked, job=before), plan.decision.policy) == ours
        nearest = factor_of(OCTAVE) if named[turn.assumption].is_whole else factor_of(1)
        assert max(turn.factor / turn.holds_at, turn.holds_at / turn.factor) == pytest.approx(nearest)
    for name in found.steady:
        for factor in (found.low, found.high):
            job = named[name].changed(factor)
            assert job is None or chosen(replace(asked, job=job), plan.decision.policy) == ours


def scaled(cluster: Cluster, factor: float) -> Cluster:
    """The machines with other links inside their nodes."""
    (group,) = cluster.groups
    node = replace(group.node, intra_Bps=group.node.intra_Bps * factor, pair_Bps=group.node.pair_Bps * factor)
    return replace(cluster, groups=(replace(group, node=node),))


def test_links_are_those_inside_a_node() -> None:
    """The factor of links inside a node moves the rates of a device inside its node, and nothing else of the job."""
    job = complete(Given(model="llama-2-7b", hardware="dgx-h100:2")).question.job
    changed = next(assumed for assumed in assumptions(job) if assumed.flag == "--intra-bw").changed(0.5)
    assert changed == replace(job, cluster=scaled(job.cluster, 0.5))


@pytest.mark.slow
def test_memory_is_said_by_a_flag_that_takes_the_value() -> None:
    """A headroom leaves between half a device and all of it; less and more are devices of another size."""
    job = complete(Given(model="llama-3.2-1b", hardware="dgx-h100")).question.job
    memory = next(one for one in assumptions(job) if one.name == "usable memory per device")
    held = job.cluster.smallest.memory_bytes
    assert [memory.says(share * held) for share in (0.49, 0.5, 0.95, 1.0, 1.01)] == [
        "--gpu-memory", "--headroom", "--headroom", "--headroom", "--gpu-memory",
    ]  # fmt: skip
    assert all(one.says(4 * one.value) == one.flag for one in assumptions(job) if one.name != memory.name)


@pytest.mark.slow
def test_a_single_device_has_neither_links_nor_overlap() -> None:
    """On one device nothing is said of links and overlap."""
    plan = recommend("llama-debug", "cpu:1", global_batch=4, sensitivity=True)
    assert plan.sensitivity is not None
    said = {turn.assumption for turn in plan.sensitivity.turns} | set(plan.sensitivity.steady)
    assert not any("link" in name or "network" in name or name == "overlap" for name in said)


@pytest.mark.slow
def test_only_who_asks_is_told(tmp_path: Path) -> None:
    """A plan has a sensitivity when it was asked for; it is written, read back, and shown by `explain` as in the document."""
    path = tmp_path / "plan.json"
    words = ("--model", "llama-debug", "--hardware", "cpu:4", "--global-batch", "8")
    assert call("plan", *words, "--sensitivity", "--out", str(path), "--quiet").code == 0
    plan = load_plan(str(path))
    assert plan.sensitivity == planned(SMALL).sensitivity
    assert plan.sensitivity is not None
    shown = json.loads(call("explain", str(path), "--json").out)["sensitivity"]
    assert [turn["sentence"] for turn in shown["turns"]] == [turn.sentence for turn in plan.sensitivity.turns]
    assert text_of(sensitivity_lines(plan.sensitivity, 80)) in call("explain", str(path)).out
    assert json.loads(call("plan", *words, "--json").out)["sensitivity"] is None
