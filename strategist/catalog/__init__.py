"""The catalogue: rows of facts, nothing else. One JSON object per line, units in the keys, a `source` on every row."""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any

Row = dict[str, Any]

FOLDER = os.path.join(os.path.dirname(__file__), "data")


@cache
def rows(table: str) -> tuple[Row, ...]:
    """Every row of one table, in file order. Callers must not change the rows."""
    with open(os.path.join(FOLDER, f"{table}.jsonl"), encoding="utf-8") as file:
        lines = file.read().rstrip().replace("\n", ",")  # a line break inside a text is written as two characters
    parsed: list[Row] = json.loads(f"[{lines}]")
    return tuple(parsed)
