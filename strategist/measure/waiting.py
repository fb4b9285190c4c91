"""The stopwatch of a real run: collectives have peers that answer, or keep this rank waiting.

What a collective takes is the time of the call and of the wait for its result, on the stream that computes: the exposed part.
What ran beside it meanwhile is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from strategist.document.observed import Pass
from strategist.measure.messages import FAMILIES, arriving, group_in
from strategist.measure.passes import PassClock
from strategist.measure.stopwatch import Meter, Reading, Stopwatch

OWN_TERM = ("tp", "cp", "ep", "pp")
"""Axes with a time term of their own name; all others carry parameters and gradients: dp."""


def term_of_axis(axis: str) -> str:
    """The Plan's time term for collectives over an axis of the mesh, or over several axes taken as one."""
    return axis if axis in OWN_TERM else "cp" if axis.startswith("cp_") else "dp"


class WaitingStopwatch(Stopwatch):  # type: ignore[no-untyped-call]
    """A Stopwatch that reads collectives too, by the term of their axis; waiting for another stage to send is `bubble`.

    `axis_of` names the axis of a process group. `drains` says that backward ends in C++ with waiting for reductions, as DDP's
    does: what lies between the last operation of backward and the next one is `dp` then.
    """

    def __init__(
        self,
        meter: Meter,
        terms: Callable[[Any, Sequence[Tensor]], str],
        passes: PassClock,
        axis_of: Callable[[dist.ProcessGroup | None], str],
        *,
        drains: bool,
    ) -> None:
        super().__init__(meter, terms, passes)
        self._axis_of, self._drains = axis_of, drains
        self._works: dict[int, tuple[Any, str]] = {}
        self._coming: dict[int, str] = {}
        self._last: tuple[Pass, Any] = ("setup", None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in FAMILIES or any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return super().__torch_dispatch__(func, types, args, kwargs)
        begin = self._meter.clock.mark()
        result = func(*args, **(kwargs or {}))
        term = self._term(func, args, kwargs, result)
        if term:
            self._note(term, begin)
        return result

    def _term(self, func: Any, args: Any, kwargs: Any, result: Any) -> str:
        """The term of a collective, remembered for whoever waits for it; "" for what is none."""
        if func._schema.name == "_c10d_functional::wait_tensor":
            return self._coming.get(_key(args[0]), "")
        group = group_in(tree_leaves((args, kwargs)))
        if group is None:
            return ""
        term = term_of_axis(self._axis_of(group))
        outputs = tree_leaves(result)
        for tensor in arriving(func, args, [leaf for leaf in outputs if isinstance(leaf, Tensor)]):
            self._coming[_key(tensor)] = term
        waited = "bubble" if func._schema.name == "c10d::recv_" and term == "pp" else term
        for leaf in outputs:
            if isinstance(leaf, torch.ScriptObject) and "Work" in str(leaf._type()):
                work = dist.Work.unbox(leaf)  # the object that whoever called the collective will wait on
                self._works[id(work)] = work, waited
        return term

    def _read(self, func: Any, values: Any, begin: Any, end: Any) -> None:
        before, last = self._last
        now = self._passes.now()
        if self._drains and before == "backward" and now != "backward":
            self._meter.readings.append(Reading("dp", 1, self._meter.clock.is_main(), False, last, begin))
        super()._read(func, values, begin, end)
        self._last = now, end

    def _note(self, term: str, begin: Any) -> None:
        clock = self._meter.clock
        self._last = self._passes.now(), clock.mark()
        self._meter.readings.append(Reading(term, 1, clock.is_main(), False, begin, self._last[1]))

    def waited(self, work: Any, wait: Callable[[], Any]) -> Any:
        """`wait()`, timed when it is for a collective of this step."""
        begin, (_, term) = self._meter.clock.mark(), self._works.pop(id(work), (None, ""))
        result = wait()
        if term:
            self._note(term, begin)
        return result


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def waits_heard(stopwatch: WaitingStopwatch) -> Iterator[None]:
    """Inside, whoever waits for a collective does so under the stopwatch: torch has no hook there, so the method is lent."""
    wait = dist.Work.wait
    dist.Work.wait = lambda work, *words, **named: stopwatch.waited(work, lambda: wait(work, *words, **named))  # type: ignore[method-assign]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]
