"""Reports on narrow and wide terminals, and in pipes: no line is too long, no figure is cut or left out, no colour where nobody looks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.cli.harness import SMALL, call, plan_file, process, runs_file

FIGURE = re.compile(r"(?<![\w.,])[-+]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?%?")
REPORTS: Mapping[str, Callable[[Path], list[str]]] = {
    "plan": lambda folder: ["plan", "--model", "llama-3.2-1b", "--hardware", "dgx-h100:2", "--verbose", "--tokens", "1T", "--price-per-gpu-hour", "2.5"],
    "nothing fits": lambda folder: ["plan", "--model-size", "70B", "--gpu", "rtx-4090", "--nodes", "1", "--gpus-per-node", "1"],
    "explain": lambda folder: ["explain", plan_file(folder, "--model", "llama-3.2-1b", "--hardware", "dgx-h100")],
    "compare": lambda folder: ["compare", "dp=2", "tp=2", *SMALL],
    "accuracy": lambda folder: ["accuracy", runs_file(folder), "--verbose", "--by", "source,model"],
    "size": lambda folder: ["size", "--model", "gpt2", "--tokens", "10B", "--gpu", "a10g", "--nodes", "1"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("report", REPORTS)
def test_no_figure_is_lost_on_a_narrow_terminal(report: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What two hundred columns say in numbers, forty say too, and twenty do not crash; no line is longer than the terminal."""
    words = REPORTS[report](tmp_path)
    said: dict[int, Counter[str]] = {}
    for columns in (20, 40, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        told = call(*words)
        text = told.out + told.err
        assert told.code == (3 if report == "nothing fits" else 0)
        assert max(map(len, text.splitlines())) <= columns
        assert "\x1b" not in text
        said[columns] = Counter(FIGURE.findall(text.replace(str(tmp_path), "")))
    assert not said[200] - said[40]


@pytest.mark.slow
def test_a_pipe_gets_no_colours() -> None:
    """A process whose output goes into a pipe writes plain text, whatever kind of terminal there is."""
    told = process("plan", *SMALL, TERM="xterm-256color", COLUMNS="200")
    assert told.code == 0
    assert "\x1b" not in told.out + told.err
