"""One closed list of codes: in errors.py, in the catalogue, on the page, and in what the package raises."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from strategist.catalog import rows
from strategist.errors import CODES, InputError, StrategistError
from strategist.rulebook.rule import BOOKS, load_rules
from tests.source import ROOT, calls, modules, texts

NEVER = {"CODE_IGNORED"}
"""Of the closed list, what nothing ends with: a configuration that names code is read without it, and a warning,
W_REMOTE_CODE_IGNORED, says so."""


def kinds(base: type[StrategistError] = StrategistError) -> set[str]:
    """The names of all error classes."""
    return {base.__name__, *(name for kind in base.__subclasses__() for name in kinds(kind))}


def spelt(tree: ast.Module) -> Iterator[str]:
    """Codes that a module gives to errors: the first argument where it is spelt out, otherwise every code the module
    mentions, because it chooses among them."""
    errors, chosen = kinds(), {text for text in texts(tree) if text in CODES}
    for name, call in calls(tree):
        if name not in errors:
            continue
        code = next((keyword.value for keyword in call.keywords if keyword.arg == "code"), None)
        first = code or (call.args[0] if call.args and name != "NoPlanError" else None)
        if isinstance(first, ast.Constant):
            yield str(first.value)
        elif first is not None:
            yield from chosen
        else:
            yield "NO_PLAN"


@cache
def raised() -> frozenset[str]:
    """Every code that the package or a rule can end with."""
    package = {name: tree for name, tree in modules().items() if name != "strategist.errors"}
    from_rules = {rule.code for rule in load_rules("legality") if rule.code}
    return frozenset(from_rules | {code for tree in package.values() for code in spelt(tree)})


def test_every_code_is_raised() -> None:
    """What the package raises is in the list, and what is in the list is raised."""
    assert raised() <= set(CODES)
    assert set(CODES) - raised() == NEVER


def test_the_scan_finds_an_unknown_code() -> None:
    """A code that is not in the list would be seen."""
    planted = ast.parse("def f(): raise InputError('TYPO', 'x', hint='y')")
    assert set(spelt(planted)) == {"TYPO"}


def test_the_list_is_closed() -> None:
    """An error with another code cannot even be made."""
    with pytest.raises(ValueError, match="closed list"):
        InputError("TYPO", "x")


def test_the_catalogue_explains_every_code() -> None:
    """Each code has one row with a meaning and an action; each warning of a rule has one too."""
    listed = [row["code"] for row in rows("error_codes")]
    assert sorted(code for code in listed if code.startswith("E_")) == sorted(f"E_{code}" for code in CODES)
    assert len(listed) == len(set(listed))
    warnings = {
        f"W_{rule.code}" for book in BOOKS for rule in load_rules(book) if rule.code and rule.effect == "advise"
    }
    assert warnings <= set(listed)
    assert all(row["meaning"] and row["action"].endswith(".") for row in rows("error_codes"))


def test_every_warning_in_the_source_has_a_row() -> None:
    """A W_ code that the package spells out is explained by `strategist help`."""
    listed = {row["code"] for row in rows("error_codes")}
    spelt_out = {text for tree in modules().values() for text in texts(tree) if re.fullmatch(r"W_[A-Z_]+", text)}
    assert spelt_out - {"W_"} <= listed


def test_the_page_has_a_heading_for_every_row() -> None:
    """docs/errors.md has the codes of the catalogue as its headings, in the same order."""
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == [row["code"] for row in rows("error_codes")]
