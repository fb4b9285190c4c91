"""What a row of a rule file must be: known keys, right types, known words, sentences that can be filled in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from strategist.errors import CODES, RuleError, did_you_mean, shown
from strategist.rulebook.vocabulary import WORDS
from strategist.space.candidates import WORDS as CODED

PLACE = re.compile(r"\{([a-z_0-9]+)(?::([^}]*))?\}")
"""A place in a sentence: {word} or {word:format}."""

SPELT = (*CODED, "precision", "optimizer", "method", "frontend", "purpose")
"""Words of the vocabulary whose values are words."""

NEEDED = ("id", "name", "when", "effect", "because", "source", "fires", "silent")
TEXTS = ("id", "name", "situation", "when", "effect", "code", "because", "hint", "source", "evidence", "counter_example", "scope")  # fmt: skip
KINDS: Mapping[str, tuple[type, str]] = {
    **dict.fromkeys(TEXTS, (str, "a text")),
    "families": (list, "a list of lists of families"),
    "targets": (list, "a list of targets"),
    "gap": (bool, "true or false"),
    "fires": (dict, "a table of words and values"),
    "silent": (dict, "a table of words and values"),
}
EFFECTS: Mapping[str, str] = {
    "hf_decisions": "prefer", "legality": "forbid", "advice": "advise", "frontends": "emit",
}  # fmt: skip
"""What the rules of each book do."""


def rows_of(table: Mapping[str, Any], key: str, path: str) -> Sequence[Mapping[str, Any]]:
    """The [[key]] tables of a file. Raises RuleError RULE."""
    found = table.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(row, dict) for row in found):
        raise RuleError("RULE", f"{path} has no [[{key}]] rows.", hint=f"Write at least one [[{key}]] table.")
    return found


def check_row(row: Mapping[str, Any], book: str, path: str) -> None:
    """Raise RuleError UNKNOWN_KEY, MISSING, TYPE, CHOICE or RULE with file, rule and fault; nothing for a good row."""
    where = f"{path}: rule {shown(row.get('id', '?'))}"
    for key in row:
        if key not in KINDS:
            hint = did_you_mean(key, KINDS)
            raise RuleError("UNKNOWN_KEY", f"{where} has the unknown key {shown(key)!r}.", value=key, hint=hint)
    for key in NEEDED:
        if key not in row:
            raise RuleError("MISSING", f"{where} lacks {key!r}.", value=key, hint="Add it.")
    for key, value in row.items():
        kind, words = KINDS[key]
        if (
            not isinstance(value, kind)
            or (key == "families" and not _is_tiers(value))
            or (key == "targets" and not _is_tiers([value]))
        ):
            raise RuleError("TYPE", f"{where}: {key} must be {words}.", value=value, hint=f"Correct {key}.")
    _check_effect(row, book, where)
    for key in ("because", "hint"):
        _check_sentence(row.get(key, ""), where)


def _is_tiers(value: Any) -> bool:
    return all(isinstance(tier, list) and all(isinstance(name, str) for name in tier) for tier in value)


def _check_effect(row: Mapping[str, Any], book: str, where: str) -> None:
    wanted, code = EFFECTS[book], row.get("code")
    if row["effect"] != wanted:
        sentence = f"{where} has the effect {shown(row['effect'])!r}, and rules of {book} {wanted}."
        raise RuleError("CHOICE", sentence, value=row["effect"], hint=f'Write effect = "{wanted}".')
    if wanted == "forbid" and code is None:
        raise RuleError("MISSING", f"{where} lacks 'code', the error it ends with.", hint='For example "TOPOLOGY".')
    if wanted == "forbid" and code not in CODES:
        hint = did_you_mean(str(code), CODES)
        raise RuleError("CHOICE", f"{where} has the code {shown(code)!r}, which no error has.", value=code, hint=hint)


def _check_sentence(template: str, where: str) -> None:
    """Every place names a word, and its format goes with that word's values."""
    for match in PLACE.finditer(template):
        word, form = match[1], match[2] or ""
        if word not in WORDS:
            hint = did_you_mean(word, WORDS)
            raise RuleError("RULE", f"{where}: its sentence uses the unknown word {word!r}.", value=word, hint=hint)
        try:
            format("" if word in SPELT else 1.0, form)
        except ValueError:
            sentence = f"{where}: the format of {{{word}:{shown(form)}}} does not go with its value."
            raise RuleError("RULE", sentence, value=form, hint="For example {bubble_share:.0f}.") from None
