"""What every emitter is: a name, what it can express, and one function from a Plan to file names and texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath

from strategist.document.plan import Plan, Strategy
from strategist.emitters.coverage import Coverage
from strategist.emitters.places import ranks_per_node
from strategist.errors import ImpossibleError
from strategist.records import dataclass

Files = Mapping[PurePosixPath, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user adds when emitting. `env` holds (name, value) pairs in the order given, `nvme_path` is a folder on a drive of each node,
    `zeropp` are some of ZeRO++'s hpz, qwz and qgz; all values are checked."""

    job_name: str = "strategist"
    master_addr: str | None = None
    master_port: int | None = None
    env: tuple[tuple[str, str], ...] = ()
    nvme_path: str | None = None
    zeropp: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitter:
    """One target. `engine` "strategist" means that our executor runs the job, so it decides which layouts are
    possible; `axes` are the mesh axes that may be larger than one; `executables` are the file names that must be
    runnable. What a framework can say is its `coverage`; `placed` raises ImpossibleError UNSUPPORTED for processes and
    machines that the target cannot start. `names_drive` is for files that must say where a drive's folder is; jobs on our executor take a
    variable for it. `by_deepspeed` says, by zero, offload and formats, whether DeepSpeed does the work of a strategy, beside mesh.tp of 1.
    `write` is for plans that the target can express."""

    name: str
    title: str
    engine: str
    versions: str
    write: Callable[[Plan, Options], Files]
    axes: tuple[str, ...]
    executables: tuple[str, ...] = ()
    coverage: Coverage | None = None
    placed: Callable[[Plan], object] = ranks_per_node
    names_drive: bool = False
    by_deepspeed: Callable[[Strategy], bool] = lambda strategy: False

    def require(self, plan: Plan) -> None:
        """Raise ImpossibleError UNSUPPORTED for a plan that the target cannot express."""
        self.placed(plan)
        if self.coverage is not None:
            self.coverage.require(plan, self.name)

    def obstacles(self, plan: Plan) -> Iterator[str]:
        """Sentences about what the target cannot express; none where `require` raises nothing."""
        try:
            self.placed(plan)
            yield from () if self.coverage is None else self.coverage.obstacles(plan)
        except ImpossibleError as obstacle:
            yield obstacle.message


def rewritten(text: str, instead: Mapping[str, str]) -> str:
    """A script's text with other lines in place of some, one after the other."""
    for stands, put in instead.items():
        text = text.replace(stands, put)
    return text
