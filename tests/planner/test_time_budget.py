"""A budget of time: not reached it leaves no trace, reached it is said, and what was found until then is sound."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from strategist import recommend
from strategist.ask import Given, complete
from strategist.document.write import dump
from strategist.errors import ImpossibleError
from strategist.planner.check import faults
from strategist.planner.exhaustive import recheck
from strategist.planner.paced import in_blocks
from strategist.planner.search import AT_ONCE, Found, Pace, search
from strategist.records import replace
from strategist.reports.brief import brief
from strategist.reports.lines import text_of
from strategist.reports.sizing import sizing_text
from strategist.reports.sweep import sweep_text
from strategist.sizing import Wanted, sized
from strategist.sweep import Grid, sweep
from tests.cli.harness import call

LARGE: dict[str, Any] = {"model": "llama-3.1-70b", "hardware": "dgx-h100:32", "top": 3}
"""More legal layouts than are tried at once."""
MEDIUM = {"model": "llama-2-7b", "hardware": "dgx-h100"}
BLOCK = 300


def medium() -> Found:
    """A search with some thousand layouts that fit."""
    return search(complete(Given(**MEDIUM)).question)


def columns_of(value: Any) -> dict[str, Any]:
    """Every column of step times by its name."""
    parts = {"exposed": value.exposed, "hidden": value.hidden, "again": value.again, "": {"step": value.step}}
    return {f"{part}.{name}": column for part, terms in parts.items() for name, column in terms.items()}


@pytest.mark.slow
def test_blocks_find_what_one_block_finds() -> None:
    """Weighed and timed in blocks, the same layouts fit, with the same bytes and nanoseconds, in the same order, and as many
    were weighed in full."""
    found = medium()
    tried = in_blocks(found.question.job, found.legal, Pace(), BLOCK)
    assert len(tried.weights.waiting) > 5 * BLOCK
    assert tried.untried == 0
    for ours, theirs in ((tried.fitting, found.fitting), (tried.weights.known, found.weights.known), (tried.weights.device, found.weights.device)):  # fmt: skip
        assert np.array_equal(ours, theirs)
    ours, theirs = columns_of(tried.times), columns_of(found.times)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_what_was_tried_in_time_is_as_it_was() -> None:
    """With no time at all one block is tried: each layout that fits is one of the whole search with its own bytes and
    nanoseconds, and tried and untried layouts are all of them."""
    found = medium()
    pace = Pace(0.0)
    tried = in_blocks(found.question.job, found.legal, pace, BLOCK)
    assert 0 < len(tried.fitting) < len(found.fitting)
    assert tried.untried + len(tried.legal) == len(found.legal)
    assert tried.untried > len(found.fitting) / 2
    whole = dict(zip(map(str, map(found.candidates.row, range(len(found.fitting)))), zip(found.times.step, found.device_bytes, strict=True), strict=True))  # fmt: skip
    device = tried.weights.device[tried.fitting]
    for row in range(len(tried.fitting)):
        assert whole[str(tried.candidates.row(row))] == (tried.times.step[row], device[row])


@pytest.mark.slow
def test_whoever_watches_sees_it_all_get_done() -> None:
    """What a watcher is told only grows, ends with everything, and names the best step that was found until then."""
    found = medium()
    seen: list[tuple[str, int, int, float | None]] = []
    in_blocks(found.question.job, found.legal, Pace(None, lambda *said: seen.append(said)), BLOCK)
    done = [entry[1] for entry in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][2] == len(in_blocks(found.question.job, found.legal, Pace(), BLOCK).weights.waiting)
    best = [entry[3] for entry in seen if entry[3] is not None]
    assert best == sorted(best, reverse=True)
    assert best[-1] == pytest.approx(found.times.step.min() / 1e9)


def test_without_time_the_search_goes_on_until_something_fits() -> None:
    """A search that has no time at all still finds a plan where there is one, even where most blocks hold none."""
    found = medium()
    fitting = np.zeros(len(found.legal), np.bool_)
    meshes = found.legal.mesh[found.fitting]
    fitting[found.fitting[[0, int(np.argmax(meshes != meshes[0]))]]] = True  # a block holds all layouts of a mesh
    job, rare = found.question.job, found.legal.where(fitting | found.misfits)
    assert len(in_blocks(job, rare, Pace(0.0), 1).fitting) == 1


@pytest.mark.slow
def test_a_budget_that_is_not_reached_leaves_no_trace() -> None:
    """The document of a search in blocks with time to spare is byte for byte that of a search without a budget, its account
    included."""
    plain = recommend(**LARGE, certificate=True)
    assert plain.certificate is not None
    assert plain.certificate.legal > AT_ONCE
    assert dump(recommend(**LARGE, certificate=True, time_budget=3600)) == dump(plain)
    assert plain.unfinished == ()


@pytest.mark.slow
def test_a_budget_that_was_reached_is_said() -> None:
    """A plan that ran out of time is sound, says what is untried in a field, a warning and its headline, carries no certificate
    even when asked for one, and cannot be proven to be the best."""
    plan = recommend(**LARGE, certificate=True, pareto=True, sensitivity=True, allow_idle=True, time_budget=0)
    assert faults(plan) == ()
    assert plan.unfinished
    assert (plan.certificate, plan.front) == (None, None)
    assert "W_TIME_BUDGET" in {hint.code for hint in plan.hints}
    report = text_of(brief(plan, 80))
    assert "BEST SO FAR" in report
    assert "RECOMMENDED" not in report
    with pytest.raises(ImpossibleError, match="ran out of time"):
        recheck(plan)


def test_a_plan_does_not_record_its_budget() -> None:
    """The question of a plan has no --time-budget, and a small search is never cut short by a budget it keeps."""
    words = ("plan", "--model", "llama-debug", "--hardware", "cpu:2", "--json")
    plain, timed = call(*words), call(*words, "--time-budget", "3600")
    assert plain.out == timed.out
    assert json.loads(timed.out)["unfinished"] == []


SMALL = Given(
    model="llama-3.2-1b", tokens=20 * 10**9, seq_len=2048, global_batch=32, nodes=4, forbid="offload,recompute,cp"
)


@pytest.mark.slow
def test_machines_are_looked_for_until_some_are_in_time() -> None:
    """Without time the first machines that are in time are still found, with the runs that they have anyway, and what was not looked at
    is said; with time to spare nothing is left out."""
    wanted = Wanted(given=SMALL, deadline_s=86400.0, gpus=("h100-sxm", "l40s"))
    plain = sized(wanted)
    short, long = (sized(replace(wanted, given=replace(SMALL, time_budget=budget))) for budget in (0.0, 3600.0))
    assert long == plain
    assert plain.unfinished == ()
    assert any("l40s" in words for words in short.unfinished)
    assert set(short.looked_at) < set(plain.looked_at)
    assert short.least.in_time
    assert "time budget ran out" in " ".join(text_of(sizing_text(short, 80)).split())


def test_a_sweep_without_time_has_one_cell() -> None:
    """The first cell is always looked at; all others are marked, and not taken for cells where nothing fits."""
    grid = Grid(given=replace(SMALL, model=None, nodes=None), model_sizes=("1B",), gpus=("h100-sxm",), nodes=(1, 2))
    plain = sweep(grid)
    short, long = (sweep(replace(grid, given=replace(grid.given, time_budget=budget))) for budget in (0.0, 3600.0))
    assert long == plain
    assert [cell.unfinished for cell in plain.cells] == [False, False]
    assert short.cells[0].family is not None
    assert (short.cells[1].family, short.cells[1].unfinished) == (None, True)
    assert "?: the time budget ran out" in text_of(sweep_text(short, 80))


@pytest.mark.parametrize("said", ["-1", "soon", "1e99", ""])
def test_a_budget_is_a_number_of_seconds(said: str) -> None:
    """Anything but a plain number from 0 is refused by name."""
    ran = call("plan", "--model", "llama-debug", "--hardware", "cpu:2", "--time-budget", said, "--json")
    assert ran.code == 2
    assert json.loads(ran.out)["error"]["flag"] == "--time-budget"
