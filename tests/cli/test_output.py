"""What reaches the terminal: columns, colours, letters."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from strategist.cli import COMMANDS
from tests.cli.harness import PROGRAM, SMALL, call, environment, hand_written, plan_file, process

WIDTHS = (20, 40, 80, 200)
ANSI = re.compile(r"\x1b\[[0-9;]*m")
BIG = ("--model-size", "7B", "--hardware", "dgx-h100:2", "--pin", "pp=2,tp=2", "--tokens", "1T")
PAGES: dict[str, Callable[[Path], list[str]]] = {
    "plan": lambda folder: ["plan", *BIG],
    "plan assumed": lambda folder: ["plan", "--model-size", "1B", "--verbose"],
    "no plan": lambda folder: ["plan", "--model-size", "70B", "--gpu", "rtx-4090", "--gpus-per-node", "1"],
    "bad input": lambda folder: ["plan", "--model-size", "x" * 100, "--nodes", "0", "--gpu", "nonsense"],
    "explain": lambda folder: ["explain", plan_file(folder, *BIG)],
    "explain unsealed": lambda folder: ["explain", hand_written(folder, pp=2, dp_shard=2, zero=3)],
    "check": lambda folder: ["check", plan_file(folder)],
    "topology": lambda folder: ["topology", "--hardware", "dgx-h100:2"],
    "gpus": lambda folder: ["catalog", "gpus"],
    "nodes": lambda folder: ["catalog", "nodes"],
    "one model": lambda folder: ["catalog", "models", "mixtral-8x7b"],
    "rules": lambda folder: ["rule"],
    "one rule": lambda folder: ["rule", "HF203"],
    "codes": lambda folder: ["help"],
    "one code": lambda folder: ["help", "E_FACTS_DIFFER"],
    "targets": lambda folder: ["emit", "--list"],
    "commands": lambda folder: ["--help"],
} | {f"{name} --help": (lambda folder, name=name: [name, "--help"]) for name, _ in COMMANDS}


def too_long(text: str, width: int) -> list[str]:
    """Lines beyond the width that hold more than one word: a single word cannot always be broken."""
    rows = [row.removesuffix(" \\") for row in text.splitlines()]
    return [row for row in rows if len(row) > width and len(row.split()) > 1]


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_no_line_is_longer_than_the_terminal(
    page: Callable[[Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 20, 40, 80 and 200 columns every page stays inside, and wide terminals get no more lines than narrow ones."""
    words, heights = page(tmp_path), []
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        ran = call(*words)
        text = ran.out + ran.err
        assert too_long(text, width) == []
        heights.append(text.count("\n"))
    assert heights == sorted(heights, reverse=True)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_word_is_lost_when_wrapping(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same letters in the same order at every width."""
    letters = []
    for columns in (200, width):
        monkeypatch.setenv("COLUMNS", str(columns))
        letters.append("".join(call("plan", *BIG).out.split()))
    assert letters[0] == letters[1]


@pytest.mark.parametrize("columns", ["", "0", "-5", "abc", "99999999999", "1", "٤٠"])
def test_odd_terminal_widths(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever COLUMNS says, a report is printed."""
    with monkeypatch.context() as odd:  # what runs the tests prints reports too
        odd.setenv("COLUMNS", columns)
        ran = call("plan", *SMALL)
    assert ran.code == 0
    assert "".join(ran.out.split()).startswith("hardware1node")


@pytest.mark.parametrize(
    ("variables", "words", "coloured"),
    [
        ({}, (), False),
        ({"FORCE_COLOR": "1"}, (), True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, (), False),
        ({"FORCE_COLOR": "1", "NO_COLOR": ""}, (), True),
        ({"FORCE_COLOR": "1"}, ("--no-color",), False),
        ({"FORCE_COLOR": ""}, (), False),
        ({"FORCE_COLOR": "1"}, ("--json",), False),
    ],
)
def test_colours_are_for_people(
    variables: dict[str, str], words: tuple[str, ...], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Piped output is plain unless FORCE_COLOR asks for colours; NO_COLOR and --no-color win, empty variables do not count."""
    plain = call("plan", *SMALL, *words).out
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ran = call("plan", *SMALL, *words)
    assert bool(ANSI.search(ran.out)) is coloured
    assert ANSI.sub("", ran.out) == plain


def on_terminal(*words: str, **variables: str | None) -> str:
    """What a terminal of 80 columns shows."""
    leader, follower = pty.openpty()
    child = os.fork()
    if child == 0:
        os.dup2(follower, 1)
        os.execve(sys.executable, [*PROGRAM, *words], environment(TERM="xterm-256color", **variables))
    os.close(follower)
    shown = b""
    while chunk := _read(leader):
        shown += chunk
    os.waitpid(child, 0)
    os.close(leader)
    return shown.decode()


def _read(descriptor: int) -> bytes:
    """The next bytes; none when the other end is closed, which Linux calls an error."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


@pytest.mark.slow
def test_terminals_get_colours() -> None:
    """A terminal gets colours, and none when NO_COLOR is set."""
    assert ANSI.search(on_terminal("plan", *SMALL))
    assert not ANSI.search(on_terminal("plan", *SMALL, NO_COLOR="1"))


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_terminals_without_our_letters(encoding: str, tmp_path: Path) -> None:
    """A terminal that cannot show a letter gets its number, and JSON stays valid with the same content."""
    config = json.loads((Path(__file__).parents[1] / "data/configs/llama-2-7b.json").read_text(encoding="utf-8"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"_name_or_path": "l’éléphant"}), encoding="utf-8")
    words = ("--model-config", str(file), "--hardware", "dgx-h100")
    assert process("plan", "--json", *words, PYTHONIOENCODING=encoding).document["model"]["name"] == "l’éléphant"
    for command in (["plan", *words], ["topology", "--hardware", "dgx-h100"], ["plan", "--model", "é\udcff"]):
        ran = process(*command, PYTHONIOENCODING=f"{encoding}:strict")
        assert "Traceback" not in ran.err
        assert ran.code in (0, 2)
