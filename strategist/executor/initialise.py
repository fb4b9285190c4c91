"""Initial weights that depend on the seed and the parameter's name only, never on the layout.

Each parameter is drawn whole from its own generator and then cut, so that every layout of a model starts from the same
numbers and no rank has to send any. It costs one unsharded parameter of temporary memory at a time. Generators of
different kinds of device give different numbers: equality holds among layouts on one kind of device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from strategist.executor.models.reference import ReferenceModel
from strategist.executor.names import by_weight, plain_name
from strategist.executor.seeds import generator


@torch.no_grad()
def initialise(model: ReferenceModel, seed: int, device: torch.device | str = "cpu") -> None:
    """Write the initial value of every parameter of `model`, which may be sharded, drawn on `device`.

    Parameters must not be on meta; they may lie elsewhere than on `device`.
    """
    named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    for name, slices in by_weight(named).items():
        parameters = [named[part] for part in slices]
        rows = sum(len(parameter) for parameter in parameters)
        whole = torch.empty((rows, *parameters[0].shape[1:]), dtype=parameters[0].dtype, device=device)
        model.fill(name, whole, generator(device, seed, name))
        fill_slices(parameters, whole)


def fill_slices(parameters: Sequence[Tensor], whole: Tensor) -> None:
    """Write a whole value into the parameters whose rows lie below each other in it, this rank's parts of them."""
    for parameter, rows in zip(
        parameters, torch.split(whole, [len(parameter) for parameter in parameters]), strict=True
    ):
        local_part(parameter).copy_(cut_like(parameter, rows))


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """The part of `whole` that this rank holds of `parameter`.

    Cuts are made in mesh order, as torch.chunk makes them, but FSDP2 cuts last although its axis stands first: that is
    what a strided placement means. Only numbers of Python are computed with, so that fake tensors can be cut too.
    """
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, enumerate(parameter.placements)
    for axis, placement in sorted(placements, key=lambda pair: isinstance(pair[1], _StridedShard)):
        if isinstance(placement, (Shard, _StridedShard)):
            whole = _chunk(whole, placement.dim, mesh.get_local_rank(axis), mesh.size(axis))
    return whole


def _chunk(whole: Tensor, dim: int, index: int, count: int) -> Tensor:
    """The index-th of `count` chunks along `dim`; the last ones may be smaller or empty."""
    length = whole.shape[dim]
    size = -(-length // count)
    first = min(index * size, length)
    return whole.narrow(dim, first, min(size, length - first))
