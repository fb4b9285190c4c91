"""`strategist rule`: what a rule says, where it comes from, when it fires."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strategist.cli.arguments import Command, Namespace, Positional
from strategist.cli.flags import COMMON, Flag
from strategist.cli.output import show_document, show_lines, width
from strategist.errors import InputError, did_you_mean
from strategist.records import names_of
from strategist.reports.lines import Line, Span, line, table, wrapped
from strategist.rulebook.rule import BOOKS, Rule, load_rules
from strategist.rulebook.vocabulary import WORDS

FLAGS = (Flag("--rules", "a folder with further rules", "DIR", repeats=True), *COMMON)


COMMAND = Command(
    "rule",
    "Print a rule, or list them all with the words they may use.",
    FLAGS,
    (Positional("id", "a rule such as HF202 or LEG101", optional=True),),
)


def run(options: Namespace) -> int:
    """Print one rule, or a line for each."""
    rules = [rule for book in BOOKS for rule in load_rules(book, options.rules)]
    chosen = rules if options.id is None else [_find(options.id, rules)]
    if options.json:
        show_document([_document(rule) for rule in chosen])
    elif options.id is None:
        show_lines(_list(rules, width()), no_color=options.no_color)
    else:
        show_lines(_page(chosen[0]), no_color=options.no_color)
    return 0


def _list(rules: Sequence[Rule], columns: int) -> list[Line]:
    """Every rule, and every word that a rule may use."""
    words = [(name, f"{word.meaning}{f' ({word.unit})' if word.unit else ''}") for name, word in WORDS.items()]
    return [
        *table([(rule.id, rule.effect, rule.name) for rule in rules], columns, indent=0),
        line(""),
        line(Span("words of rules", "key")),
        *table(words, columns),
    ]


def _find(name: str, rules: Sequence[Rule]) -> Rule:
    for rule in rules:
        if rule.id.lower() == name.lower():
            return rule
    raise InputError(
        "CHOICE",
        f"There is no rule {name!r}.",
        flag="ID",
        value=name,
        hint=did_you_mean(name, [rule.id for rule in rules]),
    )


def _page(rule: Rule) -> list[Line]:
    rows = [
        ("rule", f"{rule.id} {rule.name}"),
        ("situation", rule.situation),
        ("when", rule.when_text),
        (
            "effect",
            rule.effect
            + (f" {' then '.join(' or '.join(tier) for tier in rule.families)}" if rule.families else "")
            + (f" (E_{rule.code})" if rule.code else ""),
        ),
        ("because", rule.because),
        ("do", rule.hint),
        ("scope", rule.scope),
        ("evidence", rule.evidence),
        ("but", rule.counter_example),
        ("source", rule.source),
        ("fires for", _example(rule.fires)),
        ("silent for", _example(rule.silent)),
    ]
    columns = width()
    return [piece for label, text in rows if text for piece in wrapped(label, text, columns, indent=12)] or [line("")]


def _example(values: Any) -> str:
    return ", ".join(f"{key} = {value}" for key, value in values.items())


def _document(rule: Rule) -> dict[str, Any]:
    skipped = ("when", "when_text", "words")
    fields = {name: getattr(rule, name) for name in names_of(Rule) if name not in skipped}
    return {"when": rule.when_text} | fields
