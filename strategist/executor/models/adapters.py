"""Low-rank adapters beside frozen linear layers (LoRA: Hu et al. 2021, arXiv 2106.09685, section 4.1).

y = W x + (alpha / rank) B A x: W is frozen, A starts as random numbers and B as zeros, so that training begins with the model as
it was. Only A and B have gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from strategist.executor.models.experts import Experts
from strategist.executor.models.four_bits import Levels, Packed
from strategist.executor.tensor_styles import Linear
from strategist.facts.model import Adapters

ADAPTER = ".adapter."
"""In the names of the factors, behind that of their linear layer."""


class LowRank(nn.Module):
    """The two factors beside one matrix, in a format of their own; they multiply in that of their input."""

    def __init__(self, inputs: int, outputs: int, adapters: Adapters) -> None:
        super().__init__()
        self.scale = adapters.alpha / adapters.rank
        self.a = nn.Parameter(torch.empty(adapters.rank, inputs))
        self.b = nn.Parameter(torch.empty(outputs, adapters.rank))

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        """`given` (..., out), which the frozen matrix made of x (..., in), and what the adapter adds to it."""
        inner = nn.functional.linear(x, self.a.to(x.dtype)).flatten(0, -2)
        both = torch.addmm(given.flatten(0, -2), inner, self.b.to(x.dtype).t(), alpha=self.scale)
        return both.view_as(given)


def add_adapters(model: nn.Module, adapters: Adapters) -> None:
    """Freeze all weights of a model and put adapters beside the linear layers of its blocks that are called as the targets say.
    Under qlora all linear layers of the blocks rest in four bits, and all matrices of experts."""
    model.requires_grad_(False)
    levels = Levels()
    for name, module in list(model.named_modules()):
        if isinstance(module, Experts) and adapters.method == "qlora":
            module.pack(levels)
        if not isinstance(module, Linear):
            continue
        if adapters.method == "qlora":
            module.weight = None  # type: ignore[assignment]
            module.packed = Packed(module.out_features, module.in_features, levels)
        if name.rpartition(".")[2] in adapters.targets:
            module.adapter = LowRank(module.in_features, module.out_features, adapters)


def fill_adapter(name: str, weight: Tensor, generator: torch.Generator) -> None:
    """The initial value of a factor: zeros for B; for A normal numbers that keep the size of what they multiply."""
    if name.endswith(f"{ADAPTER}b"):
        weight.zero_()
    else:
        weight.normal_(0.0, 1.0 / math.sqrt(weight.shape[1]), generator=generator)


def adapters_of(model: nn.Module) -> list[LowRank]:
    """All adapters of a model."""
    return [module for module in model.modules() if isinstance(module, LowRank)]
