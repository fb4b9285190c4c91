"""Which pass of a step is running: autograd tells forward, backward and recomputation, the program the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from strategist.document.observed import Pass
from strategist.executor.engines import Engine
from strategist.executor.loss import Batch
from strategist.records import dataclass


class PassClock:
    """Answers `now()`; what was said with `passing` and `pass_is` counts more than what autograd tells."""

    def __init__(self) -> None:
        self._said: Pass | None = "setup"

    @contextmanager
    def passing(self, what: Pass | None) -> Iterator[None]:
        """Name what happens inside; None leaves it to autograd: forward, backward or recompute."""
        before, self._said = self._said, what
        try:
            yield
        finally:
            self._said = before

    def pass_is(self, what: Pass | None) -> None:
        """From here on, as `passing` says it."""
        self._said = what

    def now(self) -> Pass:
        """The pass of the operation that runs."""
        if self._said is not None:
            return self._said
        if torch._C._current_graph_task_id() == -1:
            return "forward"
        return "recompute" if torch.is_grad_enabled() else "backward"


@dataclass(frozen=True, slots=True)
class Watched:
    """An engine that says when its work is done: what follows in the step is the update."""

    engine: Engine
    passes: PassClock

    def gradients(self, batch: Batch, scale: Tensor) -> Tensor:
        """See Engine."""
        self.passes.pass_is(None)
        loss = self.engine.gradients(batch, scale)
        self.passes.pass_is("update")
        return loss
