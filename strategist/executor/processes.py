"""Joining and leaving the process group, and finding out which rank failed first."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from strategist.document.plan import Plan
from strategist.errors import ImpossibleError, StrategistError, TrainingError
from strategist.executor.mesh import check_world
from strategist.records import dataclass
from strategist.runs.launch import STORE
from strategist.runs.verdict import Failure

GRACE_SECONDS = 3.0
"""How long a rank that lost its peers waits for one of them to say why."""

SETTLE_SECONDS = 0.05
"""How long gloo's threads may take to let go of what they sent; a waiting one gets the interpreter's lock at once."""

NETWORK_WORDS = ("connection", "broken pipe", "socket", "timed out", "timeout", "nccl", "unhandled system error")
"""Words in the errors of a rank that only lost its peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Where this process stands. `store` is what all ranks can write to and read from."""

    rank: int
    size: int
    device: torch.device
    store: Store


@contextmanager
def process_group(plan: Plan) -> Iterator[World]:
    """Join the plan's process group for the duration, and always leave it: torch aborts processes that do not.

    Uses the group that is already running, without leaving it; otherwise what torchrun put into the environment;
    otherwise a group of this process alone. Raises ImpossibleError UNSUPPORTED_DEVICE when the plan's backend needs
    GPUs that are not here.
    """
    device = device_for(plan)
    if dist.is_initialized():
        yield _world(device, dist.distributed_c10d._get_default_store())
        return
    store = _join(plan)
    _limit_threads(device)
    try:
        yield _world(device, store)
    finally:
        if dist.is_initialized():
            leave_group()


def leave_group() -> None:
    """Destroy the process group. Gloo's threads need the interpreter's lock to let go of the last collective's tensors, and whoever destroys
    the group holds it while it waits for them to end (PyTorch 2.13 ProcessGroupGloo.cpp, ~ProcessGroupGloo and runLoop): they get
    it before."""
    if dist.get_backend() == "gloo":
        time.sleep(SETTLE_SECONDS)
    dist.destroy_process_group()


def _world(device: torch.device, store: Store) -> World:
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=device, store=store)


def device_for(plan: Plan) -> torch.device:
    """The device of this process: a GPU for nccl, the CPU for gloo."""
    if plan.strategy.backend == "gloo":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ImpossibleError(
            "UNSUPPORTED_DEVICE",
            f"The plan talks through {plan.strategy.backend}, which needs GPUs, and torch sees none here.",
            flag="$.strategy.backend",
            value=plan.strategy.backend,
            hint="Run it on the planned machines, or plan for a CPU node.",
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _join(plan: Plan) -> Store:
    """Start the group. Each restart by torchrun gets its own prefix: stale keys of the last attempt stop gloo."""
    check_world(plan, int(os.environ.get("WORLD_SIZE", "1")))
    store: Store = HashStore()
    rank, size = 0, 1
    if STORE in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = FileStore(os.environ[STORE], size)
    elif "RANK" in os.environ:
        shared, rank, size = next(rendezvous("env://"))
        store = PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
    dist.init_process_group(plan.strategy.backend, store=store, rank=rank, world_size=size)
    return store


def _limit_threads(device: torch.device) -> None:
    """One thread per CPU rank, unless the user said otherwise: ranks on one machine would fight for its cores."""
    if device.type == "cpu" and dist.get_world_size() > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@contextmanager
def one_verdict(world: World) -> Iterator[None]:
    """Turn the ranks' various exceptions into one: a rank that only lost its peers names the one that broke.

    A rank with an error of its own says so in the store and ends at once; that closes its connections, the others fail
    in a collective and look up why. Errors of strategist's own pass unchanged. Raises TrainingError.
    """
    try:
        yield
    except Exception as error:
        mine = Failure(rank=world.rank, collateral=is_collateral(error), text=text_of(error))
        world.store.set(_key(world.rank), json.dumps(dataclasses.asdict(mine)))
        if isinstance(error, StrategistError):
            raise
        root = root_cause(_accounts(world)) if mine.collateral else mine
        raise TrainingError(
            "TRAINING",
            f"Rank {root.rank} of {world.size} failed: {root.text}",
            value=root.rank,
            hint="The traceback of that rank says where.",
        ) from error


def is_collateral(error: BaseException | None) -> bool:
    """True when an error only says that a peer is gone."""
    first = _innermost(error) if error else None
    return isinstance(first, RuntimeError) and any(word in str(first).lower() for word in NETWORK_WORDS)


def text_of(error: BaseException) -> str:
    """Type and words of what went wrong first."""
    first = _innermost(error)
    return f"{type(first).__name__}: {first}"


def _innermost(error: BaseException) -> BaseException:
    """What an error was raised from, as far as our own words: torch wraps all that breaks in a pipeline's stage in an error of its own, with
    the shapes of its tensors and without a word of the cause (PyTorch 2.13 torch/distributed/pipelining/_backward.py, stage_backward)."""
    cause = None if isinstance(error, StrategistError) else error.__cause__
    return _innermost(cause) if cause else error


def root_cause(failures: tuple[Failure, ...]) -> Failure:
    """The failure of the lowest rank that did not just lose its peers; of the lowest rank when all did."""
    return min(failures, key=lambda failure: (failure.collateral, failure.rank))


def _key(rank: int) -> str:
    return f"failure/{rank}"


def _accounts(world: World) -> tuple[Failure, ...]:
    """What the ranks said so far, as soon as one of them has an error of its own or the grace time is over."""
    end = time.monotonic() + GRACE_SECONDS
    while True:
        told = [_key(rank) for rank in range(world.size) if world.store.check([_key(rank)])]
        failures = tuple(Failure(**json.loads(world.store.get(key))) for key in told)
        if time.monotonic() > end or not all(failure.collateral for failure in failures):
            return failures
        time.sleep(0.05)
