"""Lines for people: nothing is lost or too wide, numbers keep their units, figures stand under figures."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist import recommend
from strategist.document.plan import Plan
from strategist.facts.clusters import load_cluster
from strategist.reports.brief import brief, hardware_words, option_words
from strategist.reports.lines import SHORT, folded, phrases, table, text_of
from strategist.reports.text import explain_text
from tests.plans import make_plan
from tests.strategies import CI

WORDS = st.lists(st.text("abc-", min_size=1, max_size=14), min_size=1, max_size=40).map(" ".join)
UNITS = ("GiB", "MiB", "GB/s", "k", "ms", "s", "%")


@CI
@given(WORDS, st.integers(14, 60))
def test_folding_loses_nothing_and_leaves_no_word_alone(text: str, room: int) -> None:
    """Every word comes out once and in order, within the room, in as few lines as without care for the last one."""
    pieces = folded(text, room)
    assert " ".join(pieces).split() == text.split()
    assert max(map(len, pieces)) <= room
    greedy = 1
    used = 0
    for word in text.split():
        fits = used + bool(used) + len(word) <= room
        greedy, used = (greedy, used + bool(used) + len(word)) if fits else (greedy + 1, len(word))
    assert len(pieces) == greedy


@CI
@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(UNITS)), min_size=1, max_size=30), st.integers(12, 60))
def test_numbers_keep_their_units(values: list[tuple[int, str]], room: int) -> None:
    """No line ends with a number whose unit begins the next one."""
    pieces = folded(" and ".join(f"{number} {unit}" for number, unit in values), room)
    assert [piece for piece in pieces if re.search(r"\d$", piece)] == []


def test_a_last_word_gets_company() -> None:
    """A short word that would stand alone in the last line is joined by the words before it."""
    pieces = folded("one two three four five six seven eight nine ten", 45)
    assert len(pieces) == 2
    assert len(pieces[-1]) >= SHORT


def test_phrases_are_not_broken() -> None:
    """Lines are broken between phrases, and inside only where one phrase is wider than the room."""
    assert folded(phrases(("alpha beta", "gamma delta", "epsilon")), 12) == ["alpha beta", "gamma delta", "epsilon"]
    assert folded(phrases(("alpha beta gamma", "delta")), 12) == ["alpha beta", "gamma  delta"]


def test_figures_are_aligned_to_the_right() -> None:
    """A column of figures ends at one place."""
    rows = table([("a", "9 GiB", "x"), ("b", "127 GiB", "y")], 40, right=(1,))
    assert [row.index("GiB") for row in text_of(rows).splitlines()] == [9, 9]


QUESTIONS = (
    ("7B", None, {}),
    ("70B", "dgx-h100:4", {}),
    ("llama-debug", "cpu:4", {}),
    ("mixtral-8x7b", "dgx-h100:4", {"tokens": 10**12}),
    ("llama-3.1-8b", "dgx-a100-80gb:4", {"pin": "pp=4,virtual_stages=2"}),
)


@cache
def plan_of(number: int) -> Plan:
    """A plan of the questions above."""
    model, hardware, fields = QUESTIONS[number]
    return recommend(model, hardware, **fields)


@pytest.mark.parametrize("number", range(len(QUESTIONS)))
@pytest.mark.parametrize("width", [20, 40, 44, 53, 60, 79, 80, 100, 120, 200])
def test_reports_keep_to_the_width(number: int, width: int) -> None:
    """Neither report has a line beyond the terminal, a trailing number without its unit, or a blank that should not be
    printed."""
    for lines in (brief(plan_of(number), width), explain_text(plan_of(number), width)):
        text = text_of(lines)
        assert max(map(len, text.splitlines())) <= width
        assert "\u00a0" not in text


@pytest.mark.parametrize("number", range(len(QUESTIONS)))
@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_the_tree_is_a_column_of_figures(number: int, width: int) -> None:
    """Every figure of the tree ends in one column, its unit begins in one, every note in one, and no name is cut."""
    rows = text_of(explain_text(plan_of(number), width)).splitlines()
    head = next(i for i, row in enumerate(rows) if row.strip() == "predicted")
    tree = rows[head + 1 : rows.index("rules")]
    tree = tree[: tree.index("")]
    figures = [
        match for row in tree if (match := re.match(r" {0,6}[a-z][a-z_, 0-9]*? +([\d.]+) ([a-zA-Z]+)( +|$)", row))
    ]
    assert len({match.end(1) for match in figures}) == 1
    notes = {match.end() for match in figures if match.end() < len(match.string)}
    notes |= {len(row) - len(row.lstrip()) for row in tree if not re.match(r" {0,6}\S", row)}
    assert len(notes) == 1
    assert any(row.startswith("  exposed communication ") for row in tree)


PAIR = {"a": "gpu0", "b": "gpu1", "kind": "nvlink", "bw": "50GB/s"}


@pytest.mark.parametrize(
    ("hardware", "words"),
    [("gb200-nvl72:2", "36 nodes x 4 x GB200, nvswitch 900 GB/s each way among 72, 200 GB/s per node between nodes"),
     ("p6e-gb300.36xlarge:2", "2 nodes x 4 x GB300, nvswitch 900 GB/s each way among 72"),
     ({"nodes": [{"gpu": "a100-sxm-80gb", "gpu_count": 8, "count": 2}], "oversubscription": 4.0},
      "2 nodes x 8 x A100-SXM-80GB, nvswitch 300 GB/s each way, 200 GB/s per node between nodes; 4 times oversubscribed"),
     ({"nodes": [{"gpu": "rtx-3090", "gpu_count": 2, "links": [PAIR]}]}, "1 node x 2 x RTX-3090, linked one by one, at most 50 GB/s each way")],
)  # fmt: skip
def test_machines_are_said_with_what_joins_them(hardware: Any, words: str) -> None:
    """Racks name how many share their links, and a spine that is narrower than its leaves is said; links one by one are no topology `none`."""
    plan = make_plan()
    assert hardware_words(replace(plan, cluster=load_cluster(hardware))) == words


def test_every_choice_of_a_layout_is_said_once() -> None:
    """Whatever differs from a plain layout has its words, no two choices the same."""
    chosen: tuple[dict[str, Any], ...] = (
        {"compression": "bf16"}, {"loss": "chunked"}, {"zero": 3}, {"recompute": "full"}, {"offload": "optimizer"}, {"tiling": 8},
        {"sequence_parallel": True}, {"context_parallel": "ring"}, {"schedule": "gpipe"},
    )  # fmt: skip
    plain = option_words(make_plan()).split(", ")
    for one in chosen:
        said = option_words(make_plan(**one)).split(", ")
        assert len(set(said)) == len(said)
        assert said != plain, one
