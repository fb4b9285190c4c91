"""Gradients between backward and the update: complete them, measure them, limit them, over any mix of meshes.

`torch.nn.utils.clip_grad_norm_` refuses a model whose parameters lie on different meshes or are partly plain tensors,
and it knows nothing of pipeline stages; tensor parallelism and pipelines make both. No graph is kept: with one, looking at a
DTensor's local part is an operation of autograd.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from strategist.executor.initialise import local_part

Layout = tuple[DeviceMesh, tuple[bool, ...]] | None
"""Mesh, and which of its axes cut the tensor; None for a plain tensor."""


def complete_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Add up gradients that are still partial sums, once, instead of inside every operation of the optimizer."""
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
            continue
        if gradient.placements != parameter.placements:  # asking torch to change nothing costs as much as an operation
            parameter.grad = gradient.redistribute(placements=parameter.placements)


@torch.no_grad()
def add_terms(parameters: Iterable[nn.Parameter], axis: DeviceMesh) -> None:
    """Add up, over the ranks of an axis, gradients of which each has a term: one message for each number format, as Megatron-LM does
    (NVIDIA/Megatron-LM: megatron/core/distributed/finalize_model_grads.py)."""
    terms: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            terms[parameter.grad.dtype].append(local_part(parameter.grad))
    for parts in terms.values():
        line = torch.cat([part.flatten() for part in parts])
        line = line.to(axis.device_type)  # offloaded gradients lie in the host's memory
        dist.all_reduce(line, group=axis.get_group())
        sums = torch.split(line, [part.numel() for part in parts])
        for part, total in zip(parts, sums, strict=True):
            part.copy_(total.view_as(part))


def share_expert_gradients(parameters: Iterable[nn.Parameter], sharers: float) -> None:
    """Divide the gradients of experts by the data ranks whose tokens they worked for: those tokens' terms arrived added up, where
    the gradients of all other weights are averaged over these ranks."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and "ep" in (gradient.device_mesh.mesh_dim_names or ()):
            local_part(gradient).div_(sharers)


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], pipeline: dist.ProcessGroup | None) -> Tensor:
    """Euclidean norm of all gradients of the whole model, the same on every rank; a 0-dim tensor.

    `parameters` are this stage's, each weight of the model once over all stages.
    """
    groups: dict[Layout, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            groups[_layout(parameter.grad)].append(local_part(parameter.grad))
    squares = [_whole_square(layout, gradients) for layout, gradients in groups.items()]
    total = torch.stack(squares).sum()
    if pipeline is not None:
        dist.all_reduce(total, group=pipeline)
    return total.sqrt()


def _layout(gradient: Tensor) -> Layout:
    if not isinstance(gradient, DTensor):
        return None
    return gradient.device_mesh, tuple(not placement.is_replicate() for placement in gradient.placements)


def _whole_square(layout: Layout, gradients: list[Tensor]) -> Tensor:
    """Squared norm of some gradients of one layout, parts on other ranks included."""
    square = torch.nn.utils.get_total_norm(gradients).square()
    if layout is None:
        return square
    mesh, cut = layout
    square = square.to(mesh.device_type)  # offloaded gradients lie in the host's memory, collectives run on the device
    for axis, is_cut in enumerate(cut):
        if is_cut:
            dist.all_reduce(square, group=mesh.get_group(axis))
    return square


def limit_factor(norm: Tensor, limit: float | None) -> Tensor:
    """What makes a norm at most `limit` (Pascanu et al. 2013, arXiv 1211.5063, section 3.2); one without a limit."""
    return torch.ones_like(norm) if limit is None else torch.clamp(limit / (norm + 1e-6), max=1.0)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients."""
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    torch._foreach_mul_(gradients, factor.to(gradients[0].device))  # all of them rest on the same device
