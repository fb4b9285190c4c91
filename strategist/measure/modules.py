"""Which module an operation belongs to, forward and backward, without touching the life of any tensor.

Forward, the innermost running module is on a stack. Backward, autograd tells which node is running, and every node
carries the sequence number it was born with; the module that was running at that number is the one it belongs to.
"""

from __future__ import annotations

from bisect import bisect_right
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from strategist.executor.names import plain_name

BORN_NOWHERE = 2**63
"""Numbers from here on belong to nodes without a place in forward: those that store a leaf's gradient."""


class ModuleClock:
    """Answers `now()` inside `with`; names are those of the whole model."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: plain_name(name) for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._owners: list[str] = []
        self._hooks: list[Any] = []
        self._last = ""

    def now(self) -> str:
        """Name of the module whose work is being done; "" outside all of them."""
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return self._stack[-1] if self._stack else ""
        node = torch._C._current_autograd_node()
        number = BORN_NOWHERE if node is None else node._sequence_nr()
        if number < BORN_NOWHERE:  # what a leaf's gradient sets off belongs to what made the gradient
            self._last = self._owner(number)
        return self._last

    def _owner(self, number: int) -> str:
        at = bisect_right(self._starts, number) - 1
        return self._owners[at] if at >= 0 else ""

    def _enter(self, module: nn.Module, _inputs: object) -> None:
        self._stack.append(self._names.get(module, self._stack[-1] if self._stack else ""))
        self._note()

    def _leave(self, _module: nn.Module, _inputs: object, _outputs: object) -> None:
        if self._stack:
            self._stack.pop()
        self._note()

    def _note(self) -> None:
        """From the next node of autograd on, work belongs to the top of the stack."""
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._owners.append(self._stack[-1] if self._stack else "")

    def __enter__(self) -> ModuleClock:
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
