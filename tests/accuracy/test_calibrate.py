"""Calibrations: what they recover, what they refuse, and what a plan makes of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from strategist import predict, recommend
from strategist.accuracy.calibrate import (
    NOISE,
    OVERLAPS,
    SPREADS,
    TIMED,
    Sample,
    _beside,
    _entries,
    _errors,
    _fit,
    _held,
    _left_out,
    _sampled,
    calibrate,
)
from strategist.accuracy.calibrate import PARTS as ALL
from strategist.accuracy.judge import Judged, judge
from strategist.accuracy.scores import log_errors
from strategist.document.calibration import Calibration
from strategist.document.load import load_calibration
from strategist.document.write import dump
from strategist.errors import InputError
from strategist.facts.calibration import Factor, on_parts, shipped_factors
from strategist.planner.exhaustive import recheck
from strategist.planner.predict import layout_of, predict_plan
from strategist.timing.calibrated import PARTS
from tests.cli.harness import RUN, call, runs_file

TRUE = {"matmul": 1.25}


def runs(number: int = 24) -> list[dict[str, str]]:
    """Runs of four sources that differ in sequence, batch and layout."""
    found = []
    for n in range(number):
        tp = (1, 2, 4, 8)[n % 4]
        size = {
            "seq_len": str(1024 * (1 + n % 5)),
            "micro_batch_seqs": str(1 + n % 3),
            "tp": str(tp),
            "dp": str(8 // tp),
        }
        batch = {"global_batch_seqs": str((1 + n % 3) * 8 // tp), "zero_class": "0" if tp == 8 else "3"}
        found.append({**RUN, **size, **batch, "id": f"run-{n}", "source": f"lab {n // 6}"})
    return found


def measured(told: Mapping[str, float], number: int = 24) -> tuple[Judged, ...]:
    """Runs that took what the formulas say with some factors on their parts."""
    asked = judge(runs(number))
    steps = [sum(seconds * told.get(part, 1.0) for part, seconds in one.parts.items()) for one in asked]
    return judge([{**one.run, "step_time_s": repr(step)} for one, step in zip(asked, steps, strict=True)])


@pytest.mark.slow
def test_runs_that_agree_with_the_formulas_ask_for_nothing() -> None:
    """Perfect predictions leave every factor at one."""
    found = calibrate(measured({}))
    assert found.factors == ()
    assert found.held_out.after == pytest.approx(1.0, abs=1e-6)


def test_factors_are_found_and_hold_on_sources_left_out() -> None:
    """Runs whose products are slower than said move that factor there, by no more than the truth, and others by little; on
    sources that the fit did not see the error falls by more than half."""
    found = calibrate(measured(TRUE))
    total: dict[str, float] = {}
    for factor in found.factors:
        total[factor.part] = total.get(factor.part, 1.0) * factor.value
    assert 1.1 < total["matmul"] <= 1.26
    assert all(0.9 < value < 1.1 for part, value in total.items() if part != "matmul")
    assert found.held_out.after - 1 < 0.5 * (found.held_out.before - 1)


CARDS = ("h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "a100-sxm-80gb")


def slower_place(factor: float) -> tuple[Judged, ...]:
    """Runs of four labs with a card each, all of which took so many times as long as the formulas say."""
    asked = judge([{**run, "hardware": CARDS[n // 6]} for n, run in enumerate(runs())])
    return judge([{**one.run, "step_time_s": repr(factor * one.step_s)} for one in asked])


@pytest.mark.slow
def test_a_place_where_all_is_slower_is_learned_from_other_cards() -> None:
    """What all runs have in common holds on a card that no other run has, and the wider spread is taken for it."""
    before = slower_place(1.5)
    found = calibrate(before)
    assert found.spread == max(SPREADS)
    assert found.held_out.before == pytest.approx(1.5, rel=0.01)
    assert found.held_out.after < 1.15
    assert any(factor.gpu == factor.framework == "" for factor in found.factors)
    after = judge([one.run for one in before], found.factors)
    assert np.median(np.abs(log_errors(after))) < 0.05


@pytest.mark.slow
def test_runs_as_predicted_keep_the_narrow_spread() -> None:
    """Where there is nothing to learn, nothing may stray."""
    assert calibrate(slower_place(1.0)).spread == min(SPREADS)


def on_nodes(number: int = 24) -> list[dict[str, str]]:
    """Short sequences on two to six nodes, which have little compute to send behind."""
    found = []
    for n in range(number):
        gpus, micro = 16 * (1 + n % 3), 1 + n % 2
        size = {"gpus_total": str(gpus), "dp": str(gpus), "seq_len": str(512 * (1 + n % 4)), "micro_batch_seqs": str(micro)}  # fmt: skip
        found.append({**RUN, **size, "global_batch_seqs": str(micro * gpus), "id": f"run-{n}", "source": f"lab {n // 6}"})  # fmt: skip
    return found


def overlapping(factor: float) -> tuple[Judged, ...]:
    """Runs on nodes that took what the formulas say where so many times as much of compute has collectives beside it."""
    asked = judge(on_nodes())
    moved = judge(on_nodes(), (Factor(part="overlap", value=factor),))
    return judge([{**one.run, "step_time_s": repr(took.step_s)} for one, took in zip(asked, moved, strict=True)])


@pytest.mark.slow
def test_less_overlap_is_found_and_holds_on_sources_left_out() -> None:
    """Runs that hide less than said move the overlap most of all, by no more than the truth; the more freely, the nearer they come."""
    errors = []
    for spread in (0.07, 0.2, 0.5):
        found = calibrate(overlapping(0.7), spreads=(spread,))
        total = {part: math.prod(factor.value for factor in found.factors if factor.part == part) for part in PARTS}
        assert 0.69 < total["overlap"] < 0.95
        assert all(abs(math.log(total[part])) < -math.log(total["overlap"]) for part in PARTS if part != "overlap")
        errors.append(found.held_out.after - 1)
    assert errors[2] < 0.2 * errors[0] < 0.2 * (found.held_out.before - 1)


@pytest.mark.slow
def test_slopes_of_a_fit_are_those_of_its_errors() -> None:
    """What an error grows by with each factor, the overlap among them, is what it does for a small step."""
    timed = overlapping(0.8)
    keys, sample = _sampled(timed, [one.run["source"] for one in timed])
    entries, small = np.linspace(-0.1, 0.12, len(keys) * len(ALL)).reshape(len(keys), len(ALL)), 1e-6
    _, slopes = _errors(sample, entries)
    for part in range(len(ALL)):
        moved = entries.copy()
        moved[0, part] += small
        grown = (_errors(sample, moved)[0] - _errors(sample, entries)[0]) / small
        assert grown == pytest.approx(slopes[:, part], abs=1e-4)


@pytest.mark.slow
def test_each_fit_is_heard_of() -> None:
    """One to all runs and one without each group, for every spread; what is found does not depend on who listens."""
    heard: list[tuple[int, int]] = []
    found = calibrate(measured(TRUE), watch=lambda _words, done, total, _best: heard.append((done, total)))
    fits = len(SPREADS) * (1 + found.groups)
    assert heard == [(done, fits) for done in range(1, fits + 1)]
    assert found == calibrate(measured(TRUE))


@pytest.mark.slow
def test_the_order_of_runs_does_not_matter() -> None:
    """A table read backwards gives the same factors."""
    runs_ = measured(TRUE)
    forwards, backwards = calibrate(runs_), calibrate(tuple(reversed(runs_)))
    assert [(f.part, f.value) for f in forwards.factors] == [(f.part, pytest.approx(f.value, abs=2e-4)) for f in backwards.factors]  # fmt: skip


def test_a_calibrated_prediction_is_nearer_and_adds_up() -> None:
    """Under the factors the same runs are predicted better, and the whole terms still add up to the step."""
    before = measured(TRUE)
    found = calibrate(before)
    after = judge([one.run for one in before], found.factors)
    assert abs(log_errors(after)).mean() < 0.5 * abs(log_errors(before)).mean()
    assert replace(before[0].job, factors=found.factors).on_parts["matmul"] > 1


@pytest.mark.slow
def test_what_runs_do_not_insist_on_stays_as_it_was() -> None:
    """Factors about other devices are kept, those of these runs start from what was known, and runs that the formulas under them predict
    ask for nothing else."""
    about = {"gpu": "h100-sxm-80gb", "part": "matmul"}
    known = (Factor(**about, value=1.1), Factor(part="host", gpu="b200-sxm-180gb", value=0.9))  # type: ignore[arg-type]
    found = calibrate(measured({"matmul": 1.1}), known)
    assert {factor.gpu: factor.value for factor in found.factors} == {
        "h100-sxm-80gb": pytest.approx(1.1, abs=1e-3),
        "b200-sxm-180gb": 0.9,
    }
    assert found.held_out.before == pytest.approx(1.0, abs=1e-6)
    nearer, freer = (calibrate(measured(TRUE), spreads=(spread,)).factors for spread in (0.02, 0.2))
    assert max(abs(factor.value - 1) for factor in nearer) < max(abs(factor.value - 1) for factor in freer)


def products_alone(logarithms: list[tuple[float, int]]) -> Sample:
    """Groups of runs that are nothing but matrix products, predicted to take a second: of each group ln of what they took, and how many."""
    measured = [logarithm for logarithm, number in logarithms for _ in range(number)]
    groups = [group for group, (_, number) in enumerate(logarithms) for _ in range(number)]
    parts = np.zeros((len(measured), len(OVERLAPS), len(TIMED)))
    parts[:, :, TIMED.index("matmul")] = 1.0
    return Sample(parts, np.array(measured), np.array(groups), np.zeros((len(measured), 1), np.int64))


@pytest.mark.parametrize("number", [1, 4, 16])
def test_a_group_counts_like_the_root_of_its_runs(number: int) -> None:
    """One run that is slower than said and a group that is faster by as much: the factor lies between them as one to the root of their number."""
    nothing, off = np.zeros((1, len(ALL))), 1e-4
    found = _fit(products_alone([(off, 1), (-off, number)]), nothing, 100.0)
    root = math.sqrt(number)
    assert found[0, ALL.index("matmul")] == pytest.approx(off * (1 - root) / (1 + root), abs=0.01 * off)


@pytest.mark.parametrize("spread", [0.02, 0.2])
def test_factors_are_drawn_to_those_that_are_known(spread: float) -> None:
    """Runs that known factors explain move none of them; without runs that insist, a factor lies between what they say and what was known, the
    nearer to the latter the narrower the spread."""
    known = np.zeros((1, len(ALL)))
    known[0, ALL.index("matmul")] = 0.3
    assert _fit(products_alone([(0.3, 3)]), known, spread) == pytest.approx(known, abs=1e-9)
    moved = _fit(products_alone([(0.301, 1)]), known, spread)[0, ALL.index("matmul")] - 0.3
    assert moved == pytest.approx(1e-3 * spread**2 / (spread**2 + NOISE**2), rel=0.05)


def test_known_factors_multiply_and_those_of_others_stay() -> None:
    """Of one device two on the same part are their product; what is about no device or framework of the runs is kept as it is, and what is about
    one is said anew."""
    known = [
        Factor(part=part, value=value, gpu=gpu)
        for part, value, gpu in (("host", 1.5, "a"), ("host", 2.0, "a"), ("host", 0.9, "b"))
    ]  # type: ignore[arg-type]
    entries = _entries(known, [("gpu", "a")])
    assert np.exp(entries[0]).tolist() == pytest.approx([3.0 if part == "host" else 1.0 for part in ALL])
    found = _beside(entries, [("gpu", "a")], known)
    assert [(factor.gpu, factor.part, factor.value) for factor in found] == [
        ("a", "host", pytest.approx(3.0)),
        ("b", "host", 0.9),
    ]


def test_groups_left_out_are_judged_without_themselves() -> None:
    """Three groups that have nothing in common: each is predicted by the others' factors, not by its own."""
    groups = [(0.2, 4), (0.0, 4), (-0.2, 4)]
    seen: list[tuple[int, ...]] = []

    def fitted(sample: Sample, usual: object, _spread: float, _start: object) -> object:
        seen.append(tuple(sorted(set(sample.group.tolist()))))
        mean = np.zeros((1, len(ALL)))
        mean[0, ALL.index("matmul")] = sample.measured.mean()
        return mean

    nothing = np.zeros((1, len(ALL)))
    sample = products_alone(groups)
    held = _held(sample, nothing, _left_out(sample, nothing, 0.2, nothing, fitted))  # type: ignore[arg-type]
    assert seen == [(1, 2), (0, 2), (0, 1)]
    assert held.before == pytest.approx(math.exp((0.2 + 0.0 + 0.2) / 3))
    assert held.after == pytest.approx(math.exp((0.3 + 0.0 + 0.3) / 3))
    assert (held.before_within_25, held.after_within_25) == (1.0, pytest.approx(1 / 3))


def test_runs_of_too_few_groups_are_refused_with_their_number() -> None:
    """Many runs of two places on one machine are too few groups, and the refusal counts them."""
    alike = {"model": "m", "hardware": "h", "gpus_total": "8"}
    runs = [replace(one, run={**one.run, **alike, "source": f"lab {n % 2}"}) for n, one in enumerate(measured(TRUE))]
    with pytest.raises(InputError, match="of 2 groups at the most") as caught:
        calibrate(runs)
    assert caught.value.code == "TOO_SMALL"


@pytest.mark.parametrize("kept", [0, 9])
def test_too_few_runs_are_refused(kept: int) -> None:
    """Fewer than ten runs calibrate nothing."""
    with pytest.raises(InputError) as caught:
        calibrate(measured(TRUE)[:kept])
    assert caught.value.code == "TOO_SMALL"


def test_runs_of_one_kind_are_refused() -> None:
    """Runs that differ in no column that makes groups cannot be judged by leaving groups out."""
    with pytest.raises(InputError):
        calibrate(judge([{**RUN, "id": str(n)} for n in range(12)]))


@pytest.mark.slow
def test_a_plan_uses_a_calibration_and_says_so(tmp_path: Path) -> None:
    """--calibration changes the predicted step of plan, predict and accuracy, and the assumption names the factors."""
    path = tmp_path / "calibration.json"
    table = runs_file(tmp_path, *({**one.run} for one in measured(TRUE)))
    assert call("calibrate", table, "--out", str(path), "--json").document == json.loads(
        path.read_text(encoding="utf-8")
    )
    framework = ("--framework", "fsdp2-compiled")
    question = (
        "predict",
        "--model",
        "llama-3-8b",
        "--hardware",
        "dgx-h100",
        "--strategy",
        "dp=8,zero=3",
        "--json",
        *framework,
    )
    plain, fitted = call(*question).document, call(*question, "--calibration", str(path)).document
    assert fitted["time"]["step_ns"] > plain["time"]["step_ns"]
    assert fitted["time"]["step_ns"] == sum(term["exposed_ns"] for term in fitted["time"]["terms"])
    assert "matmul x1." in next(a["value"] for a in fitted["assumptions"] if a["what"] == "calibration")
    errors = [call("accuracy", table, "--json", *words).document["groups"][0]["time"]["factor"] for words in ((), ("--calibration", str(path)))]  # fmt: skip
    assert errors[1] < errors[0]
    in_python = predict(
        "llama-3-8b", "dgx-h100", strategy="dp=8,zero=3", framework="fsdp2-compiled", calibration=str(path)
    )
    assert in_python.time.step_ns == fitted["time"]["step_ns"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"format": "strategist-plan/1"}, "KIND"),
        ({"factors": [{"part": "matmul", "value": 99.0, "gpu": "", "framework": ""}]}, "RANGE"),
        ({"factors": 2 * [{"part": "matmul", "value": 1.1, "gpu": "", "framework": "nemo"}]}, "CONFLICT"),
        ({"factors": [{"part": "luck", "value": 1.0, "gpu": "", "framework": ""}]}, "CHOICE"),
        ({"runs": -1}, "NEGATIVE"),
        ({"surprise": 1}, "UNKNOWN_KEY"),
    ],
)
def test_wild_calibrations_are_refused(change: Mapping[str, object], code: str, tmp_path: Path) -> None:
    """A file that is no calibration, or one with factors out of reason, is an input error."""
    found: Calibration = calibrate(measured(TRUE))
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(json.loads(dump(found)) | change), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_calibration(str(path))
    assert caught.value.code == code


H100 = {"model": "llama-3-8b", "hardware": "dgx-h100"}


def test_plans_are_calibrated_unless_told_otherwise() -> None:
    """The factors that ship are in a plan's seconds, in its document and among its assumptions; --uncalibrated leaves them out."""
    fitted, plain = recommend(**H100), recommend(**H100, uncalibrated=True)
    assert fitted.factors == tuple(f for f in shipped_factors() if f.gpu == "h100-sxm-80gb")
    assert plain.factors == ()
    said = [[a.value for a in plan.assumptions if a.what == "calibration"] for plan in (fitted, plain)]
    assert said[1] == [] and "published runs" in said[0][0]
    one = recommend(**H100, uncalibrated=True, pin=layout_of(fitted))
    terms = {term.name: term.exposed_ns for term in one.time.terms}
    moved = on_parts(fitted.factors, "h100-sxm-80gb", "strategist")
    for term in fitted.time.terms:
        part = next((part for part, own in PARTS.items() if term.name in own), None)
        if part is not None:
            assert abs(term.exposed_ns - terms[term.name] * moved.get(part, 1.0)) <= 1
    assert call(
        "plan", "--model", "llama-3-8b", "--hardware", "dgx-h100", "--uncalibrated", "--json"
    ).document == json.loads(dump(plain))


@pytest.mark.slow
def test_a_plan_keeps_its_calibration(tmp_path: Path) -> None:
    """Priced again from its file, a plan takes what it took, with the factors that ship, with others and with none."""
    path = tmp_path / "calibration.json"
    path.write_text(dump(calibrate(measured(TRUE))), encoding="utf-8")
    for words in ({}, {"calibration": str(path)}, {"uncalibrated": True}):
        plan = recommend(**H100, **words, pin="tp=2,zero=1")
        assert predict_plan(plan).time == plan.time
        assert [
            claim.sentence
            for claim in recheck(recommend(**H100, **words, global_batch=8, pin="tp=4,zero=1", certificate=True)).claims
            if not claim.holds
        ] == []


def test_accuracy_uses_the_factors_that_ship_or_none(tmp_path: Path) -> None:
    """The same table is predicted with and without them, on cards that have some, and both say the same of bytes."""
    table = runs_file(tmp_path, *({**one.run, "hardware": "B200-SXM-180GB"} for one in measured({})))
    fitted, plain = (call("accuracy", table, "--json", *words).document["rows"] for words in ((), ("--uncalibrated",)))
    assert [row["predicted_peak_bytes"] for row in fitted] == [row["predicted_peak_bytes"] for row in plain]
    assert all(a["predicted_step_s"] != b["predicted_step_s"] for a, b in zip(fitted, plain, strict=True))


def test_a_calibration_and_none_contradict_each_other(tmp_path: Path) -> None:
    """--uncalibrated beside --calibration, beside a Plan file or with a word is refused; in a configuration file it is true or false."""
    plan = ("plan", "--model-size", "7B", "--hardware", "dgx-h100")
    written = tmp_path / "plan.json"
    written.write_text(dump(recommend(**H100)), encoding="utf-8")
    for words in ((*plan, "--uncalibrated", "--calibration", "c.json"), ("predict", str(written), "--uncalibrated")):
        told = call(*words)
        assert told.code == 2 and "E_CONFLICT" in told.err
    config = tmp_path / "job.toml"
    for word, code in (("true", 0), ("false", 0), ('"yes"', 2)):
        config.write_text(f"uncalibrated = {word}\n", encoding="utf-8")
        told = call(*plan, "--config", str(config), "--json")
        assert told.code == code
        if code:
            assert "true or false" in told.error["message"]
        else:
            assert (told.document["factors"] == []) is (word == "true")
    with pytest.raises(InputError) as caught:
        recommend(**H100, uncalibrated="yes")
    assert caught.value.code == "TYPE"


@pytest.mark.slow
def test_a_run_that_factors_do_not_explain_is_named(tmp_path: Path) -> None:
    """One run in ten times its time moves no factor by more than a fiftieth, and is named with its ratio; skipped rows are counted."""
    sound = measured(TRUE)
    odd = judge(
        [{**one.run, "step_time_s": repr((10 if n == 5 else 1) * one.measured_s)} for n, one in enumerate(sound)]
    )
    assert [(one.id, 9 < one.ratio < 11) for one in calibrate(odd).apart] == [("run-5", True)]
    assert calibrate(sound).apart == ()
    shown = call(
        "calibrate", runs_file(tmp_path, *(one.run for one in odd), {**RUN, "id": "lost", "model": "unheard-of"})
    )
    words = " ".join(shown.out.split())
    assert "run-5 takes" in words and "skipped 1: model unheard-of" in words and "together h100-sxm-80gb" in words


def test_a_table_in_milliseconds_is_no_calibration(tmp_path: Path) -> None:
    """Seconds a thousand times too many are no slow machine: the refusal says what the rows look like."""
    slow = [{**one.run, "step_time_s": repr(1000 * one.measured_s)} for one in measured(TRUE)]
    refused = call("calibrate", runs_file(tmp_path, *slow))
    assert refused.code == 2 and "E_TOO_SMALL" in refused.err
    assert "24 of them because: the row contradicts itself" in " ".join(refused.err.split())


@pytest.mark.slow
def test_factors_that_help_nowhere_are_not_made(tmp_path: Path) -> None:
    """Labs whose runs are off in ways that have nothing in common, 10 % up and down in turn: what ships stays, and the report says that nothing helps."""
    off = (1.1, 0.9, 1.08, 0.92)
    noisy = judge(
        [{**one.run, "step_time_s": repr(off[n // 6] * one.measured_s)} for n, one in enumerate(measured({}))]
    )
    found = calibrate(noisy, shipped_factors())
    assert (found.spread, found.held_out.after) == (0.0, found.held_out.before)
    assert set(found.factors) == set(shipped_factors())
    assert "No factors help" in call("calibrate", runs_file(tmp_path, *(one.run for one in noisy))).out
