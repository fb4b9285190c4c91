"""A Plan into a file, whole or not at all: what `load_plan` and every command read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from strategist.document.plan import Plan
from strategist.document.write import dump
from strategist.errors import InputError, InternalError, StrategistError, require_type, shown, wrong_type

REFUSALS = {
    errno.EEXIST: ("EXISTS", "exists; it was not touched", "Choose another name, or take the file away."),
    errno.EISDIR: ("NOT_A_FILE", "is a folder", "Name a file inside it."),
    errno.ENOENT: ("FILE_NOT_FOUND", "lies in a folder that does not exist", "Make the folder first."),
    errno.ENOTDIR: ("FILE_NOT_FOUND", "lies in what is no folder", "Name a file in a folder."),
    errno.EACCES: ("PERMISSION", "may not be written", "Choose another folder."),
    errno.EROFS: ("PERMISSION", "may not be written", "Choose another folder."),
    errno.ENAMETOOLONG: ("NAME_TOO_LONG", "has too long a name", "Shorten it."),
}
"""What a machine says of a file, and how: code, words, what to do."""


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a Plan into a new file, as `plan --out` does; `load_plan` gives the same Plan back.

    Raises InputError TYPE, EXISTS, NOT_A_FILE, FILE_NOT_FOUND, PERMISSION or NAME_TOO_LONG, with nothing written, and InternalError IO when the
    machine refuses.
    """
    require_type(Plan, "plan", plan, "a Plan", 'plan=recommend("7B", "dgx-h100")')
    if not isinstance(path, (str, os.PathLike)):
        raise wrong_type("path", path, "a path", '"plan.json"')
    text, place = dump(plan), Path(path)
    try:
        with open(place, "xb") as file:
            try:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                place.unlink()  # it is ours: nothing stood there before
                raise
    except OSError as problem:
        raise _refusal(problem, str(place)) from None


def _refusal(problem: OSError, path: str) -> StrategistError:
    if problem.errno in REFUSALS:
        code, words, hint = REFUSALS[problem.errno]
        return InputError(code, f"{shown(path)} {words}.", flag="path", value=path, hint=hint)
    return InternalError(
        "IO",
        f"{shown(path)} could not be written: {problem.strerror}.",
        flag="path",
        value=path,
        hint="Nothing was left behind; free space or choose another folder.",
    )
