"""`compare`: every column adds up to what its layout costs when it is asked for alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import SMALL, call, hand_written, plan_file, plan_text

LAYOUTS = ("dp=2", "tp=2", "pp=2,zero=0", "dp_shard=2,zero=3,recompute=full")


def column(found: Any, part: str, number: int) -> dict[str, int]:
    """The terms of one side that are not zero."""
    return {row["name"]: row["values"][number] for row in found[part] if row["values"][number]}


def test_a_column_is_the_prediction_of_its_layout() -> None:
    """The terms of each layout are those of `predict`, and they add up to its step and peak exactly."""
    found = call("compare", *LAYOUTS, *SMALL, "--json").document
    for number, layout in enumerate(LAYOUTS):
        alone = call("predict", *SMALL, "--strategy", layout, "--json").document
        worst = max(alone["memory"]["stages"], key=lambda stage: sum(term["bytes"] for term in stage["terms"]))
        assert column(found, "memory", number) == {term["name"]: term["bytes"] for term in worst["terms"]}
        times = {term["name"]: term["exposed_ns"] for term in alone["time"]["terms"] if term["exposed_ns"]}
        assert column(found, "time", number) == times
        assert sum(times.values()) == round(found["sides"][number]["time"]["value"] * 1e9)
        assert sum(column(found, "memory", number).values()) == found["sides"][number]["memory"]["value"]


def test_images_are_called_images() -> None:
    """Where a sequence is an image neither a comparison nor a size speaks of tokens."""
    questions = (
        (
            "compare",
            "dp=8,micro_batch=32",
            "dp=8,zero=3,micro_batch=32",
            "--model",
            "resnet50",
            "--hardware",
            "dgx-a100-80gb",
        ),
        ("size", "--model", "resnet50", "--tokens", "100M", "--deadline", "30d", "--gpu", "h100-sxm-80gb"),
    )
    for question in questions:
        text = call(*question).out
        assert " images" in text
        assert "token" not in text


def test_the_order_of_the_sides_is_the_order_of_the_words() -> None:
    """Turning the words round turns the columns round and changes no figure."""
    there, back = (call("compare", *words, *SMALL, "--json").document for words in (LAYOUTS, LAYOUTS[::-1]))
    assert there["sides"] == back["sides"][::-1]
    for part in ("memory", "time"):
        assert [row | {"values": row["values"][::-1]} for row in there[part]] == back[part]


def test_plans_stand_as_they_are_in_their_files(tmp_path: Path) -> None:
    """A Plan's column is its own ledger, and a Plan beside a layout of the same question is the same column."""
    path = plan_file(tmp_path)
    found = call("compare", path, path, "dp=2,mbs=1", *SMALL, "--json").document
    plan = call("predict", path, "--json").document
    assert found["sides"][0] == found["sides"][1]
    assert found["sides"][0]["layout"] == plan["layout"]
    assert found["sides"][0]["time"] == plan["time"]["step"]


def test_what_is_no_longer_allowed_or_does_not_fit_is_said(tmp_path: Path) -> None:
    """A layout that a rule forbids and one that is too large are shown, each with its verdict."""
    small = call("compare", "dp=2", "tp=2", "--model", "llama-3.1-8b", "--hardware", "cpu:2", "--json").document
    assert {side["legal"] for side in small["sides"]} == {True}
    big = call("compare", "dp=8", "dp=8,zero=3,recompute=full", "--model", "llama-2-7b", "--hardware", "dgx-h100", "--json").document  # fmt: skip
    assert [side["fits"] for side in big["sides"]] == [False, True]
    assert "NO" in call("compare", "dp=8", "tp=8", "--model", "llama-2-7b", "--hardware", "dgx-h100").out
    forbidden = call("compare", "tp=3,dp=1", "tp=1,dp=3", "--model", "llama-debug", "--hardware", "cpu:3", "--global-batch", "3", "--json").document  # fmt: skip
    assert [side["legal"] for side in forbidden["sides"]] == [False, True]


def test_different_questions_are_told(tmp_path: Path) -> None:
    """Where the sides train something else or elsewhere the report says what differs, and only then."""
    other = plan_file(tmp_path, "--model", "llama-debug", "--hardware", "cpu:4", name="other.json")
    mixed = " ".join(call("compare", plan_file(tmp_path), other).out.split())
    assert "hardware differ" in mixed
    assert "different questions" not in call("compare", *LAYOUTS, *SMALL).out


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_every_figure_is_shown_at_any_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each term has its place however narrow the terminal is, and no line is wider than it."""
    monkeypatch.setenv("COLUMNS", str(columns))
    ran = call("compare", *LAYOUTS, *SMALL)
    found = call("compare", *LAYOUTS, *SMALL, "--json").document
    assert max(map(len, ran.out.splitlines())) <= columns
    assert [row["name"] for part in ("time", "memory") for row in found[part] if row["name"] not in ran.out] == []


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("plan.json",), "E_MISSING"),
        (("plan.json", "plan.json", "--model", "gpt2"), "E_CONFLICT"),
        (("tp=2", "dp=2"), "E_MISSING"),
        (("tp=2", "dq=2", *SMALL), "E_CHOICE"),
        (("tp=2", "none.json", *SMALL), "E_FILE_NOT_FOUND"),
    ],
)
def test_refusals(words: tuple[str, ...], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One side, flags that nothing asks, a layout without a question, a misspelt choice and a missing file are refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(plan_text(*SMALL), encoding="utf-8")
    ran = call("compare", *words, "--json")
    assert (ran.code, ran.error["code"]) == (2, code)


def test_an_unsound_plan_is_not_compared(tmp_path: Path) -> None:
    """A hand-written plan is compared, one that breaks an invariant is refused."""
    sound = hand_written(tmp_path)
    assert call("compare", sound, sound).code == 0
    broken = hand_written(tmp_path, name="broken.json")
    text = Path(broken).read_text(encoding="utf-8").replace('"accumulation": ', '"accumulation": 1')
    Path(broken).write_text(text, encoding="utf-8")
    ran = call("compare", sound, broken, "--json")
    assert (ran.code, ran.error["code"]) == (3, "E_FRAMEWORK_LEGALITY")
