"""Whether a model draws random numbers in forward, for dropout or noise."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

RATES = ("dropout", "attention_dropout", "jitter_noise")
"""Numbers of modules that draw without a layer for it: torch's attention and recurrent layers, transformers' attention and routers."""


def draws(model: nn.Module) -> bool:
    """True when what `model` gives in training depends on random numbers."""
    return any(_rate(module) > 0 for module in model.modules())


def _rate(module: nn.Module) -> float:
    """How much of something a module drops or adds by itself."""
    if isinstance(module, _DropoutNd):
        return module.p
    rates = (getattr(module, name, 0.0) for name in RATES)
    return max((float(rate) for rate in rates if isinstance(rate, (int, float))), default=0.0)
