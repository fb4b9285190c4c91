"""A parameter server: tables of embeddings in the memory of a process of their own, everything else under DDP on the workers.

The server adds up what all workers push and updates once a step, when they have reduced the rest: training is that of one
process (Li et al. 2014, Scaling Distributed Machine Learning with the Parameter Server, section 3). torch's distributed autograd keeps
the gradients of each worker apart and its DistributedOptimizer updates once for each of them, which under AdamW is another
algorithm: neither is used (decision 0086). Processes talk through torch.distributed.rpc.

`python -m strategist.executor.parameter_server MEETING WORKERS` is the process that rank 0 starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc

from strategist.document.load import plan_from
from strategist.document.plan import Plan
from strategist.document.write import dump
from strategist.errors import ImpossibleError
from strategist.executor.checkpoint import HeldStates, fill_optimizer, state_of_parameters, take_states
from strategist.executor.models import model_from_shape
from strategist.executor.models.reference import ReferenceModel
from strategist.executor.optimizers import default_optimizer
from strategist.executor.precision import parameter_dtype
from strategist.executor.seeds import generator
from strategist.executor.tables import tables_in
from strategist.runs.launch import dying_with

SERVER = "server"
ANSWER_SECONDS = 1800
"""How long a worker waits for the server, which may have large tables to update: as long as process groups wait for each other."""
TRANSPORTS = ["uv"]
"""Of TensorPipe's: sockets that are waited for. The one through shared memory asks again and again, and takes a core of every process."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""Calls run what they name, and nobody asks who calls: all are on one node, and listen to nobody else (variable TP_SOCKET_IFNAME)."""


@contextmanager
def beside_server(device: torch.device) -> Iterator[None]:
    """Every rank of the running process group, beside a process that rank 0 starts and that will hold tables; it ends with rank 0.

    Raises ImpossibleError UNSUPPORTED where torch was built without RPC.
    """
    if not rpc.is_available():
        raise ImpossibleError(
            "UNSUPPORTED",
            "strategy.tables = server needs torch.distributed.rpc, which this build of torch does not have.",
            flag="$.strategy.tables",
            value="server",
            hint="Plan with tables=local, or install torch from its own site.",
        )
    rank, workers = dist.get_rank(), dist.get_world_size()
    meetings: list[int] = [0] * workers
    dist.all_gather_object(meetings, rpc._init_counter)
    with tempfile.TemporaryDirectory() as folder:
        place = [Path(folder, "rpc").as_uri()]
        dist.broadcast_object_list(place, src=0, device=device)
        process = _start(place[0], workers) if rank == 0 else None
        try:
            with meet(rank, workers, place[0], leaves_together=not any(meetings)):
                yield
                dist.barrier()  # nobody asks any more
        finally:
            if process is not None:
                process.kill()
                process.wait()


def _start(meeting: str, workers: int) -> subprocess.Popen[bytes]:
    command = (sys.executable, "-m", "strategist.executor.parameter_server", meeting, str(workers))
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=dying_with(os.getpid()))


@contextmanager
def meet(rank: int, workers: int, meeting: str, *, leaves_together: bool = True) -> Iterator[None]:
    """The workers and the server behind them, who know each other by name. meeting: a URL that torch.distributed.rpc can meet at, such
    as file:///tmp/new.

    torch means processes to meet again as the ones that met before, and counts: the number of a process' meetings, of what those of some
    names asked each other, of leavings. A new server begins anew where workers go on: these look for it as if it were their
    first meeting, under new names, and where it is not, each leaves alone, which torch warns of.
    """
    name = f"{SERVER if rank == workers else f'worker{rank}'}{_mark(meeting)}"
    rpc._init_counter = 0
    os.environ.setdefault("TP_SOCKET_IFNAME", LOOPBACK)
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting, rpc_timeout=ANSWER_SECONDS, _transports=TRANSPORTS)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own way to meet
        rpc.init_rpc(name, rank=rank, world_size=workers + 1, rpc_backend_options=options)  # type: ignore[no-untyped-call]
        try:
            yield
        except BaseException:
            rpc.shutdown(graceful=False)
            raise
        rpc.shutdown(graceful=leaves_together)


def _mark(meeting: str) -> str:
    """What ends all names of one meeting."""
    return f"-{zlib.crc32(meeting.encode()):08x}"


class Tables:
    """Tables of embeddings by name and their optimizer, as the server holds them; its methods are called by the workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weights: dict[str, nn.Parameter] = {}

    def hold(self, weights: Mapping[str, Tensor], plan_text: str, learning_rate: float | None) -> None:
        """Hold these values from now on, and update them as the plan says."""
        plan = plan_from(json.loads(plan_text), "plan")
        self._weights = {name: nn.Parameter(weight) for name, weight in weights.items()}
        make = default_optimizer(plan) if learning_rate is None else default_optimizer(plan, learning_rate)
        self._optimizer = make([{"params": list(self._weights.values())}])
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._workers, self._is_made = plan.mesh.world, False
        self.forget()

    def begin(self, plan_text: str, seed: int, learning_rate: float | None) -> None:
        """Hold the tables of the plan's own model from now on, with the values that it begins with."""
        plan = plan_from(json.loads(plan_text), "plan")
        model = model_from_shape(plan.model)
        dtype = parameter_dtype(plan)
        values = {name: _first(model, name, table.weight, dtype, seed) for name, table in tables_in(model).items()}
        self.hold(values, plan_text, learning_rate)

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Some rows of a table."""
        return self._weights[name].detach().index_select(0, ids)

    def add(self, name: str, worker: int, ids: Tensor, gradient: Tensor) -> None:
        """Add a worker's gradient of some rows, each named once, to the mean over all workers: the first of every worker, then the
        second of every worker, so that a step gives the same numbers whoever is first."""
        with self._lock:
            turn = self._turns[name, worker]
            self._turns[name, worker] = turn + 1
            self._waiting[name, turn, worker] = ids, gradient / self._workers
            while (next_one := (name, *divmod(self._done[name], self._workers))) in self._waiting:
                self._add(next_one)

    def _add(self, one: tuple[str, int, int]) -> None:
        ids, gradient = self._waiting.pop(one)
        self._gradient(one[0]).index_add_(0, ids, gradient)
        self._done[one[0]] += 1

    def norm(self) -> Tensor:
        """The Euclidean norm of all gradients, which have arrived; those that waited for another that never came are added up now."""
        with self._lock:
            for one in sorted(self._waiting):
                self._add(one)
        return torch.nn.utils.get_total_norm([self._gradient(name) for name in self._weights])

    def update(self, factor: Tensor, rate: float) -> None:
        """One step of the optimizer with `factor` times the gradients and `rate` times its learning rate."""
        for name in self._weights:
            self._gradient(name).mul_(factor)
        for group, own in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = own * rate
        self._optimizer.step()
        self.forget()

    def forget(self) -> None:
        """Gradients of zero."""
        self._waiting: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}
        self._turns: Counter[tuple[str, int]] = Counter()
        self._done: Counter[str] = Counter()
        for weight in self._weights.values():
            weight.grad = torch.zeros_like(weight)

    def whole(self) -> dict[str, Tensor]:
        """The tables by the names of their weights in the model."""
        return {name: weight.detach().clone() for name, weight in self._named().items()}

    def state(self, with_optimizer: bool) -> dict[str, Tensor]:
        """Tables and optimizer state under the names of a checkpoint; the state is made where there must be one."""
        if with_optimizer and not self._optimizer.state:
            fill_optimizer(self._named().values(), self._optimizer)
            self.forget()
            self._is_made = True
        return self._stored()

    def take(self, state: Mapping[str, Tensor] | None) -> None:
        """Values for what `state` gave, or for the tables alone, or none."""
        if state is None and self._is_made:
            self._optimizer.state.clear()
        self._is_made = False
        if state is None:
            return
        own = self._stored()
        with torch.no_grad():
            for name, value in state.items():
                own[name].copy_(value)
        if any(name.startswith("optimizer/") for name in state):
            take_states(self._optimizer, self._held(), state)

    def _named(self) -> dict[str, nn.Parameter]:
        return {f"{name}.weight": weight for name, weight in self._weights.items()}

    def _held(self) -> list[HeldStates]:
        states = self._optimizer.state
        return [(name, weight, states[weight]) for name, weight in self._named().items() if weight in states]

    def _stored(self) -> dict[str, Tensor]:
        return state_of_parameters(self._named(), self._held())

    def _gradient(self, name: str) -> Tensor:
        gradient = self._weights[name].grad
        if gradient is None:
            raise KeyError(name)
        return gradient


def _first(model: ReferenceModel, name: str, weight: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """What a table of the built-in model begins with."""
    name, whole = f"{name}.weight", torch.empty(weight.shape, dtype=dtype)
    with torch.no_grad():
        model.fill(name, whole, generator("cpu", seed, name))
    return whole


@cache
def the_tables() -> Tables:
    """Those of this process. Runs in the server."""
    return Tables()


def answer(name: str, arguments: tuple[Any, ...]) -> Any:
    """What the tables' method of this name gives. Runs in the server."""
    return getattr(the_tables(), name)(*arguments)


def serving(plan: Plan, model: nn.Module, *, seed: int = 0, learning_rate: float | None = None) -> RemoteServer:
    """The server, holding the tables of `model` from now on: the values that rank 0 has, or those that the built-in model begins
    with. Every worker calls it, inside `meet` or `beside_server`. Raises ImpossibleError as `tables_in`."""
    found, text, server = tables_in(model), dump(plan), RemoteServer()
    if dist.get_rank() == 0:
        if isinstance(model, ReferenceModel):
            server.ask("begin", text, seed, learning_rate)
        else:
            dtype = parameter_dtype(plan)
            values = {name: table.weight.detach().to("cpu", dtype) for name, table in found.items()}
            server.ask("hold", values, text, learning_rate)
    dist.barrier()
    return server


class RemoteServer:
    """The tables in the server's process, as a worker reaches them: by plain calls, because torch's remote references stay with the first
    meeting of a process."""

    def __init__(self) -> None:
        self._name = f"{SERVER}-{rpc.get_worker_info().name.partition('-')[2]}"

    def ask(self, name: str, *arguments: Any) -> Any:
        """What a method of Tables gives there."""
        return rpc.rpc_sync(self._name, answer, args=(name, arguments))

    def distinct(self, ids: Tensor, _rows: int) -> tuple[Tensor, Tensor]:
        """What `ids` name, and where among these each of them is."""
        named, places = ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        return named, places

    def pull(self, name: str, ids: Tensor) -> Tensor:
        """Some rows, on the device of the ids."""
        rows: Tensor = self.ask("rows", name, ids.cpu())
        return rows.to(ids.device)

    def push(self, name: str, ids: Tensor, gradient: Tensor) -> None:
        """Add their gradient."""
        self.ask("add", name, dist.get_rank(), ids.cpu(), gradient.cpu())

    def norm(self) -> Tensor:
        """The norm of all gradients, when those of all workers have arrived."""
        found: Tensor = self.ask("norm")
        return found

    def update(self, factor: Tensor, rate: float) -> None:
        """Update the tables, once for all workers."""
        self._ask_once("update", factor.cpu(), rate)

    def forget(self) -> None:
        """Drop their gradients."""
        self._ask_once("forget")

    def whole(self) -> dict[str, Tensor]:
        """Their values."""
        found: dict[str, Tensor] = self.ask("whole")
        return found

    def state(self, *, with_optimizer: bool) -> dict[str, Tensor]:
        """What a checkpoint has of the tables, on rank 0."""
        if dist.get_rank() > 0:
            return {}
        found: dict[str, Tensor] = self.ask("state", with_optimizer)
        return found

    def take(self, state: dict[str, Tensor] | None) -> None:
        """What rank 0 has read."""
        self._ask_once("take", state)

    def _ask_once(self, name: str, *arguments: Any) -> None:
        dist.barrier()  # everybody has asked for the norm
        if dist.get_rank() == 0:
            self.ask(name, *arguments)
        dist.barrier()  # nobody pulls rows of before


def main(meeting: str, workers: int) -> None:
    """Hold tables until all workers leave, or until rank 0 ends this process, or ends."""
    with meet(workers, workers, meeting):
        pass


if __name__ == "__main__":
    from strategist.executor import parameter_server  # calls name functions of this module, not of __main__

    parameter_server.main(sys.argv[1], int(sys.argv[2]))
