"""What every emitter is: a name, what it can express, and one function from a Plan to file names and texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

from strategist.document.plan import Plan
from strategist.records import dataclass

Files = Mapping[PurePosixPath, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user adds when emitting. `env` holds (name, value) pairs in the order given; all values are checked."""

    job_name: str = "strategist"
    master_addr: str | None = None
    master_port: int | None = None
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitter:
    """One target. `engine` "strategist" means that our executor runs the job, so it decides which layouts are
    possible; `axes` are the mesh axes that may be larger than one; `executables` are the file names that must be
    runnable."""

    name: str
    title: str
    engine: str
    versions: str
    write: Callable[[Plan, Options], Files]
    axes: tuple[str, ...]
    executables: tuple[str, ...] = ()
