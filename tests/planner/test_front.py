"""The front of time, memory and cost: nothing that fits beats one of its rows, and everything that fits is beaten by one."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategist import Plan, recommend
from strategist.ask import Given, complete
from strategist.facts.hardware import with_gpus
from strategist.planner.front import _point, _row, undominated
from strategist.planner.predict import filled
from strategist.planner.search import Found, search
from strategist.planner.situation import one
from strategist.records import replace
from strategist.reports.front import front_lines
from strategist.reports.lines import text_of
from tests.cli.harness import call

QUESTIONS: tuple[dict[str, Any], ...] = (
    {"model": "llama-debug", "hardware": "cpu:4"},
    {"model": "llama-2-7b", "hardware": "dgx-h100"},
    {"model": "llama-3.2-1b", "hardware": "dgx-h100:4", "global_batch": 64, "forbid": "recompute,cp"},
    {"model": "olmoe-1b-7b", "hardware": "dgx-h100", "global_batch": 8, "forbid": "offload,pp"},
    {"model": "gpt2", "hardware": "ws-1x-4090"},
    {"model": "llama-3.1-8b", "hardware": "dgx-h100", "pin": "tp=4"},
)


def planned(question: dict[str, Any]) -> Plan:
    """The plan with its front."""
    return recommend(**question, pareto=True)


def points_of(question: dict[str, Any], gpus: int) -> Any:
    """(step ns, peak bytes, device-ns) of everything that fits on a part of the machines, searched on its own, (N, 3)."""
    asked = complete(Given(**question)).question
    cluster = asked.job.cluster
    group = cluster.groups[0]
    if cluster.nodes > 1:
        part = replace(cluster, groups=(replace(group, count=gpus // group.node.gpus),))
    else:
        node = group.node if gpus == group.node.gpus else with_gpus(group.node, gpus)
        part = replace(cluster, groups=(replace(group, node=node),))
    found = search(replace(asked, job=replace(asked.job, cluster=part)))
    step = found.times.step
    return np.stack([step, found.device_bytes, step * gpus], axis=1)


def test_a_row_counts_every_device() -> None:
    """Cost is what all devices of all nodes take: a step of 9 s on 32 of them is 288 device-seconds, at three an hour a quarter of one."""
    asked = complete(Given(model="gpt2", hardware="dgx-h100:4", price_per_gpu_hour=3.125))
    times = SimpleNamespace(step=np.array([9 * 10**9]))
    alone = {"candidates": one(**filled(asked.question.job, {})), "device_bytes": np.array([7]), "families": {}}
    found = cast(Found, SimpleNamespace(question=asked.question, times=times, **alone))
    assert _point(found, 0) == (9 * 10**9, 7, 288 * 10**9)
    row = _row(found, 0, asked.request)
    assert (row.gpus, row.nodes, row.step_ns, row.peak_bytes) == (32, 4, 9 * 10**9, 7)
    assert row.gpu_hours_per_step == pytest.approx(0.08)
    assert row.cost_per_step == pytest.approx(0.25)


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_the_front_is_what_nothing_beats(question: dict[str, Any]) -> None:
    """No row is beaten by a layout that fits on any size that was searched, and each such layout is beaten by a row or
    equal to it; the sizes end with all devices, and the number that fits is the number that was looked at."""
    plan = planned(question)
    front = plan.front
    assert front is not None
    assert front.sizes[-1] == plan.mesh.world
    everything = np.concatenate([points_of(question, gpus) for gpus in front.sizes])
    assert len(everything) == front.fitting
    rows = np.array([(row.step_ns, row.peak_bytes, row.step_ns * row.gpus) for row in front.rows])
    for row in rows:
        beaten = (everything <= row).all(axis=1) & (everything < row).any(axis=1)
        assert not beaten.any()
    covered = np.zeros(len(everything), dtype=bool)
    for row in rows:
        covered |= (row <= everything).all(axis=1)
    assert covered.all()


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS[:4], ids=str)
def test_every_row_is_a_layout_that_can_be_asked_for(question: dict[str, Any]) -> None:
    """The rows are in order of time, each a layout of its own, and the first of the whole machine is what the time model
    would choose."""
    front = planned(question).front
    assert front is not None
    assert [row.step_ns for row in front.rows] == sorted(row.step_ns for row in front.rows)
    assert len({(row.gpus, row.layout) for row in front.rows}) == len(front.rows)
    fastest = recommend(**question, policy="fastest")
    whole = next(row for row in front.rows if row.gpus == fastest.mesh.world)
    assert whole.step_ns == fastest.time.step_ns


def test_money_follows_the_price() -> None:
    """A price multiplies the device-hours of each row; without one there is no money."""
    front, bare = (planned({**QUESTIONS[1], "price_per_gpu_hour": p}).front for p in (3.0, None))
    assert front is not None
    assert bare is not None
    assert [row.cost_per_step for row in front.rows] == [pytest.approx(3 * r.gpu_hours_per_step) for r in front.rows]
    assert {row.cost_per_step for row in bare.rows} == {None}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=20))
def test_undominated_by_definition(points: list[tuple[int, ...]]) -> None:
    """A point is kept exactly when no other is at most as large everywhere and smaller somewhere; of equals one is kept."""
    array = np.array(points)
    kept = {points[row] for row in undominated(array)}
    wanted = {p for p in points if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in points)}
    assert kept == wanted
    assert len(undominated(array)) == len(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [20, 50, 80, 160])
def test_the_picture_shows_every_row(columns: int) -> None:
    """Every row has its line of the table under a letter of its own, and nothing is wider than the terminal."""
    front = planned(QUESTIONS[1]).front
    assert front is not None
    text = text_of(front_lines(front, "GPU", columns))
    assert max(map(len, text.splitlines())) <= columns
    letters = re.findall(r"^  ([a-z]) +\d+ GPU", text, re.MULTILINE)
    assert letters == [chr(ord("a") + number) for number in range(len(front.rows))]


def test_the_front_is_shown_when_asked_for() -> None:
    """`plan --pareto` prints it, in the document too; without the flag the plan has none."""
    words = ("plan", "--model", "llama-debug", "--hardware", "cpu:2")
    assert "beaten by none" in " ".join(call(*words, "--pareto").out.split())
    assert call(*words, "--json").document["front"] is None
    assert call(*words, "--json", "--pareto").document["front"]["rows"]
