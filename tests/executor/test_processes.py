"""One verdict for all ranks: the rank that broke, not those that lost their peers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from strategist.document.plan import Plan
from strategist.document.write import dump
from tests.plans import FLOAT32, make_plan

pytestmark = pytest.mark.slow


def _plan(**layout: Any) -> Plan:
    return make_plan(**({"dp_shard": 2, "zero": 3, "micro_batch": 4, "formats": FLOAT32} | layout))


@pytest.mark.parametrize("layout", [{}, {"dp_shard": 1, "zero": 0, "pp": 2, "accumulation": 4}], ids=["zero3", "pp"])
def test_every_rank_names_the_one_that_broke(layout: dict[str, Any]) -> None:
    """When rank 1 raises, rank 0's own error is a lost connection, but both report rank 1's words."""
    from tests.executor.harness import run_ranks
    from tests.executor.workers import fail_on

    verdicts = run_ranks(2, fail_on, _plan(**layout), 1)
    assert verdicts == ["TRAINING: Rank 1 of 2 failed: ValueError: the data of this rank are gone"] * 2


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_pipeline_does_not_hide_which_rank_broke(phase: str) -> None:
    """torch wraps every error of a stage, lost connections too, in one without a word of the cause: all four ranks name the one that
    broke, also the other rank of its tp group, which lost it within the stage."""
    from tests.executor.harness import run_ranks
    from tests.executor.workers import fail_within

    verdicts = run_ranks(4, fail_within, _plan(dp_shard=1, zero=0, pp=2, tp=2, accumulation=4), 3, phase)
    assert verdicts == ["TRAINING: Rank 3 of 4 failed: ValueError: the layer of this rank is gone"] * 4


def test_the_root_cause_is_not_a_lost_peer() -> None:
    """Of several accounts the lowest rank with an error of its own wins; a lost peer only when there is nothing else."""
    from strategist.executor.processes import Failure, root_cause

    lost, broke, late = (Failure(rank=r, collateral=c, text="") for r, c in ((0, True), (2, False), (3, False)))
    assert root_cause((lost, late, broke)) == broke
    assert root_cause((lost,)) == lost


def _torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*launcher, "-m", "strategist.executor", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_torchrun_trains_and_writes_the_report(tmp_path: Path) -> None:
    """Two ranks under the real launcher learn, and rank 0 leaves losses, seconds, memory of both, and versions."""
    plan, report = tmp_path / "plan.json", tmp_path / "report.json"
    plan.write_text(dump(_plan()))
    done = _torchrun(2, str(plan), "--steps", "20", "--report", str(report))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 20  # rank 0 speaks, the others do not
    found = json.loads(report.read_text())
    losses = [step["loss"] for step in found["steps"]]
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.1
    assert all(step["seconds"] > 0 and step["tokens"] == 8 * 16 for step in found["steps"])
    assert found["world"] == 2
    assert all(rank["resident_bytes"] > 2**26 for rank in found["memory"])
    assert len(found["memory"]) == 2
    assert found["versions"].keys() == {"strategist", "torch", "python"}
    assert list(tmp_path.glob("*.partial")) == []


@pytest.mark.parametrize(
    ("plan", "flags", "code", "exit_code"),
    [
        (_plan(), (), "E_FACTS_DIFFER", 4),
        (_plan(tiling=2, recompute="selective"), (), "E_UNSUPPORTED", 3),
        (_plan(), ("--steps", "0"), "E_TOO_SMALL", 2),
        (_plan(), ("--steps", "many"), "E_PARSE", 2),
        (_plan(), ("--report", "/nowhere/at/all.json"), "E_FILE_NOT_FOUND", 2),
    ],
)
def test_errors_are_two_lines_and_an_exit_code(
    plan: Plan, flags: tuple[str, ...], code: str, exit_code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is wrong with the plan or the flags ends in code, sentence and hint on stderr, and no traceback."""
    from strategist.executor.__main__ import main

    path = tmp_path / "plan.json"
    path.write_text(dump(plan))
    assert main([str(path), *flags]) == exit_code
    said = capsys.readouterr().err
    assert said.startswith(f"{code}: ")
    assert len(said.splitlines()) == 2
