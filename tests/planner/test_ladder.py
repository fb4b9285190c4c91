"""The smallest machines that would do the same job, rung by rung, whatever a search finds on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import strategist.planner.ladder as module
from strategist.ask import Given, complete
from strategist.catalog import rows
from strategist.planner.ladder import MAX_RUNGS, smallest_machines
from strategist.planner.predict import filled
from strategist.planner.search import Question
from strategist.planner.situation import one
from strategist.space.candidates import Candidates


def searched(monkeypatch: pytest.MonkeyPatch, least: int) -> list[Question]:
    """The questions of a ladder on which everything fits that has at least so many devices, and takes 8 s over their number."""
    asked: list[Question] = []

    def search(question: Question, **_: Any) -> Any:
        asked.append(question)
        world = question.job.cluster.world
        alone: Candidates = one(**filled(question.job, {}))
        return SimpleNamespace(
            candidates=alone,
            device_bytes=np.array([world]),
            families={},
            best_of=lambda: 0 if world >= least else None,
            step_seconds=lambda _row: 8.0 / world,
        )

    monkeypatch.setattr(module, "search", search)
    return asked


@pytest.mark.parametrize(
    ("hardware", "least"), [("dgx-h100", 1), ("dgx-h100", 2), ("ws-4x-4090", 1), ("ws-4x-4090", 4), ("ws-1x-4090", 1)]
)
def test_rungs_are_smaller_machines_on_which_something_fits(
    hardware: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the catalogue's with fewer devices than there are, without the pins of these, and how much slower each is."""
    asked = searched(monkeypatch, least)
    question = complete(Given(model="gpt2", hardware=hardware, global_batch=8, pin="micro_batch=1")).question
    world = question.job.cluster.world
    found = smallest_machines(question, 8.0 / world)
    smaller = [row["gpus"] for row in rows("ladder") if row["gpus"] < world]
    assert [int(rung.peak_bytes) for rung in found] == [gpus for gpus in smaller if gpus >= least][:MAX_RUNGS]
    assert [rung.relative_time for rung in found] == [pytest.approx(world / rung.peak_bytes) for rung in found]
    assert all(not one.pins and one.job.cluster.world < world for one in asked)
    assert question.pins
