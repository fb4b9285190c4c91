"""Scalars of a run: what TensorBoard reads is what the run's own files say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from strategist.runs.checkpoints import checkpoints_in
from strategist.runs.folder import RunFolder, rows_of
from tests.cli.harness import call, plan_file
from tests.cli.test_run import QUICK, ran

STEPS = 3


@pytest.mark.slow
def test_scalars_are_what_the_run_says_of_itself(tmp_path: Path) -> None:
    """One folder per rank with a value per step; losses and seconds are those of the rows, checkpoints those in the folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = plan_file(tmp_path, *QUICK)
    wanted = ("--steps", str(STEPS), "--save-every", "2", "--out", "RUN", "--tensorboard")
    done = ran("run", path, *wanted, cwd=tmp_path)
    assert done.code == 0, done.err
    folder = RunFolder(str(tmp_path / "RUN"))
    for rank in range(2):
        read = EventAccumulator(str(folder.tensorboard / f"rank-{rank}")).Reload()
        scalars = {name: [(each.step, each.value) for each in read.Scalars(name)] for name in read.Tags()["scalars"]}
        rows = list(rows_of(folder.of_rank(rank, "steps")))
        assert scalars["step_seconds"] == [(row["step"], pytest.approx(row["seconds"], rel=1e-6)) for row in rows]
        assert [step for step, _ in scalars["resident_bytes"]] == list(range(STEPS))
        if rank > 0:
            assert "loss" not in scalars
            continue
        assert scalars["loss"] == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in rows]
        assert [step for step, _ in scalars["checkpoint"]] == [
            each.step for each in checkpoints_in(folder.checkpoints)
        ][::-1]
        assert scalars["faults"] == [(0, 0.0)]


def test_without_the_package_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for scalars where TensorBoard is not installed is told what to install, before a folder is made."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    refused = call("run", plan_file(tmp_path), "--out", str(tmp_path / "RUN"), "--tensorboard", "--json")
    assert (refused.code, refused.error["code"], refused.error["flag"]) == (2, "E_MISSING", "--tensorboard")
    assert "strategist[tensorboard]" in refused.error["hint"]
    assert not (tmp_path / "RUN").exists()
