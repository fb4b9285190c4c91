"""Collectives without peers, for real tensors: what others would have sent is random numbers of a plausible size.

Zeros would make chips faster than they are, and NaN would stop the program, so every number that a rank receives is drawn:
normal, as wide as what this rank itself puts in. Reductions return what this rank put in, whole numbers too: it is as if
the others had put in the same. Nothing is waited for, because everything is done in the stream that asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

BACKEND = "noise"
WIDTH = 0.02
"""Standard deviation of numbers from peers whose part nothing of this rank's own can stand for (GPT-2's initial weights)."""

Listener = Callable[[], AbstractContextManager[None]]
"""Gives what is entered around a fake collective."""


class NoiseGroup(dist.ProcessGroup):
    """The group of one rank among `size` that do not exist. `listen` gives what is entered around every collective."""

    def __init__(self, rank: int, size: int, listen: Listener) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._place, self._count, self._listen = rank, size, listen

    def getBackendName(self) -> str:
        """The name that torch asks for."""
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name under which torch knows the group."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def all_gather_single(self, output: Tensor, part: Tensor, opts: Any = None) -> dist.Work:
        """This rank's part in its place, noise in the others'."""
        with self._listen():
            whole = output.view(self._count, -1)
            self._gather(whole[self._place], (whole[: self._place], whole[self._place + 1 :]), part)
        return _done()

    def all_gather_single_coalesced(self, outputs: list[Tensor], parts: list[Tensor], opts: Any = None) -> dist.Work:
        """Several at once."""
        for output, part in zip(outputs, parts, strict=True):
            self.all_gather_single(output, part)
        return _done()

    def allgather(self, outputs: list[list[Tensor]], parts: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """The same into one tensor per rank."""
        with self._listen():
            for places, part in zip(outputs, parts, strict=True):
                others = [place for index, place in enumerate(places) if index != self._place]
                self._gather(places[self._place], others, part)
        return _done()

    def _gather(self, own: Tensor, others: Sequence[Tensor], part: Tensor) -> None:
        """`own` is this rank's place among what it gathers. Gathered again, the others' parts are the same numbers: what is
        computed twice, as in recomputation, comes out the same."""
        if own.data_ptr() != part.data_ptr():
            own.copy_(part.view_as(own))
        width = width_of(part) if part.is_floating_point() else None
        for index, place in enumerate(place for place in others if place.numel()):
            if width is None:
                place.view(-1, part.numel()).copy_(part.view(-1))
            else:
                make_noise(place, width, peers_on(place.device).manual_seed(index))

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        """This rank's part of what it put in."""
        with self._listen():
            output.copy_(whole.view(self._count, -1)[self._place].view_as(output))
        return _done()

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], wholes: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Several at once."""
        for output, whole in zip(outputs, wholes, strict=True):
            self.reduce_scatter_single(output, whole)
        return _done()

    def reduce_scatter(self, outputs: list[Tensor], wholes: list[list[Tensor]], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """The same from one tensor per rank."""
        with self._listen():
            for output, parts in zip(outputs, wholes, strict=True):
                output.copy_(parts[self._place])
        return _done()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """What this rank put in; DDP asks the work for it."""
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Several at once."""
        return _done()

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """What this rank holds already: all ranks of such a group hold the same."""
        return _done()

    def all_to_all_single(
        self, output: Tensor, whole: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        """This rank's own numbers again, as many as arrive."""
        with self._listen():
            sent = whole.reshape(-1)
            arrived = output.view(-1)
            for first in range(0, arrived.numel(), max(1, sent.numel())):
                piece = arrived[first : first + sent.numel()]
                piece.copy_(sent[: piece.numel()])
        return _done()

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Nothing goes anywhere; as with gloo and NCCL, what is sent lives on until somebody has waited for it."""
        return _done(tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Noise."""
        with self._listen():
            for tensor in tensors:
                make_noise(tensor, None)
        return _done()

    def barrier(self, opts: Any = None) -> dist.Work:
        """Nobody else is late."""
        return _done()


def _done(result: Sequence[Tensor] = ()) -> dist.Work:
    """Work that is finished, with its result, which it keeps as long as somebody keeps the work."""
    devices = sorted({str(tensor.device) for tensor in result if tensor.device.type != "cpu"})
    future: Future[list[Tensor]] = Future(devices=devices or None)  # type: ignore[arg-type]
    future.set_result(list(result))
    work: dist.Work = _create_work_from_future(future)
    return work


@torch.no_grad()
def width_of(part: Tensor) -> Tensor:
    """Root mean square of a tensor, at least WIDTH's hundredth; a 0-dim tensor of its type, and no larger one is made."""
    norm: Tensor = torch.linalg.vector_norm(part)
    return norm.div_(max(1, part.numel()) ** 0.5).clamp_(min=WIDTH / 100)


@cache
def peers_on(device: torch.device) -> torch.Generator:
    """Where the numbers of peers come from on a device; seeded anew, it gives the same again."""
    return torch.Generator(device)


@torch.no_grad()
def make_noise(place: Tensor, width: Tensor | None, source: torch.Generator | None = None) -> None:
    """Fill a tensor with normal numbers of some standard deviation, WIDTH without one; whole numbers stay as they are."""
    if place.is_floating_point():
        place.normal_(0.0, WIDTH if width is None else 1.0, generator=source)
        if width is not None:
            place.mul_(width)


def register(listen: Listener = nullcontext) -> None:
    """Make the backend known to torch, once per process; `listen` hears of every collective of every group."""

    def make(_store: object, rank: int, size: int, _timeout: object) -> NoiseGroup:
        return NoiseGroup(rank, size, listen)

    dist.Backend.register_backend(BACKEND, make, devices=["cpu", "cuda"])
