"""Tensor-parallel styles that cut weights and change layouts at a block's borders, and compute in between on plain parts.

torch's own styles hand DTensors from one operation to the next, and each operation then works out its layout in Python,
forward and backward. Inside a block nothing is left to work out: the model computes with the part of each weight that
lies here (`part_here`), and the only communication is where hidden states enter and leave (Megatron-LM, arXiv
1909.08053, section 3; with sequence parallelism arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


def part_here(weight: Tensor) -> Tensor:
    """This rank's part of a weight, to compute with.

    Each rank's gradient of a weight that all hold whole comes from its own tokens or heads: it is one term of a sum.
    """
    if not isinstance(weight, DTensor):
        return weight
    terms = [Partial() if placement.is_replicate() else placement for placement in weight.placements]
    return weight.to_local(grad_placements=terms)


class Linear(nn.Linear):
    """A linear layer that computes with the part of its weight that lies on this rank."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) to (..., out)."""
        bias = None if self.bias is None else part_here(self.bias)
        return nn.functional.linear(x, part_here(self.weight), bias)


class Cut(ParallelStyle):
    """Leave each rank one part of every weight of a module, or all of it. The module must compute with `part_here`."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, whole in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(whole.detach(), device_mesh, [self.placement])
            module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
        return module


class Entry(ParallelStyle):
    """Give a module the whole hidden state; backward adds up what the ranks' parts of its weights say about it.

    `layout` is how hidden states lie between blocks: whole on every rank, or cut by tokens.
    """

    def __init__(self, layout: Placement) -> None:
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_enter, device_mesh, self.layout))
        return module


class Exit(Cut):
    """Cut a linear layer's weight by its inputs and add up what the ranks' parts give, into `layout`."""

    def __init__(self, layout: Placement) -> None:
        super().__init__(Shard(1))
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(_leave, device_mesh, self.layout))
        return super()._apply(module, device_mesh)


def _enter(mesh: DeviceMesh, layout: Placement, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, *others = inputs
    whole = DTensor.from_local(hidden, mesh, [layout], run_check=False).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()]), *others


def _leave(mesh: DeviceMesh, layout: Placement, _module: nn.Module, _inputs: object, term: Tensor) -> Tensor:
    return DTensor.from_local(term, mesh, [Partial()], run_check=False).redistribute(placements=[layout]).to_local()
