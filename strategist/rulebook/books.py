"""The shipped books of rules, read from TOML; what they were read to last is kept beside the code.

Reading and checking four TOML files takes a fourteenth of a whole plan. So `make docs` writes their rows to books.json, and they
are taken from there as long as the text of a book is the one that was read. A test holds the file to today's books.
"""

from __future__ import annotations

import json
import os
from binascii import crc32
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from strategist.reading import parse_toml, read_text
from strategist.rulebook.expression import names, tree_of
from strategist.rulebook.rows import rows_of

Row = Mapping[str, Any]

KEYS: Mapping[str, str] = {
    "hf_decisions": "rule",
    "legality": "rule",
    "advice": "rule",
    "frontends": "rule",
    "families": "family",
}
"""What a row of each book is called."""
KEPT = os.path.join(os.path.dirname(__file__), "books.json")


def rules_folder() -> str:
    """Where the shipped rules lie: inside the installed package, or beside it in a checkout."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    installed = os.path.join(package, "_rules")
    return installed if os.path.isdir(installed) else os.path.join(os.path.dirname(package), "rules")


Words = Mapping[str, Sequence[str]]


def rows_in(folder: str, book: str) -> tuple[Sequence[Row], Words | None]:
    """The rows of one book in a folder and, if they were checked when they were kept, the names that each condition uses.

    Raises RuleError RULE, InputError TOML and what reading a file raises.
    """
    path, text = _text_of(folder, book)
    kept = _kept().get(book) if folder == rules_folder() else None
    if kept is not None and kept["crc32"] == _sum(text):
        return kept["rows"], kept["words"]
    return rows_of(parse_toml(text, path), KEYS[book], path), None


def _text_of(folder: str, book: str) -> tuple[str, str]:
    path = os.path.join(folder, f"{book}.toml")
    return path, read_text(path, "--rules")


def kept_books() -> str:
    """What books.json should hold: the rows of the shipped books, the names that each condition uses, and sums of the texts that
    they were read from."""
    books = {}
    for book, key in KEYS.items():
        path, text = _text_of(rules_folder(), book)
        rows = rows_of(parse_toml(text, path), key, path)
        words = {row["when"]: sorted(names(tree_of(row["when"]))) for row in rows}
        books[book] = {"crc32": _sum(text), "words": words, "rows": rows}
    return json.dumps(books, indent=1) + "\n"


@cache
def _kept() -> Mapping[str, Any]:
    with open(KEPT, encoding="utf-8") as file:
        books: Mapping[str, Any] = json.load(file)
    return books


def _sum(text: str) -> int:
    return crc32(text.encode())
