"""The last rung of the ladder: what real ranks took and held, in the Plan's terms, from `run --observe` to a calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strategist.document.estimate import TIME_TERMS
from strategist.document.load import load_observed, load_plan
from strategist.document.observed import Observed
from strategist.document.write import digest, dump
from strategist.runs.folder import RunFolder
from strategist.runs.observing import LEAST_STEPS, observed_run
from tests.cli.harness import MANY, call, plan_file, runs_file
from tests.cli.test_run import QUICK, ran
from tests.plans import FLOAT32, make_plan, tiny_llama, tiny_mixtral

HALT_SECONDS = 0.6

WAITS: dict[str, tuple[dict[str, Any], str]] = {
    "ddp": ({"dp_replicate": 2, "micro_batch": 2, "accumulation": 2}, "dp"),
    "fsdp": ({"dp_shard": 2, "zero": 3, "micro_batch": 4}, "dp"),
    "zero1": ({"dp_shard": 2, "zero": 1, "micro_batch": 4}, "dp"),
    "tp": ({"tp": 2, "micro_batch": 8}, "tp"),
    "pp": ({"pp": 2, "micro_batch": 4, "accumulation": 2}, "bubble"),
    "cp": ({"cp": 2, "context_parallel": "all-to-all", "zero": 3, "micro_batch": 8}, "cp"),
    "ep": ({"dp_shard": 2, "zero": 3, "ep": 2, "micro_batch": 4}, "ep"),
}
IN_CI = ("ddp", "pp")


def assert_adds_up(observed: Observed) -> None:
    """Exposed seconds of every rank are its step, to the nanosecond, and all of them were measured."""
    for rank in observed.ranks:
        assert rank.time is not None
        assert sum(term.exposed_ns for term in rank.time.terms) == rank.time.step_ns
        assert {term.basis for term in rank.time.terms} == {"measured"}
        assert {term.name for term in rank.time.terms} <= set(TIME_TERMS)


@pytest.mark.slow
def test_a_run_is_observed_explained_and_learned_from(tmp_path: Path) -> None:
    """`run --observe` writes what every rank took and held; `explain --with` shows it beside the prediction and refuses it for
    another plan; `calibrate` counts it as one more run."""
    path = plan_file(tmp_path, *QUICK)
    done = ran("run", path, "--steps", str(LEAST_STEPS), "--out", "RUN", "--observe", cwd=tmp_path)
    assert done.code == 0, done.err
    plan, run = load_plan(path), str(tmp_path / "RUN/run.json")
    observed = load_observed(run)
    assert (observed.rung, observed.plan, [rank.rank for rank in observed.ranks]) == ("run", digest(plan), [0, 1])
    assert_adds_up(observed)
    weights = plan.memory.worst.term("parameters")
    assert all(rank.process_bytes > weights for rank in observed.ranks)
    tree = call("explain", path, "--with", run, "--json").document["tree"]
    seen = {node["name"]: node["observed"] for node in tree["children"]}
    assert seen["step"] == [max(rank.time.step_ns for rank in observed.ranks if rank.time is not None)]
    assert seen["whole process"] == [max(rank.process_bytes for rank in observed.ranks)]
    other = plan_file(tmp_path, *QUICK[:-1], "8", name="other.json")
    assert call("explain", other, "--with", run, "--json").error["code"] == "E_DIGEST"
    alone = call("calibrate", runs_file(tmp_path, *MANY), "--json").document["runs"]
    assert call("calibrate", runs_file(tmp_path, *MANY), run, "--json").document["runs"] == alone + 1
    (tmp_path / "RUN/plan.json").write_text(Path(other).read_text())
    assert call("calibrate", runs_file(tmp_path, *MANY), run, "--json").error["code"] == "E_DIGEST"


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if name in IN_CI else pytest.mark.nightly) for name in WAITS]
)
def test_who_waits_sees_it_on_the_axis(layout: str, tmp_path: Path) -> None:
    """When one rank halts in each step, the other one's wait stands in the term of the axis over which they talk, and the one
    that halts has it in none of them; the losses are bit by bit those of a run that nobody looked at."""
    from tests.executor.harness import run_ranks
    from tests.measure.halting import losses_of

    choices, term = WAITS[layout]
    shape = tiny_mixtral() if layout == "ep" else tiny_llama()
    plan, folder = make_plan(shape, **choices, formats=FLOAT32), RunFolder(str(tmp_path))
    folder.ranks.mkdir()
    for plain, seen in run_ranks(2, losses_of, plan, tmp_path, 1, HALT_SECONDS, timeout_s=300.0):
        assert plain == seen
    observed = observed_run(folder, plan)
    assert observed is not None
    assert_adds_up(observed)
    waiting, halting = (
        {term.name: term.exposed_ns for term in rank.time.terms} for rank in observed.ranks if rank.time
    )
    assert waiting[term] > 0.5e9 * HALT_SECONDS
    assert halting["host"] > 0.5e9 * HALT_SECONDS
    assert waiting[term] > 2 * halting.get(term, 0)


def test_too_few_steps_are_refused_before_anything_starts(tmp_path: Path) -> None:
    """There must be undisturbed steps behind those under the stopwatch; without a folder there is nowhere to write."""
    path = plan_file(tmp_path, *QUICK)
    wanted = ("run", path, "--observe", "--json")
    few = call(*wanted, "--steps", str(LEAST_STEPS - 1), "--out", str(tmp_path / "RUN"))
    assert (few.code, few.error["code"], few.error["flag"]) == (2, "E_TOO_SMALL", "--steps")
    assert call(*wanted).error["flag"] == "--out"
    assert not (tmp_path / "RUN").exists()


def test_only_a_run_is_learned_from(tmp_path: Path) -> None:
    """What a trace saw has no measured step: calibrate says so."""
    seen = Observed(made_by="tests", rung="traced", plan="sha256:0", torch="2", model="m", ranks=())
    (tmp_path / "trace.json").write_text(dump(seen))
    refused = call("calibrate", runs_file(tmp_path, *MANY), str(tmp_path / "trace.json"), "--json")
    assert (refused.code, refused.error["code"]) == (2, "E_KIND")
