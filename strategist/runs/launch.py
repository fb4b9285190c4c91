"""The ranks of one machine as processes of ours: started together, heard through one pipe, ended together."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

STORE = "STRATEGIST_STORE"
"""The variable that names the file in which ranks meet: no port to lose, and no rank that all others need alive."""

PR_SET_PDEATHSIG = 1
"""prctl(2): which signal a process gets when its parent dies. Linux only."""


class Ranks:
    """One process per rank, each the head of a session of its own.

    A rank that ended stays a zombie until `close`, so that its process group can be ended without the danger that its
    number belongs to somebody else by then.
    """

    def __init__(self, command: Sequence[str], world: int, environment: Mapping[str, str]) -> None:
        self.heard, said = os.pipe()
        os.set_blocking(self.heard, False)
        self._rest, self._is_open = b"", True
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ends: dict[int, int] = {}
        self.ended_at: dict[int, float] = {}
        follow = dying_with(os.getpid())
        try:
            for rank in range(world):
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env=dict(environment) | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=said,
                        stderr=said,
                        start_new_session=True,
                        preexec_fn=follow,
                    )
                )
        except BaseException:
            self.close()
            raise
        finally:
            os.close(said)

    def wait(self, seconds: float, also: int | None = None) -> list[str]:
        """What the ranks said, after at most so many seconds; sooner when `also` becomes readable."""
        watched = ([self.heard] if self._is_open else []) + ([] if also is None else [also])
        select.select(watched, [], [], seconds)
        rows = self._rows() if self._is_open else []
        self._look()
        return rows

    def _rows(self) -> list[str]:
        try:
            data = os.read(self.heard, 2**16)
        except BlockingIOError:
            return []
        self._is_open = bool(data)  # a pipe that nobody holds stays readable for ever
        *rows, self._rest = (self._rest + data).split(b"\n")
        return [row.decode("utf-8", "replace") for row in rows]

    def last_words(self) -> list[str]:
        """What is still in the pipe after the end."""
        rows: list[str] = []
        while more := self._rows():
            rows += more
        left, self._rest = self._rest.decode("utf-8", "replace"), b""
        return [*rows, left] if left else rows

    def _look(self) -> None:
        """Note who ended, without reaping."""
        for rank, process in enumerate(self.processes):
            if rank in self.ends:
                continue
            end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                self.ends[rank] = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                self.ended_at[rank] = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether every rank ended."""
        return len(self.ends) == len(self.processes)

    def tell(self, number: int) -> None:
        """Send a signal to every rank that lives, and to nothing that it started."""
        for rank, process in enumerate(self.processes):
            if rank not in self.ends:
                os.kill(process.pid, number)

    def close(self) -> None:
        """End all ranks and whatever they started, at once, and reap them."""
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:  # only members that are no longer there
                continue
        for process in self.processes:
            process.wait()
        os.close(self.heard)
        self.heard = -1

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()


def dying_with(parent: int) -> Callable[[], None] | None:
    """What a new process of `parent`, which is this one, does first so that the kernel ends it when we die; nothing where the kernel cannot."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def follow() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # we died before the kernel knew
            os._exit(128 + signal.SIGKILL)

    return follow


def environment_of(world: int, attempt: int, meeting: Path) -> dict[str, str]:
    """Our variables, those that torchrun gives to the ranks of one machine, and the place where ranks meet."""
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(os.environ) | {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "strategist",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        STORE: str(meeting),
    }  # fmt: skip


def free_port() -> int:
    """A port that nobody uses now, for programs that meet at one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
