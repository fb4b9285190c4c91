"""A function in a process of its own: whatever it does, the caller lives and gets a result or one of our errors."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from strategist.errors import THEIRS_LIMIT, InputError, InternalError, StrategistError, shown

T = TypeVar("T")


def in_child(function: Callable[[], T], what: str, *, theirs: str = "") -> T:
    """`function()` in a forked process; its result must be picklable. `what` names it in errors, `theirs` a module of the user's that it
    runs.

    Raises the StrategistError that it raised; when it failed otherwise InputError KIND with a module of the user's, which is called as
    ours is, and InternalError INTERNAL without one; INTERNAL, too, when it was killed.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads stay behind: the child uses one of its own only
        child = os.fork()
    if child == 0:
        os.close(reader)
        _work(function, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    result: T = _opened(data, status, what, theirs)
    return result


def _work(function: Callable[[], Any], writer: int) -> None:
    """The child's life. It never returns into the caller's program."""
    try:
        answer: tuple[str, Any] = ("result", function())
    except StrategistError as error:
        answer = ("refusal", error)
    except BaseException as problem:  # noqa: BLE001 - everything is reported by the parent
        answer = ("failure", (f"{type(problem).__name__}: {problem}", traceback.format_exc()))
    try:
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(answer, pipe)
    finally:
        os._exit(0)


def _opened(data: bytes, status: int, what: str, theirs: str) -> Any:
    if not data:
        number = os.waitstatus_to_exitcode(status)
        cause = signal.Signals(-number).name if number < 0 else f"exit code {number}"
        raise InternalError(
            "INTERNAL",
            f"{what} ended without a word ({cause}).",
            hint="Free some memory and run it again; `strategist trace PLAN --ranks first` needs least.",
        )
    kind, value = pickle.loads(data)
    if kind == "result":
        return value
    if kind == "refusal":
        raise value
    sentence, where = value
    error = _failed(what, sentence, theirs)
    error.add_note(where)
    raise error


def _failed(what: str, sentence: str, theirs: str) -> StrategistError:
    if not theirs:
        hint = "This is a bug of ours; the traceback of the child says where."
        return InternalError("INTERNAL", f"{what} failed: {sentence}", hint=hint)
    return InputError(
        "KIND",
        f"{what} with {shown(theirs)} failed: {shown(sentence, THEIRS_LIMIT)}.",
        flag="--model-fn",
        value=theirs,
        hint="It is called as model(input_ids=TOKENS), TOKENS of shape (micro-batch, sequence), and gives logits for each token.",
    )


def largest_size() -> int:
    """The most memory that this process has held, in bytes. ru_maxrss counts KiB on Linux and bytes on macOS."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
