"""Norms over the last dim, in the type of their input.

RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) and LayerNorm (Ba et al. 2016, arXiv 1607.06450) with weight and bias,
with a weight alone, or with nothing to learn.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strategist.executor.tensor_styles import part_here
from strategist.facts.constants import PLAIN, Constants
from strategist.facts.model import ModelShape


class RMSNorm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x; autocast is off because it would compute and keep a float32 copy on GPUs."""
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.rms_norm(x, (x.shape[-1],), part_here(self.weight).to(x.dtype), self.epsilon)


class LayerNorm(nn.Module):
    """Norm by mean and variance; `weight` and `bias` say what it learns."""

    def __init__(self, width: int, epsilon: float, *, weight: bool, bias: bool) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(width)) if weight else None
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x, without autocast as in RMSNorm."""
        weight, bias = (None if p is None else part_here(p).to(x.dtype) for p in (self.weight, self.bias))
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, self.epsilon)


def make_norm(shape: ModelShape, constants: Constants = PLAIN) -> nn.Module:
    """The norm over the model's width that the shape names."""
    if shape.norm == "rmsnorm":
        return RMSNorm(shape.hidden, constants.norm_eps)
    learns = {"weight": shape.norm != "layernorm_nonparam", "bias": shape.norm == "layernorm"}
    return LayerNorm(shape.hidden, constants.norm_eps, **learns)
