"""Intervals of one's own runs: what they hold, and what a plan makes of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from strategist import predict, recommend
from strategist.accuracy.bounds import NOISE, Error, bounds, near_runs
from strategist.accuracy.calibrate import calibrate
from strategist.accuracy.judge import judge
from strategist.document.load import load_calibration
from strategist.document.plan import Plan
from strategist.document.write import as_document, digest, dump
from strategist.errors import InputError
from strategist.facts.calibration import shipped_factors
from strategist.planner.predict import predict_plan
from strategist.planner.write import ANYWHERE, Place
from strategist.timing.intervals import distance_of
from tests.accuracy.test_calibrate import measured
from tests.cli.harness import call, runs_file

HERE = Place("9.0")


def test_one_more_run_lies_inside_as_often_as_is_said() -> None:
    """Of few runs whose errors are drawn alike, the bounds hold at least 80 % of further ones; those of many runs would hold fewer."""
    drawn = np.random.default_rng(7)
    inside: dict[bool, float] = {}
    for of_few in (True, False):
        hits = []
        for _ in range(400):
            own = drawn.normal(0.0, 0.4, 11)
            known = [Error(str(n), (HERE,), float(value)) for n, value in enumerate(own[:10])]
            low, high = bounds(known, HERE, 3, 10, of_few=of_few) or (0.0, 0.0)
            hits.append(low <= own[10] <= high)
        inside[of_few] = float(np.mean(hits))
    assert inside[False] < inside[True]
    assert inside[True] > 0.78


def test_too_few_runs_or_groups_have_no_bounds() -> None:
    """Nine runs, or ten of two groups, say nothing; repeats alone are no closer than the noise of a repeat."""
    alike = [Error(str(n), (HERE,), 0.0) for n in range(10)]
    assert bounds(alike[:9], HERE, 3, 10) is None
    assert bounds([one._replace(source=str(n % 2)) for n, one in enumerate(alike)], HERE, 3, 10) is None
    assert bounds(alike, ANYWHERE, 3, 10) == (-NOISE, NOISE)
    assert [(near.chip, near.runs, near.low) for near in near_runs(alike, 3, 10)] == [("9.0", 10, pytest.approx(math.exp(-NOISE), abs=1e-3))]  # fmt: skip


def written(folder: Path, off: tuple[float, ...]) -> str:
    """A calibration by the command line, from runs that took so many times, in turn, what the formulas and the shipped factors say."""
    plain = judge([one.run for one in measured({})], shipped_factors())
    rows = [{**one.run, "step_time_s": repr(off[n % len(off)] * one.step_s)} for n, one in enumerate(plain)]
    path = folder / "calibration.json"
    told = call("calibrate", runs_file(folder, *rows), "--out", str(path), "--force")
    assert told.code == 0
    assert "intervals of a step, from runs left out" in told.out
    return str(path)


ASKED = {"model": "llama-3-8b", "hardware": "dgx-h100"}


@pytest.mark.slow
def test_intervals_are_those_of_ones_own_runs(tmp_path: Path) -> None:
    """Steady runs narrow the interval of a plan and erratic ones widen it; the plan keeps it in its file, and other devices keep theirs."""

    def width(plan: Plan) -> float:
        return plan.time.step.high / plan.time.step.low

    usual = recommend(**ASKED)
    assert usual.near == () and "near" not in as_document(usual)
    steady, erratic = (
        recommend(**ASKED, calibration=written(tmp_path, off)) for off in ((1.0,), (0.6, 1.6, 1.0, 0.8, 1.3))
    )
    assert width(steady) < width(usual) < width(erratic)
    assert steady.time.step.high / steady.time.step.value == pytest.approx(math.exp(NOISE), abs=2e-3)
    for plan in (steady, erratic):
        assert predict_plan(plan).time == plan.time
        assert digest(plan) != digest(usual)
    elsewhere = {"model": "llama-3-8b", "hardware": "dgx-a100-80gb", "strategy": "dp=8,zero=3"}
    theirs = predict(**elsewhere, calibration=str(tmp_path / "calibration.json")).time.step
    others = predict(**elsewhere).time.step
    # factors of the framework move what its steps elsewhere are made of a little, and the width with it
    assert theirs.high / theirs.value == pytest.approx(others.high / others.value, rel=0.01)
    assert theirs.high / theirs.low < 0.9 * width(erratic)


@pytest.mark.slow
def test_accuracy_counts_runs_inside_ones_own_intervals(tmp_path: Path) -> None:
    """The bounds of every row are the calibration's."""
    path = written(tmp_path, (0.6, 1.6, 1.0, 0.8, 1.3))
    known = {(near.width, near.framework): near for near in load_calibration(path).near}
    row = call("accuracy", str(tmp_path / "runs.csv"), "--calibration", path, "--json").document["rows"][0]
    assert (row["low_s"] / row["predicted_step_s"], row["high_s"] / row["predicted_step_s"]) in [
        (pytest.approx(near.low), pytest.approx(near.high)) for near in known.values()
    ]
    assert "of 24 runs lie inside" in call("accuracy", str(tmp_path / "runs.csv"), "--calibration", path).out


@pytest.mark.slow
def test_an_interval_that_does_not_hold_its_value_is_refused(tmp_path: Path) -> None:
    """Bounds that a hand wrote around something else are no calibration."""
    document = json.loads(dump(calibrate(measured({"matmul": 1.2}))))
    document["near"] = [{"chip": "9.0", "framework": "", "width": "", "low": 1.1, "high": 1.2, "runs": 10}]
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_calibration(str(path))
    assert caught.value.code == "RANGE"


@pytest.mark.parametrize(("framework", "is_known"), [("strategist", True), ("nemo", True), ("nanotron", False)])
def test_whoever_plans_for_a_framework_without_runs_is_told_so(framework: str, is_known: bool) -> None:
    """Its steps have the room of any framework's, which is more than that of one whose many runs lie close."""
    found = predict(**ASKED, strategy="dp=8,zero=3", framework=framework)
    assert ("W_UNCALIBRATED" in [hint.code for hint in found.hints]) is not is_known
    assert distance_of("framework", framework).times >= distance_of("framework", "nemo").times


@pytest.mark.slow
def test_ones_own_runs_are_runs_of_a_framework(tmp_path: Path) -> None:
    """They stand for whichever framework they are of; nothing published is needed then."""
    path = written(tmp_path, (1.0,))
    found = predict(**ASKED, strategy="dp=8,zero=3", framework="nanotron", calibration=path)
    assert "W_UNCALIBRATED" not in [hint.code for hint in found.hints]
