"""The first page: what it shows is what happens."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from docs.make_pages import EXAMPLE, example_output
from strategist.cli import COMMANDS
from tests.cli.harness import call, process
from tests.source import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The README's blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def made(*words: str) -> list[str]:
    """The lines that `make` prints, also when these tests themselves were started by make."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    ran = subprocess.run(("make", *words), cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


def recipe(target: str) -> list[str]:
    """The commands that a target of the Makefile stands for."""
    return made("-n", target)


def test_the_example_is_what_the_command_prints() -> None:
    """The one block of output is there, and it is what the last command of `make plan` prints today."""
    shown = EXAMPLE.findall(README)
    assert shown[:1] == [example_output()]
    assert recipe("plan")[-1] == shown[0].splitlines()[0]


def test_planning_installs_no_torch() -> None:
    """`make plan` asks for no extra, `make test` for all of them."""
    assert not any("[" in line and "pip install" in line for line in recipe("plan"))
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    assert any(line.endswith("-e '.[run,weights,qlora,fp8,calibrate,tensorboard,hf,test,dev]'") for line in lines)


def test_the_first_page_is_short() -> None:
    """Nobody reads more than 150 lines before the first try."""
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize(("rung", "command"), [("traced", "trace"), ("rehearsed", "rehearse")])
def test_the_ladder_says_what_exists(rung: str, command: str) -> None:
    """A rung of the ladder is said to have no command exactly as long as there is none."""
    (row,) = re.findall(rf"^\| {rung} \|.*$", README, re.MULTILINE)
    assert ("no command yet" in row) == (command not in {name for name, _ in COMMANDS})


def typed() -> list[list[str]]:
    """The words of every strategist command of the page, in order."""
    lines = [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()]
    return [words[1:] for words in lines if words[0] == "strategist"]


def test_the_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every strategist command of the page but those that need torch, typed in this order in an empty folder, ends with 0."""
    monkeypatch.chdir(tmp_path)
    assert {words[0] for words in typed()} == {"plan", "explain", "size", "compare", "emit", "run"}
    for words in typed():
        if words[0] != "run" and "--verify" not in words:
            assert call(*words).code == 0, words


@pytest.mark.slow
def test_the_commands_that_trace_work(tmp_path: Path) -> None:
    """Every command of the page that traces, as a process of its own in an empty folder, ends with 0."""
    traced = [words for words in typed() if "--verify" in words]
    assert traced
    for words in traced:
        assert process(*words, cwd=tmp_path).code == 0, words


def test_the_python_works(capsys: pytest.CaptureFixture[str]) -> None:
    """The Python of the page runs and prints a mesh, a tree and nothing strange."""
    (program,) = blocks("python")
    names: dict[str, object] = {}
    exec(compile(program, "README.md", "exec"), names)
    assert capsys.readouterr().out.startswith("Mesh(")
    assert list(map(str, names["files"])) == ["plan.json", "train.py", "launch.sh"]  # type: ignore[call-overload]


def test_every_target_of_the_makefile_is_explained() -> None:
    """`make help` has a line for each target that somebody types."""
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    shown = made("help")
    assert targets is not None
    assert {line.split()[0] for line in shown} == set(targets[1].split())
    assert all(len(line.split()) > 2 for line in shown)
