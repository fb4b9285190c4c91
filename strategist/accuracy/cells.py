"""What a table's columns are called and its cells hold, in other people's words: names and units of columns, decimal commas, words for nothing.

The names are rows of the catalogue (`run_columns`); whatever is understood here reaches `express.py` under the names and in the units of
benchmarks/truth/README.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from strategist.catalog import rows
from strategist.errors import InputError, shown
from strategist.records import dataclass
from strategist.units import GIB, KIB, MIB

_SECONDS = {"s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3, "milliseconds": 1e-3, "us": 1e-6, "min": 60.0, "minutes": 60.0}  # fmt: skip
_BYTES = {
    "b": 1.0,
    "bytes": 1.0,
    "kb": 1e3,
    "kib": float(KIB),
    "mb": 1e6,
    "mib": float(MIB),
    "gb": 1e9,
    "gib": float(GIB),
}
_UNITS: tuple[Mapping[str, float], ...] = (_SECONDS, _BYTES)
"""Words of a unit, and how many of the first of its kind it is."""
_NOTHING = frozenset(("nan", "null", "#n/a", "<na>"))
_NO_NUMBER = _NOTHING | {"none", "n/a", "na", "-", "--", "–", "—", "?"}
"""Words for a fact that nobody stated; in a column of words, none and - may also mean that a technique is off."""
_OUT_OF_MEMORY = re.compile(r"^(?:cuda |gpu )?(?:oom|out[ _-]of[ _-]memory)\b", re.IGNORECASE)
_THOUSANDS = re.compile(r"^\d{1,3}(?:,\d{3})+(?:\.\d+)?$")
_DECIMAL_COMMA = re.compile(r"^\d+(?:\.\d{3})*,\d+$")
_POINTS_OF_THOUSANDS = re.compile(r"^\d{1,3}(?:\.\d{3})+$")
_WITH_UNIT = re.compile(r"^([\d.,]+(?:[eE][+-]?\d+)?) ?([A-Za-z]+)$")
_THOUSANDS_OF_TOKENS = re.compile(r"^(\d{1,4}) ?k$", re.IGNORECASE)
"""Lengths as pages write them: 4k are 4,096 tokens."""
_LENGTHS = ("seq_len", "target_len")
_TYPESET = str.maketrans({**dict.fromkeys("\u00a0\u2007\u2009\u202f", " "), **dict.fromkeys("\u2010\u2011\u2212", "-")})
"""Blanks that do not break, hyphens and signs of a typeset page, and what a keyboard has for them."""
_BLANKS_OF_THOUSANDS = re.compile(r"^\d{1,3}(?: \d{3})+(?:[.,]\d+)?$")
_FACTS = ("whole", "number")
_SHARES = ("mfu", "hfu")
_ALIKE = 0.8
"""How much of a name must be another's for it to be a misspelling."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: the name that it goes by here, what it holds (text, whole, number or measured; nothing where it is not read), how
    many of the column's own unit one of the table's is, and what a peak of that name counts."""

    name: str
    holds: str = ""
    scale: float = 1.0
    mem_kind: str = ""

    @property
    def is_number(self) -> bool:
        """Whether its cells are numbers."""
        return self.holds in ("whole", "number", "measured")


@cache
def _words() -> Mapping[str, Mapping[str, Any]]:
    return {row["word"]: row for row in rows("run_columns")}


def known_columns() -> tuple[str, ...]:
    """The names that cells are asked for by."""
    return tuple(row["word"] for row in rows("run_columns") if row["word"] == row["column"])


def columns_of_header(header: Sequence[str], flag: str, path: str) -> list[Column]:
    """What every name of a header stands for. Of several that mean one column of words or a figure that was measured the one that bears its name
    counts, else the first; the others are not read. Raises InputError DUPLICATE_KEY for two that mean the same number of a layout or a model."""
    columns = [_column(name) for name in header]
    counts: dict[str, str] = {}
    for name, column in zip(header, columns, strict=True):
        twin = counts.setdefault(column.name, name)
        if twin != name and column.holds in _FACTS:
            raise _twice(f"the columns {shown(twin)} and {shown(name)} both mean {column.name}", flag, path)
        if name and header.count(name) > 1:
            raise _twice(f"the column {shown(name)} stands twice", flag, path)
        if _plain(name) == column.name:
            counts[column.name] = name
    return [
        column if counts[column.name] == name else Column(name) for name, column in zip(header, columns, strict=True)
    ]


def _twice(said: str, flag: str, path: str) -> InputError:
    return InputError("DUPLICATE_KEY", f"{flag}: {said}.", flag=flag, value=path, hint="Name each column once.")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _column(name: str) -> Column:
    """A column by its name, or by that without the unit at its end; one of its own name where nobody knows it, or its unit."""
    plain = _plain(name)
    stem, _, last = plain.rpartition("_")
    row = _words().get(plain) or _words().get(stem)
    if row is None:
        return Column(name)
    canonical, is_whole = _words()[row["column"]], row["word"] == plain
    if "unit" not in canonical:
        scale = 1.0 if is_whole else None
    else:
        scale = _scale(row.get("unit", "") if is_whole else last, canonical["unit"])
    return Column(name) if scale is None else Column(row["column"], canonical["holds"], scale, row.get("mem_kind", ""))


def _scale(unit: str, own: str) -> float | None:
    """How many of a column's own unit one of another is; None for a word that is no unit of its kind."""
    kind = next(known for known in _UNITS if own in known)
    return kind[unit] / kind[own] if unit in kind else None


def has_decimal_commas(columns: Sequence[Column], lines: Iterable[Sequence[str]]) -> bool:
    """Whether some number of a table has a comma that no thousands are parted by."""
    return any(
        _DECIMAL_COMMA.match(cell) and not _THOUSANDS.match(cell)
        for line in lines
        for column, cell in zip(columns, map(str.strip, line), strict=False)
        if column.is_number
    )


def row_of(columns: Sequence[Column], line: Sequence[str], *, commas: bool, spreadsheet: bool) -> dict[str, str]:
    """One row by the names that columns go by here, its numbers in their units. `commas` stand before decimals; where no number tells and
    a `spreadsheet` parted cells by semicolons, a comma may be either and is left."""
    cells = [cell.translate(_TYPESET).strip() for cell in line]
    held = list(zip(columns, cells, strict=True))
    run = {column.name: _cell(column, cell, commas=commas, spreadsheet=spreadsheet) for column, cell in held}
    if any(column.holds == "measured" and _OUT_OF_MEMORY.match(cell) for column, cell in held):
        run["oom"] = "1"
    kind = next((column.mem_kind for column, _ in held if column.mem_kind and run[column.name]), "")
    return run if run.get("mem_kind") or not kind else {**run, "mem_kind": kind}


def _cell(column: Column, cell: str, *, commas: bool, spreadsheet: bool) -> str:
    if not column.is_number:
        return "" if cell.lower() in _NOTHING else cell
    if cell.lower() in _NO_NUMBER or (column.holds == "measured" and _OUT_OF_MEMORY.match(cell)):
        return ""
    return _number(column, cell, commas=commas, spreadsheet=spreadsheet)


def _number(column: Column, cell: str, *, commas: bool, spreadsheet: bool) -> str:
    """The text of a number with a point, without a unit; text that is none stays as it is."""
    canonical = _words()[column.name]
    if column.name in _LENGTHS and (length := _THOUSANDS_OF_TOKENS.match(cell)):
        return str(int(length[1]) * KIB)
    scale, plain = column.scale, cell.replace(" ", "") if _BLANKS_OF_THOUSANDS.match(cell) else cell
    if unit := _WITH_UNIT.match(cell):
        of_cell = _scale(unit[2].lower(), canonical["unit"]) if "unit" in canonical else None
        scale, plain = (scale, cell) if of_cell is None else (of_cell, unit[1])
    if column.name in _SHARES and plain.endswith("%"):
        scale, plain = 0.01, plain[:-1].strip()
    is_count = column.holds == "whole" and _THOUSANDS.match(plain)
    if commas and not is_count and (_DECIMAL_COMMA.match(plain) or _POINTS_OF_THOUSANDS.match(plain)):
        plain = plain.replace(".", "").replace(",", ".")
    elif is_count or (_THOUSANDS.match(plain) and not spreadsheet):
        plain = plain.replace(",", "")
    if scale == 1.0:
        return plain
    try:
        return repr(float(plain) * scale)
    except ValueError:  # the row's own reader says that this is no number
        return cell


def unread_columns(names: Iterable[str]) -> tuple[str, ...]:
    """Columns that nobody asks for, in order, but those without a name: the numbers of lines that some programs put in front."""
    known = frozenset(("", *known_columns()))
    return tuple(name for name in names if name not in known)


def with_near_names(names: Sequence[str]) -> str:
    """Columns that are not read, each with what it lacks or may have meant where that is known."""
    return ", ".join(f"{shown(name)}{_why(_plain(name))}" for name in names)


def _why(plain: str) -> str:
    if plain in _words():
        measures = "unit" in _words()[_words()[plain]["column"]] and "unit" not in _words()[plain]
        return " (its unit is not stated)" if measures else ""
    near = get_close_matches(plain, list(_words()), n=1, cutoff=_ALIKE)
    return f" (meant: {near[0]}?)" if near else ""
