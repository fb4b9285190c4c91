"""--config: flags from a file, under those of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.cli.flags import PLAN_FLAGS
from tests.cli.bad_inputs import written
from tests.cli.fuzzing import cases
from tests.cli.harness import call, plan_text

QUESTION = {
    "model": "llama-debug", "hardware": "cpu:4", "seq_len": 64, "global_batch": 8, "optimizer": "sgd", "headroom": 0.1,
    "policy": "fastest", "pin": "tp=2", "top": 3,
}  # fmt: skip


def toml(values: dict[str, Any]) -> str:
    """A TOML file of scalars."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def flags(values: dict[str, Any]) -> list[str]:
    """The same on the command line."""
    return [word for key, value in values.items() for word in (f"--{key.replace('_', '-')}", str(value))]


@cases(20)
@given(split=st.sets(st.sampled_from(sorted(QUESTION))))
def test_file_and_command_line_share_the_question(tmp_path: Path, split: set[str]) -> None:
    """However the flags are shared between file and command line, the Plan is the same to the byte."""
    in_file = {key: value for key, value in QUESTION.items() if key in split}
    typed = {key: value for key, value in QUESTION.items() if key not in split}
    file = written(tmp_path, "strategist.toml", toml(in_file) or "# nothing\n")
    ran = call("plan", "--json", "--config", file, *flags(typed))
    assert (ran.code, ran.out) == (0, plan_text(*flags(QUESTION)))


def test_the_command_line_wins(tmp_path: Path) -> None:
    """What stands in both places is read from the command line."""
    file = written(tmp_path, "a.toml", toml(QUESTION | {"seq_len": 128, "pin": "pp=2"}))
    ran = call("plan", "--json", "--config", file, "--seq-len", "64", "--pin", "tp=2")
    assert ran.out == plan_text(*flags(QUESTION))


def test_repeatable_flags_are_lists(tmp_path: Path) -> None:
    """rules may be one folder or a list of them."""
    written(tmp_path, "advice.toml", RULE)
    for value in (f'"{tmp_path}"', f'["{tmp_path}"]'):
        file = written(tmp_path, "c.cfg", f'model = "llama-debug"\nhardware = "cpu:2"\nrules = {value}\n')
        codes = [hint["code"] for hint in call("plan", "--json", "--config", file).document["hints"]]
        assert "W_MINE" in codes


RULE = """[[rule]]
id = "MY001"
name = "always"
when = "gpus >= 1"
effect = "advise"
code = "MINE"
because = "There are {gpus} devices."
source = "test"
fires = { gpus = 1 }
silent = { gpus = 0 }
"""


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("nodes = 2\nmodle = 'x'\n", "E_UNKNOWN_KEY", "line 2"),
        ("[plan]\nnodes = 2\n", "E_UNKNOWN_KEY", "line 1"),
        ("out = 'x.json'\n", "E_UNKNOWN_KEY", "out"),
        ("config = 'x.toml'\n", "E_UNKNOWN_KEY", "config"),
        ("force = true\n", "E_UNKNOWN_KEY", "force"),
        ("nodes = true\n", "E_TYPE", "nodes"),
        ("nodes = [2]\n", "E_TYPE", "nodes"),
        ("nodes = 1979-05-27\n", "E_TYPE", "nodes"),
        ("nodes = 2.0\n", "E_INTEGER", "--nodes"),
        ("headroom = nan\n", "E_NOT_FINITE", "--headroom"),
        ("nodes = 1\nnodes = 2\n", "E_DUPLICATE_KEY", "TOML"),
        ("nodes = \n", "E_TOML", "line 1"),
        ("", "E_EMPTY_FILE", "empty"),
    ],
)
def test_bad_settings(tmp_path: Path, text: str, code: str, words: str) -> None:
    """A setting is as strict as its flag, and a wrong key is told with its line."""
    ran = call("plan", "--json", "--model", "llama-debug", "--config", written(tmp_path, "strategist.toml", text))
    assert (ran.code, ran.error["code"]) == (2, code)
    assert words in ran.error["message"]


def test_every_flag_with_a_value_is_a_setting(tmp_path: Path) -> None:
    """Only --out and --config have no place in a file: they are about this one run."""
    keys = [flag.key for flag in PLAN_FLAGS if flag.metavar and flag.key not in ("out", "config")]
    file = written(tmp_path, "a.toml", "".join(f"{key} = ' '\n" for key in keys))
    ran = call("plan", "--json", "--config", file)
    assert ran.code == 2
    assert "E_UNKNOWN_KEY" not in ran.out
