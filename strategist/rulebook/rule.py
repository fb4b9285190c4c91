"""Rules as rows of TOML, checked when they are loaded: known words only, examples that really fire and stay silent."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal

import numpy as np

from strategist.errors import RuleError, did_you_mean, shown
from strategist.facts.profile import frontends
from strategist.records import dataclass
from strategist.rulebook.books import Words, rows_in, rules_folder
from strategist.rulebook.expression import evaluate, names, parse, tree_of
from strategist.rulebook.rows import check_row
from strategist.rulebook.vocabulary import WORDS

Effect = Literal["prefer", "forbid", "advise", "emit"]
BOOKS = ("hf_decisions", "legality", "advice", "frontends")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row. `families` lists tiers of equal families in order of preference, `targets` front ends; `because` and `hint` are templates
    over the vocabulary; `code` is the error code of a forbid rule; `gap` marks a declared gap of the decision table;
    `words` are the names that `when` needs, in order."""

    id: str
    name: str
    when: ast.expr
    when_text: str
    effect: Effect
    because: str
    source: str
    situation: str = ""
    families: tuple[tuple[str, ...], ...] = ()
    targets: tuple[str, ...] = ()
    code: str = ""
    hint: str = ""
    scope: str = ""
    evidence: str = ""
    counter_example: str = ""
    gap: bool = False
    fires: Mapping[str, Any]
    silent: Mapping[str, Any]
    words: tuple[str, ...]

    def holds(self, values: Mapping[str, Any]) -> Any:
        """Whether the rule fires: a truth value, or a mask when `values` holds columns."""
        return evaluate(self.when, values)


@dataclass(frozen=True, slots=True)
class Family:
    """A named set of layouts, such as `zero` or `pp+tp+dp`."""

    name: str
    title: str
    when: ast.expr

    def holds(self, values: Mapping[str, Any]) -> Any:
        """Mask of the candidates that belong to the family."""
        return evaluate(self.when, values)


@cache
def load_rules(book: str, folders: tuple[str, ...] = ()) -> tuple[Rule, ...]:
    """The rules of one book: ours, then those of the user's folders. Raises RuleError for any fault in a folder or row."""
    for folder in folders:
        _check_folder(folder)
    found: dict[str, Rule] = {}
    for folder in (rules_folder(), *folders):
        path = os.path.join(folder, f"{book}.toml")
        if folder in folders and not os.path.exists(path):
            continue
        rows, words = rows_in(folder, book)
        for row in rows:
            rule = read_rule(row, book, path) if words is None else _kept_rule(row, words)
            if folder in folders:
                check_examples(rule)
            if rule.id in found:
                raise RuleError(
                    "DUPLICATE_KEY",
                    f"{path}: the rule id {rule.id} stands twice.",
                    value=rule.id,
                    hint="Give every rule an id of its own.",
                )
            found[rule.id] = rule
    return tuple(found.values())


def _check_folder(folder: str) -> None:
    """A folder of the user holds books of rules and nothing that looks like one."""
    try:
        books = sorted(name for name in os.listdir(folder) if name.endswith(".toml"))
    except (OSError, ValueError) as problem:
        code = "NOT_A_FILE" if isinstance(problem, NotADirectoryError) else "FILE_NOT_FOUND"
        raise RuleError(
            code,
            f"--rules: {shown(folder)} is not a folder that can be read.",
            flag="--rules",
            value=folder,
            hint="Name a folder.",
        ) from None
    known = tuple(f"{book}.toml" for book in BOOKS)
    strange = [name for name in books if name not in known]
    if strange or not books:
        words = f"holds {shown(strange[0])}, which is no book of rules" if strange else "holds no book of rules"
        raise RuleError(
            "MISSING" if not books else "UNKNOWN_KEY",
            f"--rules: {shown(folder)} {words}.",
            flag="--rules",
            value=strange[0] if strange else folder,
            hint=f"Books are {', '.join(known)}.",
        )


@cache
def load_families() -> tuple[Family, ...]:
    """The families of layouts, most special first."""
    rows, words = rows_in(rules_folder(), "families")
    trees = (parse(row["when"], row["name"]) if words is None else tree_of(row["when"]) for row in rows)
    return tuple(Family(row["name"], row["title"], tree) for row, tree in zip(rows, trees, strict=True))


def read_rule(row: Mapping[str, Any], book: str, path: str) -> Rule:
    """One checked row. Raises RuleError naming the file, the rule and the fault."""
    check_row(row, book, path)
    tree = parse(row["when"], row["id"])
    rule = _rule_of(row, tree, sorted(names(tree)))
    _check_words(rule.words, rule.id)
    _check_choices(rule)
    return rule


def _kept_rule(row: Mapping[str, Any], words: Words) -> Rule:
    """A row that was checked when it was kept."""
    return _rule_of(row, tree_of(row["when"]), words[row["when"]])


def _rule_of(row: Mapping[str, Any], tree: ast.expr, words: Iterable[str]) -> Rule:
    rest = {key: value for key, value in row.items() if key not in ("when", "families", "targets")}
    families = tuple(tuple(tier) for tier in row.get("families", ()))
    targets = tuple(row.get("targets", ()))
    return Rule(when=tree, when_text=row["when"], families=families, targets=targets, words=tuple(words), **rest)


def _check_words(words: Iterable[str], rule: str) -> None:
    for word in words:
        if word not in WORDS:
            raise RuleError(
                "RULE", f"Rule {rule} uses the unknown word {word!r}.", value=word, hint=did_you_mean(word, WORDS)
            )


def _check_choices(rule: Rule) -> None:
    """Families and targets that a rule names are known."""
    families = [family.name for family in load_families()] if rule.families else []
    of_families = (("family", name, families) for tier in rule.families for name in tier)
    of_targets = (("target", name, frontends()) for name in rule.targets)
    for kind, name, known in (*of_families, *of_targets):
        if name not in known:
            raise RuleError(
                "RULE",
                f"Rule {rule.id} names the unknown {kind} {name!r}.",
                value=name,
                hint=did_you_mean(name, known),
            )


def check_examples(rule: Rule) -> None:
    """The rule fires for its `fires` and stays silent for its `silent`. Our own rules are checked by a test."""
    for label, example, wanted in (("fires", rule.fires, True), ("silent", rule.silent, False)):
        lacking = set(rule.words) - example.keys()
        if lacking:
            raise RuleError(
                "RULE",
                f"Rule {rule.id}: its example `{label}` lacks {sorted(lacking)[0]!r}.",
                value=rule.id,
                hint="Give every word of `when` a value.",
            )
        if _behaves(rule, example, label) is not wanted:
            raise RuleError(
                "RULE",
                f"Rule {rule.id}: its example `{label}` does not behave as it says.",
                value=rule.id,
                hint="Correct the example or the rule.",
            )


def _behaves(rule: Rule, example: Mapping[str, Any], label: str) -> bool:
    coded = {word: _coded(word, value) for word, value in example.items()}
    try:
        return bool(np.all(rule.holds(coded)))
    except RuleError as problem:
        sentence = f"Rule {rule.id}: its example `{label}` has no answer. {problem.message}"
        raise RuleError("RULE", sentence, value=rule.id, hint=problem.hint) from None


def _coded(word: str, value: Any) -> Any:
    from strategist.space.candidates import WORDS as CODED

    return CODED[word].index(value) if word in CODED and value in CODED[word] else value
