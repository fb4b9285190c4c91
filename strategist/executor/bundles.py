"""Weights that are several matrices side by side, such as queries, keys and values in GPT-2's `c_attn`, cut over tensor-parallel
ranks so that each has a part of every one.

A rank's parts lie together, as the model computes with them: of the first matrix, then of the second. The DTensor's whole is
therefore the weight in another order, all of rank 0 first; whoever needs the order of the model asks for the matrices one by one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from strategist.errors import ImpossibleError
from strategist.executor.names import plain_name
from strategist.executor.stacked import Stacked
from strategist.executor.tensor_styles import distribute
from strategist.records import dataclass

BUNDLES = "bundles"
"""The attribute of a module that says which of its weights are bundles; FSDP2 keeps it, and no attribute of a weight."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """`count` matrices of one size, side by side along `dim`, which is not 0: that is where FSDP2 cuts."""

    dim: int
    count: int

    def width(self, weight: Tensor) -> int:
        """How wide one matrix of a whole weight is."""
        return weight.shape[self.dim] // self.count

    def dealt(self, whole: Tensor, ranks: int) -> Tensor:
        """The weight in the order in which `ranks` ranks hold it."""
        matrices = (matrix.chunk(ranks, self.dim) for matrix in whole.chunk(self.count, self.dim))
        return torch.cat([part for parts in zip(*matrices, strict=True) for part in parts], self.dim)

    def matrices(self, weight: Tensor) -> list[DTensor]:
        """The matrices of a weight that was cut, or of a state that lies like it, in its memory."""
        local, spec = weight.to_local(), weight._spec  # type: ignore[attr-defined]
        shape = list(weight.shape)
        shape[self.dim] = self.width(weight)
        meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), weight.dtype)
        own = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
        return [DTensor(part, own, requires_grad=False) for part in local.chunk(self.count, self.dim)]  # type: ignore[no-untyped-call]

    def whole(self, weight: Tensor) -> Stacked:
        """The weight in the order of the model."""
        parts, length = self.matrices(weight), weight.shape[self.dim]
        return Stacked(parts, list(range(0, length, length // self.count)), length, self.dim)

    def gathered(self, weight: Tensor) -> Tensor:
        """All its values, in the order of the model."""
        return torch.cat([part.full_tensor() for part in self.matrices(weight)], self.dim)


def distribute_bundle(module: nn.Module, name: str, mesh: DeviceMesh, bundle: Bundle) -> None:
    """Make the weight `name` of a module a DTensor of which each rank has a part of every matrix, if only of one. Raises
    ImpossibleError DIVISIBILITY where a matrix has no equal parts for them."""
    whole, ranks = module.get_parameter(name), mesh.size()
    width = bundle.width(whole)
    if width % ranks:
        raise ImpossibleError(
            "DIVISIBILITY",
            f"{name} is {bundle.count} matrices of width {width} side by side, which {ranks} tensor-parallel ranks cannot split evenly.",
            flag="$.mesh.tp",
            value=ranks,
            hint="Choose a tp that divides it.",
        )
    module.register_parameter(name, nn.Parameter(bundle.dealt(whole.detach(), ranks), whole.requires_grad))
    distribute(module, name, mesh, Shard(bundle.dim))
    if bundle.count > 1:
        module.__dict__.setdefault(BUNDLES, {})[name] = bundle


def bundles_of(model: nn.Module) -> Mapping[str, Bundle]:
    """The weights of a model that are cut bundles, by the names that the bare model gives them."""
    return {
        plain_name(f"{place}.{name}"): bundle
        for place, module in model.named_modules()
        for name, bundle in module.__dict__.get(BUNDLES, {}).items()
    }
