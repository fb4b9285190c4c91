"""A module that is not ours: no language model, no attention, blocks in a Sequential, a buffer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strategist.executor.loss import Batch


class Mix(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class ByteMixer(nn.Module):
    """Tokens (B, T) to one number per sequence (B)."""

    def __init__(self, width: int = 12, depth: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(Mix(width) for _ in range(depth)))
        self.out = nn.Linear(width, 1)
        self.register_buffer("centre", torch.randn(width))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.blocks(self.table(input_ids).mean(dim=1) - self.centre)
        return self.out(hidden).squeeze(-1)


def mean_square(outputs: Tensor, batch: Batch) -> Tensor:
    """Mean over the micro-batch of the squared distance from the first label."""
    return (outputs - batch["labels"][:, 0] / 64).square().mean()
