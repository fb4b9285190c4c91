"""A model that the executor brings along: it can be cut, and it knows its own initial weights."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from strategist.executor.splittable import Splittable
from strategist.facts.constants import PLAIN, Constants


class ReferenceModel(nn.Module, Splittable):
    """May be built on the meta device; `fill` gives each parameter its value once it has memory. `constants` are those it computes
    with."""

    constants: Constants

    @abstractmethod
    def fill(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Write the initial value of the parameter `name` into `weight`, which has its full, unsharded shape."""


def constants_of_model(model: nn.Module) -> Constants:
    """The constants of the reference model in a module; those of others are their own business, and say nothing here."""
    return next((part.constants for part in model.modules() if isinstance(part, ReferenceModel)), PLAIN)
