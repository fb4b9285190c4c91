"""The only way a file goes out: whole or not at all.

A target is looked at before any work is done for it; what is written goes into a temporary file beside it, so that a reader never sees
a part and a failure leaves nothing. Several files go out together or not at all.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from strategist.errors import InputError, InternalError, is_hostile, shown
from strategist.reading import STANDARD_INPUT

MAX_NAME = 255
PREFIX = ".strategist-"
"""What the names of files begin with that are not finished."""


def check_target(path: str, flag: str, *, force: bool) -> None:
    """Refuse a target before any work is done. Raises InputError NOT_A_FILE, CONTROL_CHAR, EMPTY, NAME_TOO_LONG,
    FILE_NOT_FOUND, EXISTS."""
    if path == STANDARD_INPUT:
        raise InputError(
            "NOT_A_FILE",
            f"{flag}: - is no name of a file.",
            flag=flag,
            value=path,
            hint="With --json and without a file the document goes to standard output.",
        )
    if any(is_hostile(c) for c in path):
        raise InputError(
            "CONTROL_CHAR", f"{flag} contains a control character.", flag=flag, value=path, hint="Choose a plain name."
        )
    if not path.strip():
        raise InputError("EMPTY", f"{flag} is empty.", flag=flag, value=path, hint="Example: plan.json.")
    if len(os.path.basename(path).encode()) > MAX_NAME:
        raise InputError(
            "NAME_TOO_LONG",
            f"{flag}: the file name has more than {MAX_NAME} bytes.",
            flag=flag,
            value=path,
            hint="Shorten it.",
        )
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise InputError(
            "FILE_NOT_FOUND",
            f"{flag}: the folder {shown(folder)} does not exist.",
            flag=flag,
            value=path,
            hint="Make it first.",
        )
    if os.path.isdir(path):
        raise InputError(
            "NOT_A_FILE", f"{flag}: {shown(path)} is a folder.", flag=flag, value=path, hint="Name a file inside it."
        )
    if os.path.exists(path) and not os.path.isfile(
        path
    ):  # a file in place of /dev/null, or of a pipe, is what nobody means by --force
        raise InputError(
            "NOT_A_FILE",
            f"{flag}: {shown(path)} is no regular file.",
            flag=flag,
            value=path,
            hint="Choose another name.",
        )
    if os.path.lexists(path) and not force:
        raise _exists(path, flag)


class Written(NamedTuple):
    """One file to write."""

    path: str
    text: str
    mode: int = 0o644


def write_file(path: str, text: str, flag: str, *, force: bool = False) -> None:
    """Write a file through a temporary one beside it. Raises as `write_files`."""
    write_files([Written(path, text)], flag, force=force)


def write_files(files: Sequence[Written], flag: str, *, force: bool = False) -> None:
    """Write all files or none: each is finished beside its name before the first is published, and what was published is taken back, and
    what it replaced put back, where a later one cannot be.

    Raises what `check_target` raises, and InputError PERMISSION, InternalError IO when the machine refuses.
    """
    for file in files:
        check_target(file.path, flag, force=force)
    beside: list[str] = []
    path = ""
    try:
        for path, text, mode in files:
            beside.append(_finished(path, text, mode))
        with ExitStack() as undo:
            for temporary, (path, _, _) in zip(tuple(beside), files, strict=True):
                if path != files[-1].path and os.path.lexists(path):
                    beside.append(_kept(path, temporary))
                    undo.callback(os.replace, beside[-1], path)
                    _publish(temporary, path, force=force)
                else:
                    _publish(temporary, path, force=force)
                    undo.callback(os.unlink, path)
            undo.pop_all()
    except OSError as problem:
        raise _io_error(problem, path, flag) from None
    finally:
        for left in beside:
            if os.path.lexists(left):
                os.unlink(left)


def _finished(path: str, text: str, mode: int) -> str:
    """The name of a finished file beside `path`; nothing is left where it cannot be finished."""
    import tempfile  # pulls in compression libraries that no other path needs

    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path) or ".", prefix=PREFIX)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
    except BaseException:
        os.unlink(temporary)
        raise
    return temporary


def _kept(path: str, temporary: str) -> str:
    """The name of a copy of what stands at `path`."""
    import shutil

    return shutil.copy2(path, f"{temporary}.old", follow_symlinks=False)


def make_folder(path: str, flag: str) -> None:
    """Make a folder and those that it lies in. Raises InputError PERMISSION, and InternalError IO when the machine refuses."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as problem:
        raise _io_error(problem, path, flag) from None


@contextmanager
def made_folder(path: str, flag: str) -> Iterator[None]:
    """A folder for what is written inside the block, taken away again where that fails and it was not there before. Raises as `make_folder`."""
    is_new = not os.path.isdir(path)
    make_folder(path, flag)
    try:
        yield
    except BaseException:
        if is_new and not os.listdir(path):
            os.rmdir(path)
        raise


def _exists(path: str, flag: str) -> InputError:
    """A file that stands there already; only the command line has a way to replace it."""
    way = "add --force" if flag.startswith("--") else "take the file away"
    return InputError(
        "EXISTS",
        f"{flag}: {shown(path)} exists; it was not touched.",
        flag=flag,
        value=path,
        hint=f"Choose another name or {way}.",
    )


def _publish(temporary: str, path: str, *, force: bool) -> None:
    """Give the finished file its name; without `force` an existing one wins even if it appeared meanwhile."""
    if force:
        os.replace(temporary, path)
    else:
        os.link(temporary, path)


def _io_error(problem: OSError, path: str, flag: str) -> InputError | InternalError:
    if problem.errno == errno.EEXIST:
        return _exists(path, flag)
    if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return InputError(
            "PERMISSION",
            f"{flag}: {shown(path)} may not be written.",
            flag=flag,
            value=path,
            hint="Choose another folder.",
        )
    return InternalError(
        "IO",
        f"{flag}: {shown(path)} could not be written: {problem.strerror}.",
        flag=flag,
        value=path,
        hint="Nothing was left behind; free space or choose another folder.",
    )
