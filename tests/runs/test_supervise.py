"""The supervisor with programs that need no torch: whose end counts, and what is written down."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from strategist.errors import TrainingError
from strategist.runs.folder import RunFolder, rows_of
from strategist.runs.supervise import Launch, supervise
from tests.source import ROOT

pytestmark = pytest.mark.slow


def watched(folder: Path, program: str, *, reports: bool = False, restarts: int = 0) -> tuple[RunFolder, list[str]]:
    """Two ranks of a program, watched to their end; `rank` is its number, and with `reports` it writes heartbeats."""
    head = "import os, sys, time; rank = int(os.environ['RANK']); attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
    if reports:
        head += f"sys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\nfrom strategist.runs.beats import BeatWriter\n"
        head += f"beat = BeatWriter(Path({str(folder)!r}, 'ranks', f'{{rank}}.beat'), rank).beat\n"
    remarks: list[str] = []
    run = RunFolder(str(folder))
    supervise(
        Launch(
            command=lambda _: [sys.executable, "-S", "-c", head + program], world=2, folder=run, reports=reports, saves=False,
            heartbeat_s=60.0, max_restarts=restarts,
        ), remarks.append, remarks.append,
    )  # fmt: skip
    return run, remarks


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("sys.exit(7)", "Rank 0 ended with exit status 7"),
        ("sys.exit(3) if rank else time.sleep(100)", "Rank 1 ended with exit status 3"),
        ("os.kill(os.getpid(), 9) if rank else time.sleep(100)", "Rank 1 was killed by signal 9 (SIGKILL)"),
    ],
)
def test_who_failed_is_named_and_not_whom_we_ended(program: str, words: str, tmp_path: Path) -> None:
    """A program of somebody else's fails with its own rank and code; the rank that was ended for it is not blamed."""
    with pytest.raises(TrainingError) as failed:
        watched(tmp_path, program)
    assert words in failed.value.message
    (verdict,) = rows_of(RunFolder(str(tmp_path)).verdicts)
    assert (verdict["action"], verdict["retry"]) == ("stop", "may succeed")


def test_an_abort_after_the_work_is_no_failure(tmp_path: Path) -> None:
    """Once a rank said that it is done, how its process ends does not matter."""
    run, _ = watched(tmp_path, "beat(5, 'done'); os.kill(os.getpid(), 6 * rank)", reports=True)
    assert not run.verdicts.exists()


def test_leaving_early_is_a_failure(tmp_path: Path) -> None:
    """Exit status 0 in the middle of a step is no success, and the next attempt may be one."""
    run, remarks = watched(
        tmp_path, "beat(2, 'data'); rank and attempt == '0' and sys.exit(0); beat(3, 'done')", reports=True, restarts=1
    )
    (verdict,) = rows_of(run.verdicts)
    assert "Rank 1 left in data of step 2" in verdict["cause"]
    assert "Starting again (1 of 1)" in remarks[-1]
