"""The whole product of predicate values: exactly one rule answers each, and the committed table says which."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from docs.make_pages import ASKED, PAGES, PLACES, PREDICATES, answers, is_possible, situations
from strategist.rulebook.rule import load_rules
from tests.source import ROOT

TREE = {"HF101", "HF102", "HF103", "HF201", "HF202", "HF203", "HF204", "HF301", "HF302"}
GAPS = {"HF901", "HF902"}


def test_every_situation_has_exactly_one_answer() -> None:
    """Of all combinations of place and predicates that can be, each is answered by one rule and no more."""
    counts = Counter(len(answers(situation)) for _, situation in situations())
    assert counts == {1: 60}


def test_the_product_is_whole() -> None:
    """All 3 x 2^5 combinations are there but those that contradict themselves."""
    everything = [dict(zip(PREDICATES, v, strict=True)) for v in product((True, False), repeat=len(PREDICATES))]
    assert len(list(situations())) == 3 * sum(is_possible(found) for found in everything)
    impossible = [found for found in everything if not is_possible(found)]
    assert all(found["fits_one_gpu"] for found in impossible)
    assert all(not found["largest_layer_fits"] or found["memory_short"] for found in impossible)


def test_every_row_of_the_tree_answers_something() -> None:
    """No leaf is unreachable, and exactly the declared gaps are ours."""
    reached = {rule.id for _, situation in situations() for rule in answers(situation)}
    assert reached == TREE | GAPS == {rule.id for rule in load_rules("hf_decisions")}
    assert {rule.id for rule in load_rules("hf_decisions") if rule.gap} == GAPS


@pytest.mark.parametrize("place", PLACES)
def test_unasked_predicates_change_nothing(place: str) -> None:
    """What the table does not ask in a place has no influence there, so its dots hide nothing."""
    answered: dict[tuple[bool | int, ...], set[str]] = {}
    for where, situation in situations():
        if where == place:
            asked = tuple(situation[name] for name in ASKED[place])
            answered.setdefault(asked, set()).update(rule.id for rule in answers(situation))
    assert all(len(ids) == 1 for ids in answered.values())


LONG = ("status.md",)
"""Pages whose making asks for some fifty plans and their files."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in PAGES])
def test_generated_pages_are_committed(name: str) -> None:
    """The pages that follow from data are what `make docs` writes today."""
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == PAGES[name]()
