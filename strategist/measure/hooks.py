"""Hooks of DDP without DDP: the bucket that they are given, and collectives that are over when they are called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, `owner` has another value under a name."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Bucket:
    """A bucket as a hook sees it (torch.distributed.GradBucket)."""

    def __init__(self, buffer: Tensor, members: list[nn.Parameter], number: int, is_last: bool) -> None:
        self._buffer, self._members, self._number, self._is_last = buffer, members, number, is_last

    def buffer(self) -> Tensor:
        """All gradients, one behind the other."""
        return self._buffer

    def parameters(self) -> list[nn.Parameter]:
        """Whose they are."""
        return self._members

    def gradients(self) -> list[Tensor]:
        """One by one, in their shapes."""
        parts = torch.split(self._buffer, [parameter.numel() for parameter in self._members])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self._members, strict=True)]

    def index(self) -> int:
        """Its number."""
        return self._number

    def is_last(self) -> bool:
        """Whether it is the last of the step."""
        return self._is_last


class Answered:
    """A collective that is over. A fake group's own answer holds no tensor."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def get_future(self) -> Any:
        """What it brought, as torch has it: in a list."""
        future: Any = torch.futures.Future()
        future.set_result([self._result])
        return future


@contextmanager
def answered() -> Iterator[None]:
    """Inside, collectives that nobody waits for answer at once with their result."""
    reduce, gather = dist.all_reduce, dist.all_gather_single

    def all_reduce(tensor: Tensor, *, group: Any, async_op: bool) -> Any:
        reduce(tensor, group=group)
        return Answered(tensor)

    def all_gather(result: Tensor, tensor: Tensor, *, group: Any, async_op: bool) -> Any:
        gather(result, tensor, group=group)
        return Answered(result)

    with instead(dist, "all_reduce", all_reduce), instead(dist, "all_gather_single", all_gather):
        yield
