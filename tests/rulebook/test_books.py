"""The shipped rules: each one loads, behaves as its own examples say, and speaks in known words."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from strategist.errors import CODES, RuleError
from strategist.rulebook.apply import placeholders
from strategist.rulebook.expression import names
from strategist.rulebook.rule import BOOKS, Rule, check_examples, load_families, load_rules
from strategist.rulebook.vocabulary import WORDS

RULES = [rule for book in BOOKS for rule in load_rules(book)]
EFFECT = {"hf_decisions": "prefer", "legality": "forbid", "advice": "advise", "frontends": "emit"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_examples_behave(rule: Rule) -> None:
    """Every rule fires for its `fires` and stays silent for its `silent`."""
    check_examples(rule)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_examples_can_fail(rule: Rule) -> None:
    """A rule with its examples exchanged would be refused: the check is no formality."""
    with pytest.raises(RuleError, match="does not behave"):
        check_examples(replace(rule, fires=rule.silent, silent=rule.fires))


@pytest.mark.parametrize("book", BOOKS)
def test_books_have_one_effect(book: str) -> None:
    """Decisions prefer, legality forbids with a code of the closed list, advice advises."""
    rules = load_rules(book)
    assert {rule.effect for rule in rules} == {EFFECT[book]}
    assert book != "legality" or all(rule.code in CODES and rule.hint for rule in rules)
    assert all(bool(rule.families) is (book == "hf_decisions") for rule in rules)
    assert all(bool(rule.targets) is (book == "frontends") for rule in rules)


def test_ids_are_unique_and_names_say_something() -> None:
    """No two rules share an id or a name; names are words with dashes."""
    for words in ([rule.id for rule in RULES], [rule.name for rule in RULES]):
        assert len(words) == len(set(words))
    assert [rule.name for rule in RULES if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule.name)] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_sentences_use_known_words(rule: Rule) -> None:
    """Every place in a sentence is a word of the vocabulary, and every rule names its source."""
    places = {*placeholders(rule.because), *placeholders(rule.hint)}
    assert places <= WORDS.keys()
    assert "{" not in re.sub(r"\{[a-z_]+(:[^}]*)?\}", "", rule.because + rule.hint)
    assert rule.because.endswith(".")
    assert rule.source


def test_vocabulary_is_used() -> None:
    """Every word has a meaning, and all but a few, which are there for rules of users, stand in some rule or sentence."""
    families = {word for family in load_families() for word in names(family.when)}
    used = {word for rule in RULES for word in (*rule.words, *placeholders(rule.because), *placeholders(rule.hint))}
    assert WORDS.keys() - used - families == {
        "parameters",
        "long_sequence",
        "long_threshold",
    }
    assert all(word.meaning for word in WORDS.values())


def test_families_are_named_once() -> None:
    """Names and titles of families are unique, and decisions name known families only, none twice."""
    families = load_families()
    assert len({family.name for family in families}) == len({family.title for family in families}) == len(families)
    for rule in load_rules("hf_decisions"):
        named = [name for tier in rule.families for name in tier]
        assert len(named) == len(set(named))


def test_gaps_are_declared_as_ours() -> None:
    """A row on which the tables are silent says so in its source and is numbered behind the tables' own rows."""
    rules = load_rules("hf_decisions")
    assert [rule.id for rule in rules if rule.gap] == [rule.id for rule in rules if rule.source.startswith("ours")]
    assert all(not earlier.gap or later.gap for earlier, later in pairwise(rules))
