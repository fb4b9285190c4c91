"""A linear layer in slices that are modules, and so can be units, of their own (memory-centric tiling: Rajbhandari et al. 2021,
arXiv 2104.07857, section 5.1.3).

Slices are cut along the outputs, each with its part of the bias: what one gives needs no sum with what the others give, so
every number of the result is the same scalar product as in one piece. Along the inputs partial sums would be rounded, and a
result of the full size be added to for each slice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strategist.executor.names import SLICE
from strategist.facts.tiling import rows_of, slices_of


class TiledLinear(nn.Module):
    """What a linear layer computes, slice by slice."""

    def __init__(self, whole: nn.Linear, slices: int) -> None:
        super().__init__()
        rows = rows_of(whole.out_features, slices)
        weights = torch.split(whole.weight.detach(), rows)
        biases = [None] * slices if whole.bias is None else torch.split(whole.bias.detach(), rows)
        for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            self.add_module(f"{SLICE}{number}", _linear(weight, bias))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) to (..., out). Slices see tokens in one row: what a unit gives must not be a view."""
        tokens = x.flatten(0, -2)
        parts = [part(tokens) for part in self.children()]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).view(*x.shape[:-1], -1)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with copies of some values, on the device where they lie."""
    part = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    part.weight = nn.Parameter(weight.clone())
    part.register_parameter("bias", None if bias is None else nn.Parameter(bias.clone()))
    return part


def tile(block: nn.Module, tiling: int) -> int:
    """Put the linear layers of a block into slices, none larger than a `tiling`-th of the largest; how many layers there are."""
    found = [(name, module) for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    largest = max((module.weight.numel() for _, module in found), default=0)
    for name, module in found:
        slices = int(slices_of(module.out_features, module.in_features, largest, tiling))
        parent, _, own = name.rpartition(".")
        block.get_submodule(parent).register_module(own, TiledLinear(module, slices))
    return len(found)


def slices_in(block: nn.Module) -> list[nn.Module]:
    """The slices of all linear layers of a block."""
    return [part for module in block.modules() if isinstance(module, TiledLinear) for part in module.children()]
