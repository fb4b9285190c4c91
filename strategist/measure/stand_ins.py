"""What stands for parts of torch that cannot run without peers or without memory, and does the same to memory and links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.func import functional_call

from strategist.document.plan import Plan
from strategist.executor.drive import Drive
from strategist.executor.precision import DTYPES
from strategist.executor.tables import tables_in
from strategist.executor.threads import split
from strategist.measure.hooks import Bucket, answered

FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""Bytes of DDP's first and further buckets (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES; bucket_cap_mb = 25)."""
COALESCED_BYTES = 10 << 20
"""Bytes that nn.DataParallel sends together (torch/nn/parallel/comm.py, buffer_size = 10485760)."""


class SilentStage(PipelineStage):
    """A stage that knows its shapes and does not ask its peers, who are fake."""

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Any:
        return torch.ones(1, dtype=torch.int32, device="meta")

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Any:
        return _Yes()


class _Yes:
    """What the stages would answer together."""

    def item(self) -> int:
        """Agreement."""
        return 1


def stage_for(plan: Plan, model: Any, index: int, count: int, device: torch.device, **options: Any) -> PipelineStage:
    """The stage with its boundary shapes: tokens in, hidden states between (cut by sequence parallelism), logits out."""
    rows, seq = plan.strategy.micro_batch, plan.workload.seq_len // plan.mesh.cp
    dtype = DTYPES[plan.strategy.formats.compute]
    width = seq // plan.mesh.tp if plan.strategy.sequence_parallel else seq
    with torch.device("meta"):
        hidden = torch.empty(rows, width, plan.model.hidden, dtype=dtype, requires_grad=True)
        tokens = torch.zeros(rows, seq, dtype=torch.long)
        logits = torch.empty(rows, seq, plan.model.vocab, dtype=dtype, requires_grad=True)
    inputs, outputs = tokens if index == 0 else hidden, logits if index == count - 1 else hidden
    return SilentStage(model, index, count, device, input_args=(inputs,), output_args=(outputs,), **options)


class Replica(nn.Module):
    """DistributedDataParallel with gradient_as_bucket_view, its reducer said in Python.

    After torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp: gradients live in buckets that
    outlast the step. Before the first step there is one bucket; then the buckets are made again, in the order in which
    gradients arrived, of 1 MiB first and 25 MiB after. A gradient that autograd made is copied into its place in the
    bucket; a bucket is reduced when its last gradient has come. Under `no_sync` gradients gather outside the buckets.
    """

    def __init__(self, module: nn.Module, *, process_group: Any, gradient_as_bucket_view: bool) -> None:
        super().__init__()
        if not gradient_as_bucket_view:
            raise ValueError("only gradients that are views of buckets are described")
        self.module, self._group, self._reduces, self._is_rebuilt = module, process_group, True, False
        self._hook: Callable[[Bucket], Tensor] | None = None
        self.hook_state: Any = None
        self._parameters_here = [p for p in module.parameters() if p.requires_grad]
        self._arrived: list[nn.Parameter] = []
        self._missing: list[int] = []
        self._make_buckets([list(range(len(self._parameters_here)))])
        for parameter in self._parameters_here:
            parameter.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **more: Any) -> Any:
        """What the module gives."""
        if len(self._arrived) == len(self._parameters_here) and not self._is_rebuilt:
            self._parameters_here, self._is_rebuilt = list(self._arrived), True
            self._views.clear()  # the old buckets go before the new ones come
            self._buckets.clear()
            self._make_buckets(bucket_assignment(self._parameters_here))
        self._arrived.clear()
        self._missing = [len(indices) for indices in self._assignment]
        return self.module(*inputs, **more)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing is reduced inside."""
        self._reduces = False
        try:
            yield
        finally:
            self._reduces = True

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """From now on gradients go into their buckets as they are, and the hook sends them."""
        self.hook_state, self._hook = state, lambda bucket: hook(state, bucket).value()

    def _make_buckets(self, assignment: Sequence[Sequence[int]]) -> None:
        self._assignment = assignment
        self._buckets: list[Tensor] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        self._bucket_of: dict[nn.Parameter, int] = {}
        for number, indices in enumerate(assignment):
            members = [self._parameters_here[i] for i in indices]
            bucket = torch.empty(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
            self._buckets.append(bucket)
            for parameter, part in zip(members, _pieces(bucket, members), strict=True):
                self._views[parameter], self._bucket_of[parameter] = part.view(parameter.shape), number

    @torch.no_grad()
    def _arrive(self, parameter: nn.Parameter) -> None:
        if not self._reduces or parameter.grad is None:
            return
        view, number = self._views[parameter], self._bucket_of[parameter]
        torch.mul(parameter.grad, 1.0 if self._hook else 1.0 / self._group.size(), out=view)
        parameter.grad = view
        self._arrived.append(parameter)
        self._missing[number] -= 1
        if not self._missing[number]:
            self.send(number)

    def send(self, number: int) -> None:
        """Reduce a bucket, by the hook where there is one."""
        if self._hook is None:
            dist.all_reduce(self._buckets[number], group=self._group)
            return
        members = [self._parameters_here[i] for i in self._assignment[number]]
        with answered():
            self._hook(Bucket(self._buckets[number], members, number, number == len(self._buckets) - 1))


class NoServer:
    """A parameter server as a worker knows it, without one: rows without values, asked for and given back by messages to a neighbour,
    who is fake. Every id names another row as long as there are any, because fake ids name none."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = tables_in(model)
        self._neighbour = (dist.get_rank() + 1) % dist.get_world_size()

    def distinct(self, ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """As many rows as there are ids, or in the table; and a place for each id."""
        return ids.new_empty(min(ids.numel(), rows)), torch.empty_like(ids)

    def pull(self, name: str, ids: Tensor) -> Tensor:
        """Some rows."""
        weight = self._tables[name].weight
        rows = torch.empty(len(ids), weight.shape[1], dtype=weight.dtype, device=ids.device)
        dist.send(ids, self._neighbour)
        dist.send(rows, self._neighbour)  # which the server sends
        return rows

    def push(self, _name: str, ids: Tensor, gradient: Tensor) -> None:
        """Their gradient."""
        dist.send(ids, self._neighbour)
        dist.send(gradient, self._neighbour)

    def norm(self) -> Tensor:
        """A number without value."""
        return torch.zeros(())

    def update(self, _factor: Tensor, _rate: float) -> None:
        """Elsewhere."""

    def forget(self) -> None:
        """Elsewhere."""

    def whole(self) -> dict[str, Tensor]:
        """Nothing: nobody holds them."""
        return {}

    def state(self, *, with_optimizer: bool) -> dict[str, Tensor]:
        """Nothing either."""
        return {}

    def take(self, _state: dict[str, Tensor] | None) -> None:
        """Elsewhere."""


class NoDrive(Drive):
    """A drive for tensors without bytes: room is a tensor like any other, and what is carried is there at once."""

    def __init__(self) -> None:
        pass

    def room(self, size: int) -> Tensor:
        """A tensor of `size` bytes."""
        return torch.empty(size, dtype=torch.uint8)

    def carry(self, source: Tensor, target: Tensor) -> Future[Tensor]:
        """The copy, which is done."""
        done: Future[Tensor] = Future()
        done.set_result(target.copy_(source))
        return done


def _pieces(bucket: Tensor, members: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.split(bucket, [p.numel() for p in members])


def bucket_assignment(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Which parameters share a bucket, by torch's own rule."""
    shadows = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in parameters]
    indices: list[list[int]]
    indices, _ = torch._C._distributed_c10d._compute_bucket_assignment_by_size(shadows, [FIRST_BUCKET, BUCKET])
    return indices


class FirstDevice(nn.Module):
    """nn.DataParallel as device 0 of `count` knows it, without the others: it has the first part of each batch, gets the others'
    losses, and adds their gradients to its own, which say in Python what torch/nn/parallel/comm.py does on GPUs."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.module, self.count = module, count

    def forward(self, **batch: Tensor) -> Tensor:
        """The losses of all devices, (count,)."""
        own = dict(self.module.named_parameters())
        replica = dict(zip(own, Summed.apply(*own.values()), strict=True))  # type: ignore[no-untyped-call]
        loss: Tensor = functional_call(self.module, replica, args=(), kwargs=next(split(batch, self.count)))
        return torch.cat([loss, loss.new_zeros(self.count - 1)])


class Summed(torch.autograd.Function):
    """Weights as a replica uses them: their gradients wait for the last of them and are then added up with those of other devices,
    small ones laid flat together."""

    @staticmethod
    def forward(_context: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        """The weights themselves: device 0 makes no copy."""
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Tensors for the sums, in the order of the weights."""
        return tuple(total for piece in coalesced(gradients) for total in _sums(piece))


def _sums(piece: list[Tensor]) -> Iterator[Tensor]:
    flat = piece[0].reshape(-1) if len(piece) == 1 else torch.cat([each.reshape(-1) for each in piece])
    parts = _pieces(torch.empty_like(flat), piece)
    return (part.view(each.shape) for part, each in zip(parts, piece, strict=True))


def coalesced(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in order, in lists of at most COALESCED_BYTES; a larger one is alone."""
    piece: list[Tensor] = []
    for tensor in tensors:
        if piece and sum(each.nbytes for each in piece) + tensor.nbytes > COALESCED_BYTES:
            yield piece
            piece = []
        piece.append(tensor)
    yield piece
