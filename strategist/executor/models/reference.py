"""A model that the executor brings along: it can be cut, and it knows its own initial weights."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from strategist.executor.splittable import Splittable


class ReferenceModel(nn.Module, Splittable):
    """May be built on the meta device; `fill` gives each parameter its value once it has memory."""

    @abstractmethod
    def fill(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Write the initial value of the parameter `name` into `weight`, which has its full, unsharded shape."""
