"""What a model must know about itself before tensor or pipeline parallelism may cut it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle


class SplittableModel(nn.Module, ABC):
    """A model that can be cut into pipeline stages and across tensor-parallel ranks.

    Parameter names never change, whatever is cut away: stage 3 of 4 calls layer 17 what the whole model calls it.
    `sequence_shards` is how many ranks share the tokens of one hidden state between blocks (sequence parallelism).
    `tied` is true when the head uses the embedding's weight.
    """

    tied: bool
    sequence_shards: int = 1

    @abstractmethod
    def keep_stage(self, layers: range, *, embedding: bool, head: bool) -> None:
        """Drop every part that another stage owns; afterwards `forward` takes and gives what the stage does."""

    @abstractmethod
    def tensor_styles(self, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        """Module name to style, for the modules this stage has."""

    @abstractmethod
    def tie(self) -> None:
        """Make head and embedding share one parameter again, after a step gave each its own; nothing when untied."""

    @abstractmethod
    def embedding_name(self) -> str:
        """Name of the token embedding module."""

    @abstractmethod
    def fill(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Write the initial value of the parameter `name` into `weight`, which has its full, unsharded shape."""
