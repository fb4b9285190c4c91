"""`-` in place of a file: what is piped in is read as the file would be."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.cli.bad_inputs import FLAT, LLAMA
from tests.cli.harness import SMALL as QUESTION
from tests.cli.harness import Outcome, call, plan_file, plan_text, runs_file


class Piped(io.TextIOWrapper):
    """Standard input that a program writes into."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="ascii")


class Typed(Piped):
    """Standard input with a person at its other end."""

    def isatty(self) -> bool:
        """A terminal."""
        return True


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes, *words: str) -> Outcome:
    """A command with something piped into it."""
    monkeypatch.setattr(sys, "stdin", Piped(data))
    return call(*words)


@pytest.mark.parametrize("command", ["explain", "check", "predict", "diff", "compare"])
def test_a_plan_is_read_from_standard_input(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answer as for the file, a mark of order in front of it or not, whatever the terminal's letters are."""
    path = plan_file(tmp_path)
    other = [path] if command in ("diff", "compare") else []
    of_file = call(command, path, *other, "--json")
    for mark in (b"", b"\xef\xbb\xbf"):
        found = piped(monkeypatch, mark + plan_text(*QUESTION).encode(), command, "-", *other, "--json")
        assert (found.code, found.out.replace('"-"', f'"{path}"')) == (of_file.code, of_file.out)


def test_one_plan_may_stand_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input can be read once; what it held is kept for whoever reads it again."""
    assert piped(monkeypatch, plan_text(*QUESTION).encode(), "diff", "-", "-").code == 0


@pytest.mark.slow
def test_tables_and_settings_are_read_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of runs, and flags for --config."""
    table = Path(runs_file(tmp_path))
    found = piped(monkeypatch, table.read_bytes(), "accuracy", "-", "--json")
    assert found.out == call("accuracy", str(table), "--json").out
    found = piped(monkeypatch, b'model = "llama-debug"\nhardware = "cpu:2"\n', "plan", "--config", "-", "--json")
    assert found.document["model"]["name"] == "llama-debug"
    for flag, document, kept in (
        ("--model", LLAMA, ("--hardware", "dgx-h100")),
        ("--hardware", json.loads(FLAT), ("--model", "7B")),
    ):
        said = piped(monkeypatch, json.dumps(document).encode(), "plan", flag, "-", *kept, "--json")
        path = tmp_path / "same.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        assert said.document["mesh"] == call("plan", flag, str(path), *kept, "--json").document["mesh"]


AS_TOML = '# ours\ngpu = "h100-sxm-80gb"\ngpus_per_node = 8\nnodes = 2\n'
AS_YAML = "---\ngpu: h100-sxm-80gb\ngpus_per_node: 8\nnodes: 2\n"


@pytest.mark.parametrize("text", [AS_TOML, AS_YAML, AS_YAML.removeprefix("---\n")])
def test_documents_in_yaml_and_toml_are_read_from_standard_input(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines, and a model's configuration, as in JSON."""
    kept = ("--model", "llama-3.2-1b", "--pin", "dp=16", "--json")
    in_json = piped(monkeypatch, FLAT.encode(), "plan", "--hardware", "-", *kept)
    assert in_json.code == 0
    assert piped(monkeypatch, text.encode(), "plan", "--hardware", "-", *kept).out == in_json.out
    between = " = " if "=" in text else ": "
    rows = (f"{key}{between}{json.dumps(value)}" for key, value in LLAMA.items() if value is not None)
    said = piped(monkeypatch, "\n".join(rows).encode(), "predict", "--model-config", "-", "--hardware", "dgx-h100", "--strategy", "dp=8", "--json")  # fmt: skip
    assert said.document["model"]["layers"] == LLAMA["num_hidden_layers"]


def test_other_frameworks_files_are_read_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework's YAML and TOML say the same as from files."""
    monkeypatch.chdir(tmp_path)
    texts = {"a.yaml": "distributed_type: FSDP\nnum_processes: 8\n", "a.toml": "[training]\nlocal_batch_size = 1\n[parallelism]\ntensor_parallel_degree = 2\n"}  # fmt: skip
    for name, text in texts.items():
        Path(name).write_text(text, encoding="utf-8")
        found = piped(monkeypatch, text.encode(), "validate", "-", "--json")
        assert found.out.replace('"-"', f'"{name}"') == call("validate", name, "--json").out


@pytest.mark.parametrize(
    ("text", "code"),
    [("{nodes: 1}", "E_JSON"), ("plain words", "E_JSON"), ("a = ", "E_TOML"), ("a: [", "E_YAML"), ("[[1, 2]]", "E_TYPE")],
)  # fmt: skip
def test_each_language_has_its_own_refusal(text: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins like JSON is held to JSON, and so on."""
    found = piped(monkeypatch, text.encode(), "plan", "--model", "7B", "--hardware", "-", "--json")
    assert (found.code, found.error["code"]) == (2, code)


@pytest.mark.parametrize(
    ("stdin", "words", "code"),
    [
        (Piped(b""), ("check", "-"), "E_EMPTY_FILE"),
        (Typed(b""), ("check", "-"), "E_MISSING"),
        (None, ("check", "-"), "E_MISSING"),
        (Piped(b"{}"), ("check", "-"), "E_KIND"),
        (Piped(b"\xff\xfe{"), ("check", "-"), "E_ENCODING"),
        (Piped(b" " * (16 * 2**20 + 1)), ("check", "-"), "E_FILE_TOO_LARGE"),
        (Piped(b"{}"), ("check", "-", "--seal"), "E_CONFLICT"),
        (Piped(b"{}"), ("plan", *QUESTION, "--out", "-"), "E_NOT_A_FILE"),
    ],
)
def test_what_is_not_piped_in(
    stdin: Piped | None, words: tuple[str, ...], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, a person, another document, other letters and too much are refused like such files; nothing is written to `-`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", stdin)
    found = call(*words, "--json")
    assert (found.code, found.error["code"]) == (2, code)
    assert list(tmp_path.iterdir()) == []
