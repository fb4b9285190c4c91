"""Initial weights that depend on the seed and the parameter's name only, never on the layout.

Each parameter is drawn whole from its own generator and then cut, so that every layout of a model starts from the same
numbers and no rank has to send any. It costs one unsharded parameter of temporary memory at a time. Generators of
different kinds of device give different numbers: equality holds among layouts on one kind of device.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strategist.executor.models.reference import ReferenceModel
from strategist.executor.names import plain_name


@torch.no_grad()
def initialise(model: ReferenceModel, seed: int) -> None:
    """Write the initial value of every parameter of `model`, which may be sharded; parameters must not be on meta."""
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        model.fill(plain_name(name), whole, _generator(seed, plain_name(name), parameter.device))
        local_part(parameter).copy_(cut_like(parameter, whole))


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """The part of `whole` that this rank holds of `parameter`."""
    if not isinstance(parameter, DTensor):
        return whole
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return whole[tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))]
