"""The bar of a long search: on a terminal, late, and nowhere else. Real processes on a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from tests.cli.harness import PROGRAM, ROOT

pytestmark = pytest.mark.slow

SHOWN = """
import sys
from strategist.cli.output import Patience
with Patience(float(sys.argv[1])) as patience:
    patience("layouts weighed", 1, 2, None)
    patience("layouts weighed", 2, 2, 12.8)
"""
SMALL = ("plan", "--model", "llama-debug", "--hardware", "cpu:2")


def on_terminal(*command: str) -> tuple[int, str]:
    """The exit code of a process whose stderr is a terminal, and what it wrote there."""
    ours, theirs = pty.openpty()
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=variables)
    os.close(theirs)
    said = b""
    while part := _read(ours):
        said += part
    os.close(ours)
    return child.wait(), said.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux ends a terminal whose other side is closed with EIO
        return b""


def test_a_long_search_shows_how_far_it_is() -> None:
    """Past its patience the bar shows what is going on, how much is done and the best step so far; before, nothing at all."""
    code, said = on_terminal(sys.executable, "-c", SHOWN, "0")
    assert code == 0
    for words in ("2/2", "layouts weighed", "best so far 12.8 s"):
        assert words in said
    assert on_terminal(sys.executable, "-c", SHOWN, "3600") == (0, "")


def test_a_short_search_says_nothing() -> None:
    """A plan that is there at once leaves stderr of a terminal empty."""
    assert on_terminal(*PROGRAM, *SMALL) == (0, "")


def test_no_terminal_no_bar() -> None:
    """Where stderr is a file nothing is drawn, however long a search with a bar would take."""
    ran = subprocess.run(
        (*PROGRAM, *SMALL, "--sensitivity"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True
    )
    assert ran.stderr == b""
