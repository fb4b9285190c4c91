"""What compression owes, and how it goes into checkpoints and comes out of them.

PowerSGD and top-k remember, on every rank, what they left out of its gradients, by DDP's buckets or within them. A process that goes
on must therefore have the same buckets from its first step; DDP makes them in the order in which gradients first came
(docs/decisions/0117).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

OWED = "feedback/"
"""What the names of a checkpoint's tensors begin with that belong to compression: feedback/KIND/RANK/NAME."""


class Feedback:
    """What one rank's hook remembers. `kind` says by which compression: nothing else can go on with it."""

    def __init__(self, replica: nn.Module, memories: dict[str, dict[Any, Tensor]], counter: Any, kind: str) -> None:
        """`memories` are the hook's own dictionaries, keyed by parameter or by bucket; `counter.iter` counts its steps, where it does."""
        self.kind = kind
        self._replica, self._memories, self._counter = replica, memories, counter
        self._parameters = [parameter for parameter in replica.parameters() if parameter.requires_grad]
        self._numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        self._arrived: list[int] = []
        for number, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._note, number))  # type: ignore[no-untyped-call]

    def _note(self, number: int, _parameter: Tensor) -> None:
        if len(self._arrived) < len(self._parameters):
            self._arrived.append(number)

    def kept(self) -> dict[str, Tensor]:
        """The tensors themselves, by name; the order in which gradients came; and the steps that were counted. Nothing before the
        first step."""
        if not self._arrived:
            return {}
        steps = {} if self._counter is None else {"steps": torch.tensor(self._counter.iter)}
        remembered = {
            f"{name}/{self._numbers.get(key, key)}": value
            for name, memory in self._memories.items()
            for key, value in memory.items()
        }
        return {"order": torch.tensor(self._arrived)} | steps | remembered

    def take(self, kept: dict[str, Tensor]) -> None:
        """Remember what `kept` gave, and nothing else; without anything, begin anew. Every rank must call it."""
        if "order" in kept and not self._arrived:
            self._let_arrive(kept["order"].tolist())
        for memory in self._memories.values():
            memory.clear()
        if self._counter is not None:
            self._counter.iter = int(kept.get("steps", 0))
        for place, value in kept.items():
            name, _, number = place.partition("/")
            if name in self._memories:
                by_parameter = name == OF_PARAMETERS
                key = self._parameters[int(number)] if by_parameter else int(number)
                self._memories[name][key] = value.to(self._parameters[0].device)

    def _let_arrive(self, order: list[int]) -> None:
        """A backward pass of zeros in an order of our own, after which DDP makes the buckets that it made of that order before."""
        replica: Any = self._replica
        replica.reducer.prepare_for_backward([])
        for parameter in (self._parameters[number] for number in order):
            parameter.view_as(parameter).backward(torch.zeros_like(parameter))  # type: ignore[no-untyped-call]
        replica.zero_grad(set_to_none=True)


OF_PARAMETERS = "owed"
"""The memory that is keyed by parameter; all others are by bucket."""


def feedback_of(model: nn.Module) -> Feedback | None:
    """What a model's compression remembers; None where nothing does."""
    return getattr(model, "feedback", None)


def owed_by(feedback: Feedback | None, rank: int) -> dict[str, Tensor]:
    """What a checkpoint holds of a rank's `feedback`, by name."""
    if feedback is None:
        return {}
    return {f"{OWED}{feedback.kind}/{rank}/{name}": value for name, value in feedback.kept().items()}
