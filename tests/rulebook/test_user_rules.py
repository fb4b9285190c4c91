"""Rules of one's own: a folder of them joins ours, and every fault in it is told with file, rule and remedy."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from strategist import StrategistError, recommend
from strategist.rulebook.books import rows_in, rules_folder
from strategist.rulebook.expression import parse
from strategist.rulebook.rule import BOOKS, load_families, load_rules, read_rule
from tests.cli.harness import call
from tests.source import ROOT

GOOD: dict[str, Any] = {
    "id": "MY001",
    "name": "no-tensor-parallelism-here",
    "when": "tp > 1",
    "effect": "forbid",
    "code": "TOPOLOGY",
    "because": "tp={tp} is not wanted in this house.",
    "hint": "Leave tp at 1.",
    "source": "our handbook",
    "fires": {"tp": 2},
    "silent": {"tp": 1},
}


def toml(value: Any) -> str:
    """A TOML value."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def folder_of(path: Path, book: str = "legality", **changes: Any) -> str:
    """A folder with one rule; a change of None leaves a key out."""
    row = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    path.mkdir(exist_ok=True)
    text = "[[rule]]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in row.items())
    (path / f"{book}.toml").write_text(text, encoding="utf-8")
    return str(path)


def test_a_forbidding_rule_forbids(tmp_path: Path) -> None:
    """What the rule forbids is gone from the space, and the plan counts it under the rule's id."""
    words = {"model": "llama-debug", "hardware": "cpu:4"}
    plain, ruled = recommend(**words), recommend(**words, rules=[folder_of(tmp_path)])
    assert any("tp=" in alternative.layout for alternative in plain.alternatives)
    assert not any("tp=" in alternative.layout for alternative in ruled.alternatives)
    assert "MY001" in [refusal.rule for refusal in ruled.refusals]
    assert plain.book != ruled.book


def test_a_rule_that_forbids_everything(tmp_path: Path) -> None:
    """Its sentence and its code become the error."""
    folder = folder_of(
        tmp_path, when="dp >= 1", fires={"dp": 1}, silent={"dp": 0}, because="Nothing runs on {gpus} devices."
    )
    ran = call("plan", "--json", "--model", "llama-debug", "--hardware", "cpu:2", "--rules", folder)
    assert (ran.code, ran.error["code"]) == (3, "E_TOPOLOGY")
    assert ran.error["message"] == "Nothing runs on 2 devices."
    assert "MY001" in ran.error["hint"]


def test_an_advising_rule_advises(tmp_path: Path) -> None:
    """It appears as a warning under its id, or under its own code."""
    for code, shown in ((None, "W_MY001"), ("CAREFUL", "W_CAREFUL")):
        folder = folder_of(
            tmp_path / shown, "advice", effect="advise", code=code, when="gpus > 1", fires={"gpus": 2}, silent={"gpus": 1},
            because="There are {gpus} devices.",
        )  # fmt: skip
        hints = recommend("llama-debug", "cpu:2", rules=[folder]).hints
        assert "There are 2 devices. Leave tp at 1." in [hint.sentence for hint in hints if hint.code == shown]


def test_a_preferring_rule_joins_the_table(tmp_path: Path) -> None:
    """Ours speak first; where none of ours can be followed, the user's decides."""
    folder = folder_of(
        tmp_path, "hf_decisions", effect="prefer", code=None, hint=None, families=[["offload"]], when="gpus > 1",
        fires={"gpus": 2}, silent={"gpus": 1}, because="We offload.",
    )  # fmt: skip
    plan = recommend("llama-2-7b", "aws-g5.12xlarge", seq_len=2048, rules=[folder])
    assert [reason.rule for reason in plan.reasons] == ["HF203", "MY001"]
    assert plan.decision.family == "offload"


def test_several_folders(tmp_path: Path) -> None:
    """Folders add up; an id that stands twice is refused, also against ours."""
    first, second = folder_of(tmp_path / "a"), folder_of(tmp_path / "b", id="MY002", name="a-second-rule-here")
    assert {"MY001", "MY002"} <= {rule.id for rule in load_rules("legality", (first, second))}
    for other in (folder_of(tmp_path / "c"), folder_of(tmp_path / "d", id="LEG101")):
        with pytest.raises(StrategistError, match="stands twice"):
            load_rules("legality", (first, other))


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"id": None}, "MISSING", "lacks 'id'"),
        ({"source": None}, "MISSING", "lacks 'source'"),
        ({"fires": None}, "MISSING", "lacks 'fires'"),
        ({"colour": "red"}, "UNKNOWN_KEY", "colour"),
        ({"effect": "hope"}, "CHOICE", "hope"),
        ({"when": "tp >"}, "RULE", "not an expression"),
        ({"when": "tq > 1"}, "RULE", "unknown word 'tq'"),
        ({"when": "open('x')"}, "RULE", "not allowed"),
        ({"when": 3}, "TYPE", "when"),
        ({"id": 3}, "TYPE", "id"),
        ({"because": ["x"]}, "TYPE", "because"),
        ({"fires": 1}, "TYPE", "fires"),
        ({"families": "zero"}, "TYPE", "families"),
        ({"families": [["zeero"]]}, "RULE", "zeero"),
        ({"because": "{tq} ranks."}, "RULE", "tq"),
        ({"because": "{tp:q}"}, "RULE", "tp:q"),
        ({"code": "NOPE"}, "CHOICE", "NOPE"),
        ({"code": None}, "MISSING", "code"),
        ({"fires": {"tp": 1}}, "RULE", "does not behave"),
        ({"silent": {"tp": 2}}, "RULE", "does not behave"),
        ({"fires": {}}, "RULE", "lacks 'tp'"),
        ({"fires": {"tp": "two"}}, "RULE", "cannot be computed"),
        ({"when": "schedule == 'gpipe'", "fires": {"schedule": "zigzag"}}, "RULE", "fires"),
        ({"effect": "advise"}, "CHOICE", "legality"),
    ],
)
def test_faults_are_told(tmp_path: Path, changes: dict[str, Any], code: str, words: str) -> None:
    """Each fault of a row is an error of its own, with the file or the rule in its sentence and a hint."""
    folder = folder_of(tmp_path, **changes)
    for typed in (("plan", "--model", "llama-debug", "--hardware", "cpu:2"), ("rule",)):
        ran = call(typed[0], "--json", *typed[1:], "--rules", folder)
        assert (ran.code, ran.error["code"]) == (2, f"E_{code}")
        assert words in ran.error["message"]
        assert "MY001" in ran.error["message"] or "legality.toml" in ran.error["message"]
        assert ran.error["hint"]


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({}, "E_MISSING"),
        ({"notes.txt": "x"}, "E_MISSING"),
        ({"rules.toml": "[[rule]]"}, "E_UNKNOWN_KEY"),
        ({"families.toml": "[[family]]"}, "E_UNKNOWN_KEY"),
        ({"legality.toml": "[[rule"}, "E_TOML"),
        ({"legality.toml": "[[other]]"}, "E_RULE"),
        ({"legality.toml": "rule = 3"}, "E_RULE"),
        ({"legality.toml": "rule = [3]"}, "E_RULE"),
        ({"legality.toml": ""}, "E_EMPTY_FILE"),
    ],
)
def test_faults_of_folders(tmp_path: Path, files: dict[str, str], code: str) -> None:
    """A folder without a book of rules, or with a file that looks like one, is refused instead of passed over."""
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    ran = call("plan", "--json", "--model", "llama-debug", "--hardware", "cpu:2", "--rules", str(tmp_path))
    assert (ran.code, ran.error["code"]) == (2, code)


def test_folders_that_are_none() -> None:
    """A file and a missing path are told apart."""
    for path, code in (
        (__file__, "E_NOT_A_FILE"),
        ("/nonexistent", "E_FILE_NOT_FOUND"),
        ("a\x00b", "E_FILE_NOT_FOUND"),
    ):
        ran = call("rule", "--json", "--rules", path)
        assert (ran.code, ran.error["code"]) == (2, code)


def test_the_example_of_the_readme_is_a_rule(tmp_path: Path) -> None:
    """The row that rules/README.md shows can be put into a folder and used."""
    text = (ROOT / "rules/README.md").read_text(encoding="utf-8")
    block = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert block is not None
    (tmp_path / "legality.toml").write_text(block[1], encoding="utf-8")
    assert "MY001" in [rule.id for rule in load_rules("legality", (str(tmp_path),))]


@pytest.mark.slow
def test_an_edited_book_of_ours_is_read_again(tmp_path: Path) -> None:
    """Rows that were kept when a book was checked last are used as long as its text is that text, and no longer."""
    edited = tmp_path / "rules"
    shutil.copytree(rules_folder(), edited)
    book = edited / "advice.toml"
    program = (
        "import sys; from strategist.rulebook import books, rule;"
        "books.rules_folder = rule.rules_folder = lambda: sys.argv[1];"
        "print([books.rows_in(sys.argv[1], name)[1] is not None for name in books.KEYS], rule.load_rules('advice')[0].name)"
    )
    same = subprocess.run((sys.executable, "-c", program, edited), capture_output=True, text=True, check=True).stdout
    name = load_rules("advice")[0].name
    assert same == f"[True, True, True, True, True] {name}\n"
    book.write_text(book.read_text(encoding="utf-8").replace(f'"{name}"', '"another-name"'), encoding="utf-8")
    other = subprocess.run((sys.executable, "-c", program, edited), capture_output=True, text=True, check=True).stdout
    assert other == "[True, True, False, True, True] another-name\n"


@pytest.mark.parametrize("book", BOOKS)
def test_our_kept_rows_pass_the_checks_that_they_are_spared(book: str) -> None:
    """What is kept of our books is not checked when a plan begins, so it is here: every row as if it were a user's."""
    rows, words = rows_in(rules_folder(), book)
    checked = [read_rule(row, book, book) for row in rows]
    assert words is not None
    assert [(rule.id, rule.words) for rule in checked] == [(rule.id, rule.words) for rule in load_rules(book)]


def test_our_kept_families_are_expressions() -> None:
    """The same of the families, whose conditions are read without a check as well."""
    rows, words = rows_in(rules_folder(), "families")
    assert words is not None
    assert [ast.dump(parse(row["when"], row["name"])) for row in rows] == [ast.dump(f.when) for f in load_families()]
