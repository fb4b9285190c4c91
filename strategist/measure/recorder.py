"""Writes down what a program does: every byte it takes and gives back, every collective, every FLOP, in program order.

A TorchDispatchMode sees each operation after autograd and after DTensors were taken apart: what the device would see.
The cost per operation is constant. Nothing is judged here: `timeline.py` reads the record afterwards, when it is known
how long each allocation lived and what became of it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from strategist.measure.flops import flop_of
from strategist.measure.messages import Message, buffers_of, message_of
from strategist.measure.modules import ModuleClock
from strategist.records import dataclass

Pass = Literal["setup", "forward", "backward", "recompute", "update"]
"""What the program was doing; `recompute` is forward work inside backward, `update` all after the last backward."""


@dataclass(slots=True)
class Allocation:
    """One storage: where it was born, and what it turned out to be for (`role` is "" until somebody knows)."""

    number: int
    operation: int
    during: Pass
    made_by: str
    module: str
    shape: tuple[int, ...]
    is_floating: bool
    size: int
    role: str = ""
    stream: str = "main"
    ended_during: Pass | None = None


Change = tuple[int, int, int]
"""(operation, allocation, bytes taken or, negative, given back)."""


@dataclass(slots=True)
class Record:
    """Everything that was written down. `passes` and `modules` say what each operation belonged to."""

    allocations: dict[int, Allocation] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    flop: Counter[tuple[str, Pass]] = field(default_factory=Counter)
    passes: list[Pass] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Active inside `with`. `mark` and `passing` tell it what operations cannot."""

    def __init__(self, clock: ModuleClock, name_group: Callable[[Any], str]) -> None:
        super().__init__()
        self.record = Record()
        self._clock, self._name_group = clock, name_group
        self._known: Any = WeakIdKeyDictionary()
        self._count = 0
        self._outer: Pass | None = "setup"
        self._muted = 0
        self._replaced: list[tuple[Any, str, Any]] = []

    @contextmanager
    def passing(self, what: Pass | None) -> Iterator[None]:
        """Name what happens inside; None leaves it to autograd: forward, backward or recompute."""
        before, self._outer = self._outer, what
        try:
            yield
        finally:
            self._outer = before

    def mark(self, tensor: Tensor, role: str, stream: str | None = None) -> None:
        """Say what the storages of a tensor are for."""
        for storage in _storages(tensor):
            allocation = self._enter(storage, tensor, "")
            allocation.role = role or allocation.role
            allocation.stream = stream or allocation.stream

    def restart(self) -> None:
        """Forget what has happened but not what is alive: the record begins here."""
        known = list(self._known.values())
        self.record = Record()
        for allocation in known:
            self.record.allocations[allocation.number] = allocation
            if allocation.size:
                self.record.changes.append((-1, allocation.number, allocation.size))

    def __enter__(self) -> Recorder:
        recorder, resize = self, torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            recorder._resized(storage, size)
            return result

        self._replace(torch.UntypedStorage, "resize_", resize_)
        self._replace(ShardingPropagator, "_fake_mode_lock", _Muted(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for owner, name, value in self._replaced:
            setattr(owner, name, value)
        self._replaced.clear()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # taken apart first; its parts come back here
        kwargs = kwargs or {}
        if self._muted:
            return func(*args, **kwargs)
        self.record.passes.append(self._passing_now())
        self.record.modules.append(self._clock.now())
        result = func(*args, **kwargs)
        self._look(func, args, kwargs, result)
        return result

    def _passing_now(self) -> Pass:
        if self._outer is not None:
            return self._outer
        if torch._C._current_graph_task_id() == -1:
            return "forward"
        return "recompute" if torch.is_grad_enabled() else "backward"

    def _look(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in outputs:
            for storage in _storages(tensor):
                self._enter(storage, tensor, func._schema.name)
        flop = flop_of(func, args, kwargs, result)
        if flop:
            self.record.flop[func._schema.name, self.record.passes[-1]] += flop
        for tensor, role, stream in buffers_of(func, args, kwargs):
            self.mark(tensor, role, stream)
        message = message_of(func, args, kwargs, outputs, self._name_group)
        if message is not None:
            place = len(self.record.passes) - 1
            self.record.messages.append(message.at(place, self.record.passes[-1], self.record.modules[-1]))

    def _enter(self, storage: Any, tensor: Tensor, made_by: str) -> Allocation:
        known: Allocation | None = self._known.get(storage)
        if known is not None:
            return known
        self._count += 1
        allocation = Allocation(
            number=self._count,
            operation=len(self.record.passes) - 1,
            during=self._passing_now(),
            made_by=made_by,
            module=self._clock.now(),
            shape=tuple(tensor.shape),
            is_floating=tensor.is_floating_point(),
            size=0,
        )
        self._known[storage] = allocation
        self.record.allocations[allocation.number] = allocation
        self._change(allocation, storage.size())
        weakref.finalize(storage, self._change, allocation, 0)
        return allocation

    def _resized(self, storage: Any, size: int) -> None:
        known = self._known.get(storage)
        if known is not None:
            self._change(known, size)

    def _change(self, allocation: Allocation, size: int) -> None:
        if size != allocation.size:
            self.record.changes.append((len(self.record.passes) - 1, allocation.number, size - allocation.size))
            allocation.ended_during = None if size else self._passing_now()
            allocation.size = size


class _Muted:
    """Stands for the lock that torch holds while it works out the shapes of whole DTensors; such tensors never exist."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder._muted += 1

    def __exit__(self, *_error: Any) -> None:
        self._recorder._muted -= 1


def _storages(tensor: Tensor) -> list[Any]:
    """The untyped storages of a tensor; of its parts when it is made of several."""
    if is_traceable_wrapper_subclass_type(type(tensor)):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [storage for name in names for storage in _storages(getattr(tensor, name))]
    return [tensor.untyped_storage()]
