"""A parameter server: tables of embeddings in the memory of a process of their own, everything else under DDP on the workers.

A worker pulls the rows that its sequences name, once each, and pushes their gradients back while autograd runs (Li et al. 2014,
Scaling Distributed Machine Learning with the Parameter Server, section 3). The server adds up what all workers push and updates
once a step, when they have reduced the rest: training is that of one process. torch's distributed autograd keeps the gradients of
each worker apart and its DistributedOptimizer updates once for each of them, which under AdamW is another algorithm: neither is
used (decision 0086). Processes talk through torch.distributed.rpc.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc
from torch.utils.data import Dataset

from strategist.document.load import plan_from
from strategist.document.plan import Plan
from strategist.document.write import dump
from strategist.errors import ImpossibleError
from strategist.executor.architecture import model_obstacles
from strategist.executor.build import build
from strategist.executor.models import ReferenceModel, model_from_shape
from strategist.executor.obstacles import Obstacle, refuse
from strategist.executor.optimizers import default_optimizer
from strategist.executor.precision import parameter_dtype
from strategist.executor.processes import one_verdict, process_group
from strategist.executor.seeds import generator
from strategist.executor.session import Session, StepResult
from strategist.executor.support import layout_obstacles
from strategist.executor.train import CLIP_NORM, OnStep, run_steps, synthetic_data
from strategist.records import replace

SERVER = "server"
MakeModel = Callable[[], nn.Module]
TABLES = (nn.Embedding, nn.EmbeddingBag)


def train_with_server(
    plan: Plan,
    rank: int,
    meeting: str,
    steps: int = 20,
    *,
    make_model: MakeModel | None = None,
    dataset: Dataset[Any] | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> tuple[StepResult, ...]:
    """Train as `rank` of the plan's workers, or hold the tables as the rank behind them; a worker's steps, nothing for the server.

    plan: data parallelism (DDP) on one node. meeting: a URL that torch.distributed.rpc can meet at, such as file:///tmp/new. The
    workers' own process group is the running one, or what the environment says. make_model: a function that the server can call
    too, whose modules come with equal values everywhere; by default the model of the plan. Raises ImpossibleError for other plans
    and for models that share a table with another module.
    """
    refuse((*layout_obstacles(plan), *server_obstacles(plan)))
    if make_model is None:
        refuse(model_obstacles(plan.model, plan.workload.seq_len))
    with meet(rank, plan.mesh.world, meeting):
        if rank == plan.mesh.world:
            return ()
        with process_group(plan) as world, one_verdict(world):
            data = dataset if dataset is not None else synthetic_data(plan, steps, seed)
            with served_session(plan, make_model, seed=seed, clip_norm=CLIP_NORM) as session:
                return tuple(run_steps(session, data, steps, seed=seed, on_step=on_step))


def server_obstacles(plan: Plan) -> Iterator[Obstacle]:
    """Why a plan cannot be run with its tables on a server."""
    mesh, s = plan.mesh, plan.strategy
    if (
        mesh.dp_replicate != mesh.world
        or s.zero
        or s.replicas != "processes"
        or s.offload != "none"
        or plan.cluster.nodes > 1
    ):
        yield Obstacle(
            code="UNSUPPORTED",
            place="strategy.zero",
            value=s.zero,
            sentence="The parameter server goes with DDP alone: ranks of mesh.dp_replicate on one node under zero = 0, each a "
            "process, and nothing offloaded.",
            hint="Plan with --pin dp_replicate=N,zero=0.",
        )
    if plan.model.tied:
        yield Obstacle(
            code="UNSUPPORTED",
            place="model.tied",
            value=True,
            sentence="The output head shares its weight with the table of tokens, which the server would have alone.",
            hint="Choose a model whose ends are two weights.",
        )


@contextmanager
def meet(rank: int, workers: int, meeting: str) -> Iterator[None]:
    """The workers and the server behind them, who know each other by name; left together."""
    name = SERVER if rank == workers else f"worker{rank}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting)
    rpc.init_rpc(name, rank=rank, world_size=workers + 1, rpc_backend_options=options)  # type: ignore[no-untyped-call]
    try:
        yield
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    rpc.shutdown()


class Tables:
    """Tables of embeddings by name and their optimizer, as the server holds them; its methods are called by the workers."""

    def __init__(self, weights: Mapping[str, Tensor], plan: Plan, learning_rate: float | None) -> None:
        self._weights = {name: nn.Parameter(weight) for name, weight in weights.items()}
        make = default_optimizer(plan) if learning_rate is None else default_optimizer(plan, learning_rate)
        self._optimizer = make([{"params": list(self._weights.values())}])
        self._workers, self._lock = plan.mesh.world, threading.Lock()
        self.forget()

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Some rows of a table."""
        return self._weights[name].detach().index_select(0, ids)

    def add(self, name: str, ids: Tensor, gradient: Tensor) -> None:
        """Add a worker's gradient of some rows, each named once, to the mean over all workers."""
        with self._lock:
            self._gradient(name).index_add_(0, ids, gradient / self._workers)

    def norm(self) -> Tensor:
        """The Euclidean norm of all gradients."""
        return torch.nn.utils.get_total_norm([self._gradient(name) for name in self._weights])

    def update(self, factor: Tensor) -> None:
        """One step of the optimizer with `factor` times the gradients."""
        for name in self._weights:
            self._gradient(name).mul_(factor)
        self._optimizer.step()
        self.forget()

    def forget(self) -> None:
        """Gradients of zero."""
        for weight in self._weights.values():
            weight.grad = torch.zeros_like(weight)

    def whole(self) -> dict[str, Tensor]:
        """The tables by the names of their weights in the model."""
        return {f"{name}.weight": weight.detach().clone() for name, weight in self._weights.items()}

    def _gradient(self, name: str) -> Tensor:
        gradient = self._weights[name].grad
        if gradient is None:
            raise KeyError(name)
        return gradient


@cache
def tables_of(plan_text: str, make_model: MakeModel | None, seed: int, learning_rate: float | None) -> Tables:
    """The tables of a job, made when the first worker asks for them. Runs in the server."""
    plan = plan_from(json.loads(plan_text), "plan")
    model = model_from_shape(plan.model) if make_model is None else make_model()
    dtype = parameter_dtype(plan)
    weights = {
        name: _values(model, f"{name}.weight", table.weight, dtype, seed) for name, table in tables_in(model).items()
    }
    return Tables(weights, plan, learning_rate)


def _values(model: nn.Module, name: str, weight: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """A table's values: its own, or what the built-in model begins with."""
    if not isinstance(model, ReferenceModel):
        return weight.detach().to(dtype)
    whole = torch.empty(weight.shape, dtype=dtype)
    with torch.no_grad():
        model.fill(name, whole, generator("cpu", seed, name))
    return whole


def tables_in(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Every table of embeddings in a model by its name. Raises ImpossibleError UNSUPPORTED for a model without any, and for tables
    that do more than give rows."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, TABLES)}
    shared = [
        n for n, p in model.named_parameters(remove_duplicate=False) if any(p is t.weight for t in found.values())
    ]
    odd = [n for n, t in found.items() if t.padding_idx is not None or t.max_norm is not None or t.scale_grad_by_freq]
    if not found or len(shared) > len(found) or odd:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"{type(model).__name__} has no tables of embeddings that a server can hold: they must give rows and nothing else "
            "(no padding_idx, max_norm or scale_grad_by_freq), and share no weight.",
            flag="model",
            hint="Train it without a server.",
        )
    return found


class RemoteTable(nn.Module):
    """Stands where a table of embeddings was: pulls the rows of a batch and pushes their gradients."""

    def __init__(self, name: str, table: nn.Embedding | nn.EmbeddingBag, tables: rpc.RRef[Tables]) -> None:
        super().__init__()
        self.name, self.tables = name, tables
        self.mode = table.mode if isinstance(table, nn.EmbeddingBag) else None

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        """What the table would give: a row for each id, or one for each bag of them."""
        named, places = ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        wanted = torch.zeros((), requires_grad=torch.is_grad_enabled())  # without it autograd would not come back here
        rows: Tensor = Pulled.apply(wanted, self.name, named, self.tables)  # type: ignore[no-untyped-call]
        if self.mode is None:
            return nn.functional.embedding(places, rows)
        return nn.functional.embedding_bag(places, rows, offsets, mode=self.mode)


class Pulled(torch.autograd.Function):
    """Rows of a table elsewhere."""

    @staticmethod
    def forward(context: Any, _wanted: Tensor, name: str, ids: Tensor, tables: rpc.RRef[Tables]) -> Tensor:
        """The rows of `ids`, each of which is named once, on their device."""
        context.asked = name, ids, tables
        rows: Tensor = tables.rpc_sync().rows(name, ids.cpu())
        return rows.to(ids.device)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        """Send the gradient of the rows, and wait until it has arrived."""
        name, ids, tables = context.asked
        tables.rpc_sync().add(name, ids.cpu(), gradient.cpu())
        return None, None, None, None


class Outside:
    """What a worker's session asks of the tables once a step, when the gradients of all workers have arrived."""

    def __init__(self, tables: rpc.RRef[Tables]) -> None:
        self.tables = tables

    def norm(self) -> Tensor:
        """The norm of their gradients."""
        found: Tensor = self.tables.rpc_sync().norm()
        return found

    def update(self, factor: Tensor) -> None:
        """Update them, once for all workers."""
        self._once(lambda tables: tables.update(factor.cpu()))

    def forget(self) -> None:
        """Drop their gradients."""
        self._once(lambda tables: tables.forget())

    def whole(self) -> dict[str, Tensor]:
        """Their values."""
        found: dict[str, Tensor] = self.tables.rpc_sync().whole()
        return found

    def _once(self, work: Callable[[Any], None]) -> None:
        dist.barrier()  # everybody has asked for the norm
        if dist.get_rank() == 0:
            work(self.tables.rpc_sync())
        dist.barrier()  # nobody pulls rows of before


def served_session(
    plan: Plan,
    make_model: MakeModel | None = None,
    *,
    seed: int = 0,
    clip_norm: float | None = None,
    learning_rate: float | None = None,
) -> Session:
    """A worker's session, whose tables are on the server. All workers call it; `meet` must have been entered."""
    model = model_from_shape(plan.model) if make_model is None else make_model()
    asked = (dump(plan), make_model, seed, learning_rate)
    if dist.get_rank() == 0:
        rpc.rpc_sync(SERVER, _prepare, args=asked)
    dist.barrier()
    tables = rpc.remote(SERVER, tables_of, args=asked)
    for name, table in tables_in(model).items():
        model.set_submodule(name, RemoteTable(name, table, tables))
    make = None if learning_rate is None else default_optimizer(plan, learning_rate)
    session = build(plan, model, make, clip_norm=clip_norm, seed=seed)
    session.parts = replace(session.parts, outside=Outside(tables))
    return session


def _prepare(*asked: Any) -> None:
    """Have the tables made once, before many ask for them."""
    tables_of(*asked)
