"""The heartbeat of a rank: where it stands, written by the training thread itself, so that a rank that hangs is silent.

Times are of the monotonic clock, which all processes of a machine share and nobody can set.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from strategist.records import dataclass

PHASES = ("start", "load", "data", "forward", "backward", "reduce", "step", "save", "done")
"""What a rank does, in the order of a step. A rank that is behind the others in step or phase keeps them waiting."""

SLOW = ("start", "load", "save")
"""Phases in which processes start, meet, build, read and write: they take their time whatever a step takes."""

WIDTH = 160
"""Bytes of a beat: always the same, so that one write replaces the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The latest word of a rank: it began `phase` of step `step` (counted from 0) at `at` seconds."""

    rank: int
    pid: int
    step: int
    phase: str
    at: float
    resident_bytes: int = 0

    @property
    def progress(self) -> tuple[int, int]:
        """Larger for a rank that is further on."""
        return self.step, PHASES.index(self.phase)

    @property
    def place(self) -> str:
        """Where the rank is, in words."""
        return f"{self.phase} of step {self.step}"


class BeatWriter:
    """Writes the beats of this process; one system call each. Raises OSError when its file cannot be made."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def beat(self, step: int, phase: str) -> None:
        """Say that a phase begins."""
        row = {
            "rank": self.rank, "pid": os.getpid(), "step": step, "phase": phase, "at": time.monotonic(),
            "resident_bytes": resident_bytes(),
        }  # fmt: skip
        os.pwrite(self._file, json.dumps(row).ljust(WIDTH - 1).encode() + b"\n", 0)


def resident_bytes() -> int:
    """Memory of this process that lies in RAM now (proc(5), statm); 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def read_beat(path: Path) -> Beat | None:
    """The beat in a file; None before the first one, or for a file that is none."""
    try:
        row = json.loads(path.read_text(encoding="ascii"))
        beat = Beat(**row)
    except (OSError, ValueError, TypeError):
        return None
    return beat if beat.phase in PHASES else None
