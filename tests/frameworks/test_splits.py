"""Every front end gives its ranks the samples that our page says, of the numbers 0 to 19 in batches of 10."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.jobs import job_environment
from tests.source import ROOT

SCRIPT = Path(__file__).with_name("splits.py")
PAGE = ROOT / "docs/splits.md"
ELSEWHERE = "nn.DataParallel"
"""Shown by tests/executor/test_threads.py: torch's own needs devices."""


def documented() -> dict[str, list[list[list[int]]]]:
    """The batches of each rank by front end, as the table of the page has them."""
    cells = [
        line.strip("|").split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    return {
        row[0].strip(): [[[int(number) for number in batch.split()] for batch in cell.split(",")] for cell in row[2:4]]
        for row in cells[1:]
    }


@pytest.mark.parametrize("front_end", sorted({*documented()} - {ELSEWHERE}))
def test_ranks_get_what_the_page_says(front_end: str, tmp_path: Path) -> None:
    """Two processes, started as that front end starts them, write what they were given."""
    env = job_environment() | {"TMPDIR": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    start = ["torchrun", "--standalone", "--nproc-per-node", "2"] if front_end != "mp-spawn" else [sys.executable]
    command = [*start, str(SCRIPT), front_end, str(tmp_path)]
    done = subprocess.run(
        command, env=env | {"MASTER_PORT": port}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    heard = [json.loads((tmp_path / f"rank-{number}.json").read_text(encoding="utf-8")) for number in range(2)]
    assert heard == documented()[front_end]


def test_the_page_has_every_front_end() -> None:
    """Nothing that the script knows is left out, and every number is given once."""
    from tests.frameworks.splits import FRONT_ENDS

    assert {*documented()} == {*FRONT_ENDS, ELSEWHERE}
    for ranks in documented().values():
        assert sorted(number for batches in ranks for batch in batches for number in batch) == list(range(20))
