"""The bar of a long search: on a terminal, late, and nowhere else. Real processes on a real pseudo-terminal."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from strategist.cli import main, output
from tests.cli.harness import PROGRAM, ROOT, runs_file

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


class Seen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        """Somebody looks at it."""
        return True


@pytest.mark.parametrize(
    "words",
    [
        ("size", "--model", "gpt2", "--tokens", "1B", "--gpu", "l4", "--nodes", "1"),
        ("sweep", "--model-size", "1B", "--nodes", "1"),
        ("accuracy", "runs.csv"),
    ],
)
def test_every_long_command_is_heard_of(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal each says how far it is, up to the end; with --json and elsewhere nobody is told, and the answer is the same."""
    monkeypatch.chdir(tmp_path)
    runs_file(tmp_path)
    heard: list[tuple[str, int, int]] = []
    monkeypatch.setattr(output.Patience, "__call__", lambda _self, said, done, total, _best: heard.append((said, done, total)))  # fmt: skip
    answers = []
    for is_seen, more in ((False, ()), (True, ("--json",)), (True, ())):
        seen = Seen() if is_seen else io.StringIO()
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(seen):
            assert main([*words, *more]) == 0
        answers.append(out.getvalue())
        assert bool(heard) is (is_seen and not more)
    assert answers[0] == answers[2]
    assert all(0 <= done <= total for _, done, total in heard)


def test_a_short_search_says_nothing() -> None:
    """A plan that is there at once leaves stderr of a terminal empty."""
    assert on_terminal(*PROGRAM, *SMALL) == (0, "")


def test_no_terminal_no_bar() -> None:
    """Where stderr is a file nothing is drawn, however long a search with a bar would take."""
    ran = subprocess.run(
        (*PROGRAM, *SMALL, "--sensitivity"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True
    )
    assert ran.stderr == b""
