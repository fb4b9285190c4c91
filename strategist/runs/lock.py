"""One supervisor per run folder. The kernel holds the lock, so it is gone with its holder, however that ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strategist.errors import InputError, shown


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file for the duration. Raises InputError CONFLICT naming the holder when somebody else does."""
    descriptor = _acquired(path)
    try:
        text = json.dumps(
            {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode() + b"\n", 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _acquired(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise _held(path, holder) from None
        if _is_current(descriptor, path):
            return descriptor
        os.close(descriptor)  # its last holder took the file away while we waited for it


def _is_current(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _held(path: Path, holder: str) -> InputError:
    try:
        who = json.loads(holder)
        words = f"process {who['pid']} on {who['host']} since {who['since']}"
    except (ValueError, KeyError, TypeError):
        words = "another process"
    return InputError(
        "CONFLICT",
        f"The run folder {shown(str(path.parent))} belongs to {words}.",
        flag="RUN",
        value=str(path.parent),
        hint="Wait for it to end, or stop it.",
    )
