"""The feed-forward part of a layer: gated (Shazeer 2020, arXiv 2002.05202) or plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from strategist.executor.tensor_styles import Linear, OutputLinear
from strategist.facts.model import ModelShape

Activation = Callable[[Tensor], Tensor]


def _relu2(x: Tensor) -> Tensor:
    """Squared ReLU (So et al. 2021, arXiv 2109.08668, section 3)."""
    return torch.relu(x).square()


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": nn.functional.silu,
    "gelu": partial(nn.functional.gelu, approximate="tanh"),
    "relu": torch.relu,
    "relu2": _relu2,
}
"""GELU is the tanh form, which GPT-2, Gemma and StarCoder2 train with; catalogue rows do not tell its forms apart."""


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    def __init__(self, shape: ModelShape, width: int, *, bias: bool) -> None:
        super().__init__()
        self.gate = Linear(shape.hidden, width, bias=bias) if shape.mlp_gated else None
        self.up = Linear(shape.hidden, width, bias=bias)
        self.down = OutputLinear(width, shape.hidden, bias=bias)
        self.act = ACTIVATIONS[shape.mlp_act]

    def forward(self, x: Tensor) -> Tensor:
        """x (..., H) to (..., H)."""
        up = self.up(x)
        return self.down(self.act(up) if self.gate is None else self.act(self.gate(x)) * up)  # type: ignore[no-any-return]
