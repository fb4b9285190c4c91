"""`resume` and `status` on run folders made by hand: what is refused before anything starts, and what is shown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from strategist.document.write import as_document, dump
from strategist.runs.beats import BeatWriter
from strategist.runs.folder import RunFolder, append_row, write_whole
from strategist.runs.job import JobRecord
from strategist.runs.lock import locked
from strategist.runs.verdict import Evidence, judge
from tests.cli.harness import call, plan_file
from tests.runs.test_files import checkpoint

QUICK = ("--model", "llama-debug", "--hardware", "cpu:2", "--seq-len", "32", "--global-batch", "4")


def run_of(folder: Path, *, step: int = 4) -> RunFolder:
    """A run of ten steps that was stopped after some."""
    run = RunFolder(str(folder / "RUN"))
    run.ranks.mkdir(parents=True)
    os.rename(plan_file(folder, *QUICK), run.plan)
    write_whole(run.job, dump(JobRecord(steps=10, save_every=2)))
    checkpoint(run.checkpoints, step)
    for rank in range(2):
        for done in range(step):
            append_row(run.of_rank(rank, "steps"), {"step": done, "loss": 6.5 - done, "seconds": 0.25 * (rank + 1)})
        BeatWriter(run.of_rank(rank, "beat"), rank).beat(step, "forward")
    return run


def test_status_tells_the_files_of_the_folder(tmp_path: Path) -> None:
    """Steps, loss, each rank's pace and place, checkpoints and faults, as a document and as a page."""
    run = run_of(tmp_path)
    append_row(run.verdicts, as_document(judge(Evidence(world=2, beats={}, ends={1: -9}, failures={}), attempt=0)))
    seen = call("status", run.path, "--json").document
    assert (seen["state"], seen["done"], seen["steps"], seen["loss"]) == ("stopped", 4, 10, 3.5)
    assert [(rank["alive"], rank["phase"], rank["step_seconds"]) for rank in seen["ranks"]] == [
        (False, "forward", 0.25),
        (False, "forward", 0.5),
    ]
    assert [(each["step"], each["bytes"]) for each in seen["checkpoints"]] == [(4, 2 * 256 * 5)]
    assert "SIGKILL" in seen["faults"][0]["cause"]
    page = call("status", run.path).out
    for words in (
        "stopped",
        "step 4 of 10, loss 3.5000",
        "ended, forward of step 4",
        "250 ms",
        "after step 4",
        "SIGKILL",
    ):
        assert words in page


def test_a_held_folder_is_running(tmp_path: Path) -> None:
    """While a supervisor holds the folder its ranks are alive, and nobody else may resume it."""
    run = run_of(tmp_path)
    with locked(run.lock):
        seen = call("status", run.path, "--json").document
        refused = call("resume", run.path, "--json")
    assert (seen["state"], [rank["alive"] for rank in seen["ranks"]]) == ("running", [True, True])
    assert (refused.code, refused.error["code"]) == (2, "E_CONFLICT")
    assert f"process {os.getpid()} on " in refused.error["message"]


def test_a_finished_run_has_nothing_left(tmp_path: Path) -> None:
    """Resuming after the last step ends well and starts nothing."""
    run = run_of(tmp_path, step=10)
    assert call("resume", run.path, "--json").document == {
        "done": 10, "checkpoint": str(run.checkpoints / "step-000000010"), "exit": 0
    }  # fmt: skip
    assert (call("resume", run.path).code, call("resume", run.path).out) == (0, "All 10 steps are done.\n")


def _no_manifest(run: RunFolder) -> None:
    (run.checkpoints / "step-000000004/manifest.json").unlink()


def _no_job(run: RunFolder) -> None:
    run.job.unlink()


def _bad_job(run: RunFolder) -> None:
    run.job.write_text(json.dumps({"format": "strategist-run/1", "steps": "ten"}))


def _later_job(run: RunFolder) -> None:
    run.job.write_text(json.dumps({"format": "strategist-run/2", "steps": 10}))


def _edited(run: RunFolder) -> None:
    plan = json.loads(run.plan.read_text())
    run.plan.write_text(json.dumps(plan | {"made_by": "me"}))


REFUSED: dict[str, tuple[Any, tuple[str, ...], int, str]] = {
    "no manifest": (_no_manifest, (), 2, "E_NO_CHECKPOINT"),
    "no job": (_no_job, (), 2, "E_KIND"),
    "a job that is none": (_bad_job, (), 2, "E_TYPE"),
    "a job of another version": (_later_job, (), 2, "E_KIND"),
    "an edited plan": (_edited, (), 4, "E_DIGEST"),
    "a plan for another job": (None, ("--plan", "other.json"), 4, "E_FACTS_DIFFER"),
    "no time": (None, ("--heartbeat", "0"), 2, "E_TOO_SMALL"),
}


@pytest.mark.parametrize(("spoil", "words", "exit_code", "code"), REFUSED.values(), ids=REFUSED)
def test_resume_refuses(
    spoil: Any, words: tuple[str, ...], exit_code: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder or a plan that cannot be gone on with is refused before a rank starts, with a way out."""
    run = run_of(tmp_path)
    plan_file(tmp_path, *QUICK[:-1], "8", name="other.json")
    if spoil is not None:
        spoil(run)
    monkeypatch.chdir(tmp_path)
    done = call("resume", "RUN", *words, "--json")
    assert (done.code, done.error["code"]) == (exit_code, code)
    assert done.error["hint"]
    assert not run.log.exists()


@pytest.mark.parametrize(
    ("words", "code", "flag"),
    [
        (("--save-every", "2"), "E_MISSING", "--out"),
        (("--max-restarts", "2"), "E_MISSING", "--out"),
        (("--out", "R", "--save-every", "0"), "E_TOO_SMALL", "--save-every"),
        (("--out", "R", "--heartbeat", "soon"), "E_PARSE", "--heartbeat"),
        (("--out", "there"), "E_EXISTS", "--out"),
        (("--out", "R", "--", "python", "train.py"), "E_CONFLICT", "--out"),
        (("--heartbeat", "9", "--", "python", "train.py"), "E_CONFLICT", "--heartbeat"),
        (("--out", "no/where"), "E_FILE_NOT_FOUND", "--out"),
    ],
)
def test_run_refuses_flags_that_do_not_go_together(
    words: tuple[str, ...], code: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints need a folder of the run's own, and belong to the built-in job; nothing is made when they are refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    done = call("run", plan_file(tmp_path, *QUICK), "--json", *words)
    assert (done.code, done.error["code"], done.error["flag"]) == (2, code, flag)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "there"]
