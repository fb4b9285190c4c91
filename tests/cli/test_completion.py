"""Completion scripts: right for the shell, and complete for the words of today's commands."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

import pytest

from strategist.catalog import rows
from strategist.cli import COMMANDS
from strategist.cli.completion_command import SHELLS
from strategist.rulebook.rule import load_rules
from tests.cli.harness import call


@cache
def script(shell: str) -> str:
    """The script for a shell."""
    return call("completion", shell).out


def completed(*words: str) -> list[str]:
    """What bash offers after these words; the last one is being typed."""
    program = f"""{script("bash")}
COMP_WORDS=(strategist "$@") COMP_CWORD=$#
_strategist
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    ran = subprocess.run(
        ["bash", "-c", program, "bash", *words], capture_output=True, text=True, check=True, timeout=20
    )
    return ran.stdout.split()


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_are_right_for_their_shell(shell: str) -> None:
    """The shell itself finds no fault in its script, where it is installed; every command is in it."""
    assert [name for name, _ in COMMANDS if name not in script(shell)] == []
    if shutil.which(shell):
        ran = subprocess.run(
            [shell, "-n"], input=script(shell), capture_output=True, text=True, check=False, timeout=20
        )
        assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("pl",), ["plan"]),
        (("co",), ["compare", "completion"]),
        (("plan", "--gpu", "h10"), [row["name"] for row in rows("gpus") if row["name"].startswith("h10")]),
        (("plan", "--model", "llama-3.1"), ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"]),
        (("topology", "--hardware", "dgx-h1"), ["dgx-h100"]),
        (("plan", "--pol"), ["--policy"]),
        (("plan", "--policy", ""), ["hf", "fastest"]),
        (("run", "--st"), ["--steps"]),
        (("check", "--s"), ["--seal"]),
        (("explain", "--policy"), []),
        (("catalog", "mo"), ["models"]),
        (("help", "E_UNI"), ["E_UNIT"]),
        (("help", "pl"), ["plan"]),
        (("rule", "HF20"), [rule.id for rule in load_rules("hf_decisions") if rule.id.startswith("HF20")]),
        (("plan", "--frontend", "au"), ["auto"]),
        (("plan", "--policy", "=", "f"), ["fastest"]),
        (("plan", "--objective", "="), ["time", "cost", "memory", "simplicity"]),
        (("emit", "--to", "s"), ["slurm", "skypilot"]),
    ],
)
def test_bash_completes(words: tuple[str, ...], offered: list[str]) -> None:
    """bash offers the commands, a command's own flags, and names of devices, machines, models, rules and targets."""
    assert offered == completed(*words)
    assert offered or words[-1] == "--policy"


def test_fish_says_which_flag_belongs_to_which_command() -> None:
    """A flag of plan alone is offered after plan alone."""
    rows_ = [row for row in script("fish").splitlines() if " -l top" in row]
    assert [row for row in rows_ if "__fish_seen_subcommand_from plan" in row] == rows_ != []


def test_unknown_shells() -> None:
    """A shell without a script is refused with the known ones."""
    assert call("completion", "tcsh", "--json").error["code"] == "E_CHOICE"


def test_words_with_quotes_are_quoted_for_fish() -> None:
    """Every line of fish's completion closes the quotes that it opens, and says the whole summary."""
    lines = call("completion", "fish").out.splitlines()
    assert all(line.replace("\\'", "").count("'") % 2 == 0 for line in lines)
    assert any("run a Plan\\'s program" in line for line in lines)
