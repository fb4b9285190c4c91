"""Start ranks in fresh processes and collect what every one of them returns or raises.

Processes fork from a server that imported torch once; forking from the test process itself would hang after torch used
its threads there. Ranks meet in a file of a fresh folder, so no port is needed.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

PRELOAD = [
    "torch",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "strategist.executor.build",
    "strategist.executor.train",
    *(
        f"transformers.models.{family}.modeling_{family}"
        for family in ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gpt2")
    ),
    "tests.executor.frozen",
]
"""Without transformers its modules are passed over, as multiprocessing does with whatever cannot be imported."""


class RanksFailed(Exception):
    """At least one rank raised or vanished. `texts` maps rank to its traceback, true causes first in the message."""

    def __init__(self, texts: dict[int, str]) -> None:
        from strategist.executor.processes import NETWORK_WORDS

        order = sorted(texts, key=lambda rank: (any(word in texts[rank].lower() for word in NETWORK_WORDS), rank))
        super().__init__("\n".join(f"rank {rank}: {texts[rank]}" for rank in order))
        self.texts = texts


@cache
def _context() -> Any:
    """The way to start processes; its server starts here, with the one thread per process that it hands down."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # read when the server imports torch
        forkserver.ensure_running()
    return context


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 180.0) -> list[Any]:
    """`function(*arguments)` on `world` gloo ranks; its results by rank. Raises RanksFailed."""
    return _run(world, function, arguments, join=True, timeout_s=timeout_s)


def run_alone(function: Callable[..., Any], *arguments: Any, timeout_s: float = 180.0) -> Any:
    """`function(*arguments)` in a fresh process without a process group; its result."""
    return _run(1, function, arguments, join=False, timeout_s=timeout_s)[0]


def run_alone_together(
    count: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 180.0
) -> list[Any]:
    """`function(*arguments)` in some fresh processes that find each other themselves; their results."""
    return _run(count, function, arguments, join=False, timeout_s=timeout_s)


def _run(
    world: int, function: Callable[..., Any], arguments: tuple[Any, ...], *, join: bool, timeout_s: float
) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_context().Pipe(duplex=False) for _ in range(world)]
        processes = [
            _context().Process(
                target=_rank, args=(rank, world if join else 0, folder, sender, function, arguments), daemon=True
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        try:
            answers = _collect({receiver: rank for rank, (receiver, _) in enumerate(pipes)}, timeout_s)
        finally:
            for process in processes:
                process.join(timeout=1.0)
                process.kill()
    failed = {rank: f"{text} (exit code {processes[rank].exitcode})" for rank, (ok, text) in answers.items() if not ok}
    if failed:
        raise RanksFailed(failed)
    return [answers[rank][1] for rank in range(world)]


def _collect(waiting: dict[Connection, int], timeout_s: float) -> dict[int, tuple[bool, Any]]:
    answers: dict[int, tuple[bool, Any]] = {}
    end = time.monotonic() + timeout_s
    while waiting and time.monotonic() < end:
        for receiver in wait(list(waiting), timeout=0.5):
            rank = waiting.pop(receiver)  # type: ignore[arg-type]
            try:
                answers[rank] = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                answers[rank] = (False, "vanished without a word")
    return answers | dict.fromkeys(waiting.values(), (False, f"silent for {timeout_s} s"))


def _rank(
    rank: int, world: int, folder: str, sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    from strategist.executor.processes import leave_group

    faulthandler.enable()  # a rank that crashes says where
    torch.set_num_threads(1)
    try:
        if world:
            dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
            dist.barrier()  # a rank that ended at once would hang up on one that is still connecting
        answer = (True, function(*arguments))
    except BaseException:  # noqa: BLE001 - whatever it is, the test must see it
        answer = (False, traceback.format_exc())
    finally:
        if dist.is_initialized():
            leave_group()
    sender.send_bytes(pickle.dumps(answer))  # plain pickle: torch's own would share memory that dies with this process
    sender.close()
