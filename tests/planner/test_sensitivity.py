"""What would change the choice: every border that a plan names was planned on both sides, and planning there again says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import strategist.planner.sensitivity as module
from strategist import Plan, recommend
from strategist.ask import Given, complete
from strategist.document.load import load_plan
from strategist.facts.hardware import Cluster, Link
from strategist.facts.job import Job
from strategist.planner.recommend import choice
from strategist.planner.search import Question, search
from strategist.planner.sensitivity import OCTAVE, REACH, UNNAMED, Answer, Assumption, assumptions, factor_of
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
@pytest.mark.parametrize(
    "question", [SMALL, pytest.param(QUESTIONS[1], marks=pytest.mark.nightly), *QUESTIONS[2:]], ids=str
)
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
    job = complete(Given(model="llama-2-7b", gpu="h100", nodes=2)).question.job
    changed = next(assumed for assumed in assumptions(job) if assumed.flag == "--intra-bw").changed(0.5)
    assert changed == replace(job, cluster=scaled(job.cluster, 0.5))


def named(**asked: Any) -> tuple[Job, dict[str, Assumption]]:
    """A job, and what it rests on by its flag, or by its name where no flag says it."""
    job = complete(Given(seq_len=4096, global_batch=64, **asked)).question.job
    return job, {assumed.flag or assumed.name: assumed for assumed in assumptions(job)}


def test_every_factor_moves_what_it_is_called() -> None:
    """Twice a rate, a length or a memory is twice the value that the assumption states, in the job's own words; matrix products at twice the
    rate take half the time."""
    job, found = named(model="mixtral-8x7b", gpu="a100-sxm-40gb", gpus_per_node=8, nodes=2)
    factors = 0.5, 2.0
    for factor in factors:
        jobs = {name: assumed.changed(factor) for name, assumed in found.items() if name != "--expert-imbalance"}
        says = {name: jobs[name] or job for name in jobs}
        assert says["--headroom"].usable_bytes == pytest.approx(found["--headroom"].value * factor, abs=1)
        assert says["--inter-bw"].cluster.slowest.inter_Bps == found["--inter-bw"].value * factor
        assert says["--intra-bw"].cluster.slowest.intra_Bps == found["--intra-bw"].value * factor
        assert says["--seq-len"].workload.seq_len == found["--seq-len"].value * factor == 4096 * factor
        assert says["--global-batch"].workload.global_batch == found["--global-batch"].value * factor == 64 * factor
        assert says["--calibration"].on_parts.get("matmul", 1.0) == job.on_parts.get("matmul", 1.0) / factor
        assert says["overlap"].overlaps == job.overlaps * factor
    assert found["--seq-len"].changed(1 / 3) is found["--global-batch"].changed(1 / 128) is None


def test_links_one_by_one_are_moved_as_the_network_that_they_are() -> None:
    """Links between named nodes and switches are the network between nodes; those inside a node stay."""
    job, _ = named(model="gpt2", gpu="h100", nodes=2)
    links = tuple(Link(a=name, b="switch", kind="infiniband", Bps=50e9) for name in ("one", "two"))
    job = replace(job, cluster=replace(job.cluster, links=links, switches=("switch",)))
    changed = next(assumed for assumed in assumptions(job) if assumed.flag == "--inter-bw").changed(0.5)
    assert changed is not None
    assert [link.Bps for link in changed.cluster.links] == [25e9, 25e9]
    assert changed.cluster.slowest.intra_Bps == job.cluster.slowest.intra_Bps


def test_figures_of_described_machines_are_said_by_a_file() -> None:
    """Beside --hardware no flag may state a link, so that none is named; beside --gpu each has its flag."""
    for said, inside, between in (({"hardware": "dgx-h100:2"}, *["--hardware FILE"] * 2), ({"gpu": "h100", "nodes": 2}, "--intra-bw", "--inter-bw")):  # fmt: skip
        job = complete(Given(model="llama-2-7b", **said)).question.job  # type: ignore[arg-type]
        flags = {assumed.name: assumed.flag for assumed in assumptions(job)}
        assert (flags["link inside a node (nvswitch)"], flags["network between nodes"]) == (inside, between)


@pytest.mark.parametrize(("factor", "exists"), [(0.99, False), (1.0, True), (3.99, True), (4.0, True), (4.01, False)])
def test_experts_are_imbalanced_by_no_more_than_tokens_can_choose(factor: float, exists: bool) -> None:
    """The busiest of eight experts, of which each token takes two, has at most four times its share, and at least that."""
    _, found = named(model="mixtral-8x7b", hardware="dgx-h100")
    assert found["--expert-imbalance"].value == 1.0
    assert (found["--expert-imbalance"].changed(factor) is not None) is exists


@pytest.mark.parametrize("border", [0.26, 0.7, 0.99, 1.02, 1.5, 2.83, 3.9])
def test_a_border_is_found_to_one_step(border: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the choice changes at some factor, the turn is the first step behind it and what holds the last before it, on that side alone; what
    is told is the layout at the turn itself."""
    job, found = named(model="gpt2", hardware="ws-4x-4090")
    memory = found["--headroom"]

    def choice_of(asked: Question, _policy: object) -> Answer:
        factor = asked.job.usable_bytes / job.usable_bytes
        is_behind = factor < border if border < 1 else factor > border
        return Answer("family", f"{factor:.4f}", factor, "other" if is_behind else "ours")

    monkeypatch.setattr(module, "_answer", choice_of)
    question = Question(job=job)
    usual = choice_of(question, "hf")
    turns = [module._turn(question, "hf", memory, usual, side) for side in (-1, 1)]
    turn = turns[border > 1]
    assert turn is not None
    assert turns[border < 1] is None
    assert min(turn.factor, turn.holds_at) < border < max(turn.factor, turn.holds_at)
    assert abs(turn.factor - 1) > abs(turn.holds_at - 1)
    assert max(turn.factor / turn.holds_at, turn.holds_at / turn.factor) == pytest.approx(factor_of(1))
    assert turn.layout == f"{turn.factor:.4f}"
    assert turn.value == pytest.approx(job.usable_bytes * turn.factor)


def test_borders_out_of_reach_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said of what changes the choice beyond four times what is assumed, or below a quarter of it."""
    job, found = named(model="gpt2", hardware="ws-4x-4090")
    monkeypatch.setattr(
        module, "_answer", lambda asked, _policy: Answer(identity=str(1e9 < asked.job.usable_bytes < 9e99))
    )
    for side in (-1, 1):
        seen = module._turn(Question(job=job), "hf", found["--headroom"], Answer(identity="True"), side)
        assert seen is None
    assert factor_of(REACH * OCTAVE) == 4.0


def test_memory_is_said_by_a_flag_that_takes_the_value() -> None:
    """A headroom leaves between half a device and all of it; less and more are devices of another size."""
    job = complete(Given(model="llama-3.2-1b", gpu="h100")).question.job
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
