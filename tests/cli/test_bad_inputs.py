"""Every row of the corpus ends as it says, with a code, a sentence and a hint, and without a traceback."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from strategist.errors import is_hostile
from tests.cli.bad_inputs import APART, CASES, OWED, PREFIXES, Row, case_of, corpus, written
from tests.cli.harness import Outcome, call, plan_file, plan_text, process

ROWS = [row for row in corpus() if (row.flag, row.value) not in (*OWED, *APART)]
REFUSED = [row for row in ROWS if row.ends[0]]
ACCEPTED = [row for row in ROWS if not row.ends[0]]
AS_PROCESSES = (
    ("--model-size", "-7B"),
    ("--gpu", r"h100\x1b[2J"),
    ("--nodes", "1000000000"),
    ("--hardware", "/dev/zero"),
    ("--hardware", "a FIFO with no writer"),
    ("--hardware", "JSON nested 200000 deep"),
    ("--hardware", "YAML: !!python/object/apply:os.system"),
    ("--model-config", "file is a pickle or .pt"),
    ("--pin", "tp=3 on 8 GPUs"),
    ("--job-name", "$(touch INJ)"),
    ("run", "plan for 8 ranks on a 4-GPU machine"),
)
"""Rows that are also typed into a process of its own."""


def with_json(words: list[str]) -> list[str]:
    """The words with --json, in front of a foreign command."""
    return [words[0], "--json", *words[1:]]


def names(row: Row) -> str:
    """A row's name in the list of tests."""
    return str(row)


def test_every_row_has_a_case() -> None:
    """No row of the corpus is left out, and no case is invented."""
    rows = {(row.flag, row.value) for row in corpus()}
    described = {*CASES, *OWED, *APART}
    assert described <= rows
    assert all(key in described or key[0] in PREFIXES for key in rows)


def test_owed_rows_are_pinned() -> None:
    """Only rows of commands that do not exist yet are left to a later issue, and those commands are refused today."""
    assert {flag: owner for (flag, _), owner in OWED.items()} == {"doctor": "later: doctor"}
    assert {call(flag, "x").code for flag, _ in OWED} == {2}


def assert_refused(row: Row, ran: Outcome) -> None:
    """The text form: code first, a sentence, a hint, nothing on stdout, nothing that steers a terminal."""
    exit_code, code = row.ends
    assert (ran.code, ran.out) == (exit_code, "")
    assert ran.err.startswith(str(code))
    assert ran.err.count("\n") >= 2
    assert "Traceback" not in ran.err
    assert not [c for c in ran.err if is_hostile(c) and c != "\n"]


def assert_refused_as_json(row: Row, ran: Outcome) -> None:
    """The JSON form: one document on stdout and nothing else anywhere."""
    error = ran.error
    assert (ran.code, error["code"]) == row.ends
    assert {"code", "message", "flag", "value", "hint"} <= error.keys()
    assert error["message"].endswith((".", "?"))
    assert error["hint"]
    assert error["value"] is None or len(error["value"]) <= 200
    assert ran.err == ""


@pytest.mark.parametrize("row", REFUSED, ids=names)
def test_refused_rows(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused input ends with its exit code and error code, as text and as JSON, and starts nothing."""
    monkeypatch.setattr(subprocess, "Popen", _never)
    monkeypatch.chdir(tmp_path)
    words = case_of(row)(tmp_path)
    assert_refused(row, call(*words))
    assert_refused_as_json(row, call(*with_json(words)))
    assert {path.name for path in tmp_path.iterdir()}.isdisjoint({"canary", "INJ"})


def _never(*_: object, **__: object) -> None:
    raise AssertionError("a process was started")


@pytest.mark.parametrize("row", ACCEPTED, ids=names)
def test_accepted_rows(row: Row, tmp_path: Path) -> None:
    """An accepted input is answered with a Plan, and what the row promises about it holds."""
    words = case_of(row)(tmp_path)
    text, document = call(*words), call(*with_json(words))
    assert (text.code, document.code, text.err, document.err) == (0, 0, "", "")
    assert "RECOMMENDED" in text.out
    PROMISES.get((row.flag, row.value), _plain)(document.document, text.out)


Promise = Callable[[Mapping[str, Any], str], None]


def _plain(plan: Mapping[str, Any], text: str) -> None:
    """Every accepted row is at least a Plan."""
    assert plan["format"] == "strategist-plan/1"


def _same_shape(*words: str) -> Promise:
    """The same model and layout as another way to ask."""

    def check(plan: Mapping[str, Any], text: str) -> None:
        other = json.loads(plan_text(*words))
        assert (plan["model"], plan["strategy"]) == (other["model"], other["strategy"])

    return check


def _same_machines(*words: str) -> Promise:
    """The same machines as another way to ask."""

    def check(plan: Mapping[str, Any], text: str) -> None:
        assert plan["cluster"] == json.loads(plan_text("--model", "llama-debug", *words))["cluster"]

    return check


def _hint(code: str) -> Promise:
    """A warning with this code."""

    def check(plan: Mapping[str, Any], text: str) -> None:
        assert code in [hint["code"] for hint in plan["hints"]]
        assert code in text

    return check


def _lone_device(plan: Mapping[str, Any], text: str) -> None:
    """All degrees are 1 and nothing is sent."""
    assert {plan["mesh"][axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")} == {1}
    assert not {term["name"] for term in plan["time"]["terms"]} & {"tp", "cp", "ep", "pp", "dp", "bubble"}


def _exact(plan: Mapping[str, Any], text: str) -> None:
    """Decimal arithmetic, not float rounding."""
    assert "6,738,415,616 parameters" in text
    assert ["--model-size", "6.738415616B"] in plan["request"]["given"]


def _dense(plan: Mapping[str, Any], text: str) -> None:
    """One expert that every token takes is a dense layer."""
    experts = plan["model"]["moe"]
    assert experts is None or (experts["experts"], experts["top_k"]) == (1, 1)
    assert plan["mesh"]["ep"] == 1


def _language_tower(plan: Mapping[str, Any], text: str) -> None:
    """The language tower's heads are used, and the report says where they come from."""
    assert plan["model"]["heads"] == 32
    assert "$.text_config" in text


def _rocm(plan: Mapping[str, Any], text: str) -> None:
    """Nothing that only CUDA knows."""
    assert not [word for word in ("CUDA", "cuda", "NVLink", "nvswitch") if word in text]


def _crosses(plan: Mapping[str, Any], text: str) -> None:
    """The warning names the predicted cost."""
    _hint("W_TP_CROSS_NODE")(plan, text)
    assert "% of the step" in " ".join(text.split())


NAMED = ("--hardware", "dgx-h100")
PROMISES: Mapping[tuple[str, str], Promise] = {
    ("--model-size", "7b"): _same_shape("--model-size", "7B", *NAMED),
    ("--model-size", "7e9"): _same_shape("--model-size", "7B", *NAMED),
    ("--model-size", "6.738415616B"): _exact,
    ("--gpus-per-node", "7"): _hint("W_ODD_NODE"),
    ("--gpus-per-node", "1"): _lone_device,
    ("--gpu", "h100"): lambda plan, text: _assumes(plan, "h100-sxm-80gb"),
    ("--gpu", "rtx 4090"): _same_machines("--gpu", "rtx4090"),
    ("--gpu", "mi300x"): _rocm,
    ("--gpu-memory", "80GB vs 74.5GiB"): _same_machines(
        "--gpu", "h100-sxm-80gb", "--gpu-memory", "74.505805969238281250GiB"
    ),
    ("--inter-bw", "400Gb/s"): _same_machines("--gpu", "h100-sxm-80gb", "--inter-bw", "50GB/s"),
    ("--model-config", "auto_map pointing to remote code"): _hint("W_REMOTE_CODE_IGNORED"),
    ("--model-config", "_attn_implementation_internal set to a hub repository"): _hint("W_REMOTE_CODE_IGNORED"),
    ("--model-config", "vision-language config with vision_config.num_attention_heads 1"): _language_tower,
    ("--model-config", "num_experts 1 top_k 1"): _dense,
    ("--pin", "tp=16 with 8 GPUs per node"): _crosses,
}


def _assumes(plan: Mapping[str, Any], value: str) -> None:
    """What a shorthand was taken for is listed as an assumption."""
    assert value in [said["value"] for said in plan["assumptions"]]


def test_denied_variables_can_be_allowed(tmp_path: Path) -> None:
    """LD_PRELOAD is set once --allow-env says that it is meant."""
    words = ("--to", "torchrun", "--out", str(tmp_path / "job"), "--env", "LD_PRELOAD=x", "--allow-env")
    assert call("emit", plan_file(tmp_path), *words).code == 0
    assert "export LD_PRELOAD=x\n" in (tmp_path / "job/launch.sh").read_text(encoding="utf-8")


def test_out_may_begin_with_a_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--out=-p.json names a file, and so does --out -p.json, because no flag is called -p.json."""
    monkeypatch.chdir(tmp_path)
    assert call("plan", "--model", "llama-debug", "--hardware", "cpu:2", "--out=-p.json").code == 0
    assert call("plan", "--model", "llama-debug", "--hardware", "cpu:2", "--out", "-q.json").code == 0
    assert (tmp_path / "-p.json").read_bytes() == (tmp_path / "-q.json").read_bytes()


def test_unknown_architectures_with_remote_code_are_refused(tmp_path: Path) -> None:
    """A model_type without a reader stays unknown even when the file says where its code lies."""
    file = written(tmp_path, "c.json", '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}')
    ran = call("plan", "--json", "--model-config", file, *NAMED)
    assert (ran.code, ran.error["code"]) == (2, "E_UNKNOWN_ARCH")


def test_all_faults_are_told_at_once() -> None:
    """Three wrong flags are three errors in one answer."""
    ran = call("plan", "--json", "--tokens", "abc", "--nodes", "0", "--headroom", "2")
    codes = [ran.error["code"], *(other["code"] for other in ran.error["also"])]
    assert (ran.code, codes) == (2, ["E_TOO_SMALL", "E_PARSE", "E_RANGE"])


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if (row.flag, row.value) in AS_PROCESSES], ids=names)
def test_refused_rows_as_processes(row: Row, tmp_path: Path) -> None:
    """A process of its own ends the same way: same code, same single document, nothing executed."""
    words = case_of(row)(tmp_path)
    ran = process(*with_json(words), cwd=tmp_path)
    assert_refused_as_json(row, ran)
    assert {path.name for path in tmp_path.iterdir()}.isdisjoint({"canary", "INJ"})
