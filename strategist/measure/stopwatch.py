"""The time of each operation of a step, by the Plan's terms.

A TorchDispatchMode sees each operation after autograd and after DTensors were taken apart, and marks the device's clock
before and after it. What a bracket reads when nothing is done is measured first and taken off each reading. A step under
the stopwatch is slower than one without; only the times inside the brackets are used.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from strategist.executor.models.experts import MixtureOfExperts, Router
from strategist.executor.names import plain_name
from strategist.measure.clocks import Clock
from strategist.measure.flops import costs_flop, is_attention
from strategist.measure.messages import FAMILIES
from strategist.measure.modules import ModuleClock
from strategist.measure.passes import PassClock
from strategist.measure.timeline import Outline
from strategist.records import dataclass, field

EMPTY_READINGS = 200
LEAD_EVERY = 200
"""Operations after which the device is kept busy again: its queue holds about a thousand launches, and a host that is slower than
the device would be overtaken, with its launching in the readings."""
LAUNCH_BATCHES, LAUNCHES = 20, 200
SKIPPED = ("prim", "profiler", *FAMILIES)
"""Namespaces of what is no work of this device: questions, notes, and collectives, which time themselves."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One operation: its term, how often it stands for others like it, where it ran, and the marks around it."""

    term: str
    times: int
    is_main: bool
    is_again: bool
    begin: Any
    end: Any


@dataclass(slots=True)
class Meter:
    """The marks of one step. `left_out` micro-batches do not run; the second stands for them too.

    `turns` are places where another number of micro-batches begins to be stood for, `fakes` what stood for peers.
    """

    clock: Clock
    left_out: int = 0
    forwards: int = 0
    times: int = 1
    turns: list[tuple[int, Any]] = field(default_factory=list)
    fakes: list[tuple[int, bool, Any, Any]] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    is_faking: bool = False

    def begin(self) -> None:
        """The step begins."""
        self._turn(1)

    def forward(self) -> None:
        """The whole model begins to run on a micro-batch."""
        self.forwards += 1
        if self.left_out and self.forwards in (2, 3):
            self._turn(1 + self.left_out if self.forwards == 2 else 1)

    def end(self) -> None:
        """The step is over; wait until the device says so too."""
        self._turn(0)
        self.clock.settle()

    def _turn(self, times: int) -> None:
        self.times = times
        self.turns.append((times, self.clock.mark()))

    @contextmanager
    def faking(self) -> Iterator[None]:
        """What happens inside stands for what peers would have sent."""
        begin, self.is_faking = self.clock.mark(), True
        try:
            yield
        finally:
            self.is_faking = False
            self.fakes.append((self.times, self.clock.is_main(), begin, self.clock.mark()))

    @property
    def fake_ns(self) -> int:
        """Time of everything that stood for peers."""
        return sum(times * self.clock.ns(begin, end) for times, _, begin, end in self.fakes)

    @property
    def step_ns(self) -> int:
        """Time of the step with all its micro-batches, without what stood for peers in the stream that computes."""
        whole = sum(
            times * self.clock.ns(begin, end)
            for (times, begin), (_, end) in zip(self.turns, self.turns[1:], strict=False)
        )
        fakes = sum(times * self.clock.ns(begin, end) for times, is_main, begin, end in self.fakes if is_main)
        return max(0, whole - fakes)


class Terms:
    """Which of the Plan's time terms an operation belongs to.

    Copies that FSDP2 makes around its collectives are part of them: dp. The update is everything after the last backward
    pass: completing, measuring and limiting gradients too.
    """

    def __init__(self, model: nn.Module, outline: Outline, *, is_offloaded: bool, has_head: bool) -> None:
        self._outline, self._update = outline, "offload" if is_offloaded else "optimizer"
        named = [(plain_name(name), module) for name, module in model.named_modules()]
        self._dispatch = {name for name, module in named if isinstance(module, (MixtureOfExperts, Router))}
        self._tables = {name for name, module in named if isinstance(module, nn.Embedding)}
        self._has_head = has_head

    def of(self, func: Any, tensors: Sequence[Tensor], module: str, during: str) -> str:
        """The term of one operation on `tensors` during the work of `module`."""
        if during == "update":
            return self._update
        if func.namespace == "fsdp":
            return "dp"
        if is_attention(func):
            return "attention"
        if costs_flop(func):
            return "matmul"
        if module in self._dispatch:
            return "moe_dispatch"
        return "loss" if any(self._is_logits(tensor, module) for tensor in tensors) else "elementwise"

    def _is_logits(self, tensor: Tensor, module: str) -> bool:
        outline = self._outline
        if not self._has_head or module in self._tables:
            return False
        is_wide = tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape[-1] == outline.vocabulary
        return is_wide and tensor.numel() // outline.vocabulary in outline.tokens and not outline.block_of(module)


class Stopwatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active inside `with`; fills the meter's readings. `launched` counts operations that a device would be given."""

    def __init__(self, meter: Meter, terms: Callable[[Any, Sequence[Tensor]], str], passes: PassClock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter, self._terms, self._passes = meter, terms, passes
        self.launched = self._seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # taken apart first; its parts come back here
        kwargs = kwargs or {}
        if self._meter.is_faking or func.is_view or func.namespace in SKIPPED:
            return func(*args, **kwargs)
        clock = self._meter.clock
        self._keep_ahead(clock)
        begin = clock.mark()
        result = func(*args, **kwargs)
        end = clock.mark()
        self._read(func, (args, kwargs, result), begin, end)
        return result

    def _keep_ahead(self, clock: Clock) -> None:
        """Between operations of the main stream, now and then."""
        self._seen += 1
        if self._seen >= LEAD_EVERY and clock.is_main():
            self._seen = 0
            clock.lead()

    def _read(self, func: Any, values: Any, begin: Any, end: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            return  # DTensor works out a shape
        term, is_again = self._terms(func, tensors), self._passes.now() == "recompute"
        self.launched += self._meter.times
        self._meter.readings.append(Reading(term, self._meter.times, self._meter.clock.is_main(), is_again, begin, end))


def terms_by_module(terms: Terms, modules: ModuleClock, passes: PassClock) -> Callable[[Any, Sequence[Tensor]], str]:
    """The term of an operation where the program stands."""
    return lambda func, tensors: terms.of(func, tensors, modules.now(), passes.now())


def empty_ns(clock: Clock, device: torch.device) -> int:
    """What a bracket of the stopwatch reads around an operation that does next to nothing: the median of many."""
    meter, one = Meter(clock), torch.zeros(1, device=device)
    clock.lead()
    with Stopwatch(meter, lambda _func, _tensors: "", PassClock()):
        for _ in range(EMPTY_READINGS):
            one.add_(1)
    clock.settle()
    return round(statistics.median(clock.ns(reading.begin, reading.end) for reading in meter.readings))


def launch_ns(clock: Clock, device: torch.device) -> int:
    """The least time in which the host issues one operation: one that does next to nothing, the median of many batches."""
    one, batches = torch.zeros(1, device=device), []
    for _ in range(LAUNCH_BATCHES):
        begin = clock.mark()
        for _ in range(LAUNCHES):
            one.add_(1)
        end = clock.mark()
        clock.settle()
        batches.append(clock.ns(begin, end) / LAUNCHES)
    return round(statistics.median(batches))
