"""A Plan into a file, whole or not at all: what `load_plan` and every command read."""

from __future__ import annotations

import os

from strategist.document.plan import Plan
from strategist.document.write import dump
from strategist.errors import require_type, wrong_type
from strategist.writing import write_file


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a Plan into a new file, as `plan --out` does; `load_plan` gives the same Plan back.

    Raises InputError TYPE, EXISTS, EMPTY, CONTROL_CHAR, NOT_A_FILE, FILE_NOT_FOUND, PERMISSION or NAME_TOO_LONG, with nothing written, and
    InternalError IO when the machine refuses.
    """
    require_type(Plan, "plan", plan, "a Plan", 'plan=recommend("7B", "dgx-h100")')
    if not isinstance(path, (str, os.PathLike)):
        raise wrong_type("path", path, "a path", '"plan.json"')
    write_file(os.fsdecode(path), dump(plan), "path")
