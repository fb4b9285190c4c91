"""Muon for the matrices of hidden layers, AdamW for all other weights; weights may be sharded by rows and cut by tensor parallelism.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the nearest orthogonal one, which
Newton-Schulz iterations find. They need the whole matrix: where ranks hold its rows, each gathers the momentum in bfloat16, one
matrix at a time, turns all of it, and keeps its own rows (Liu et al. 2025, arXiv 2502.16982, section 2.3, Distributed Muon); parts of
rows or columns, which tensor parallelism leaves, are gathered behind that. The iterations are torch's (torch/optim/_muon.py), and so is AdamW.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import AdamW, Optimizer
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz

from strategist.executor.blocks import find_blocks
from strategist.executor.chunks import chunks_of
from strategist.executor.initialise import cut_like, local_part

MATRICES = "matrices"
"""The key of a parameter group that says whether Muon updates it."""
MOMENTUM = 0.95
"""The default of torch.optim.Muon."""


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """The matrices inside the layers: no table, no head, no vector (torch.optim.Muon: embeddings and biases are for AdamW)."""
    blocks = (block for chunk in chunks_of(model) for block in find_blocks(chunk).blocks.values())
    return {
        parameter
        for block in blocks
        for module in block.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 2 and parameter.requires_grad
    }


class Muon(Optimizer):
    """Muon in groups with `MATRICES` set, AdamW in the others. One rate and one decay serve both: updates of a matrix are made
    as large as AdamW's are (Liu et al. 2025, section 2.2)."""

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, MATRICES: False})
        others = [group for group in self.param_groups if not group[MATRICES]]
        self._adamw = AdamW(others, lr=lr, betas=betas, weight_decay=weight_decay, fused=True) if others else None
        if self._adamw is not None:
            self._adamw.state = self.state  # one state, whoever keeps it

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every weight that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"] if group[MATRICES] else ():
                if parameter.grad is not None:
                    self._turn(parameter, group)
        if self._adamw is not None:
            self._adamw.step()

    def _turn(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
        whole = _zeropower_via_newtonschulz(
            _gathered(self._direction(parameter), parameter), coefficients, DEFAULT_NS_STEPS, EPS
        )
        rate = 0.2 * math.sqrt(max(parameter.shape)) * group["lr"]
        weight = local_part(parameter)
        weight.mul_(1.0 - group["lr"] * group["weight_decay"])
        weight.add_(cut_like(parameter, whole), alpha=-rate)

    def _direction(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of where Nesterov's momentum points, in the format of the iterations."""
        state, gradient = self.state[parameter], local_part(parameter.grad)  # type: ignore[arg-type]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum: Tensor = state["momentum_buffer"].lerp_(gradient, 1.0 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM).bfloat16()


def _gathered(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """The whole matrix of which each rank holds a `part`: shards of rows are put together first, whose axes stand first in a mesh
    and which cut last (`cut_like`), so that less travels between nodes; then what tensor parallelism cut, in equal parts."""
    if not isinstance(parameter, DTensor):
        return part
    mesh = parameter.device_mesh
    cuts = [
        (axis, placement.dim)
        for axis, placement in enumerate(parameter.placements)
        if isinstance(placement, (Shard, _StridedShard)) and mesh.size(axis) > 1
    ]
    for place, (axis, dim) in enumerate(cuts):
        still_cut = math.prod(mesh.size(later) for later, along in cuts[place + 1 :] if along == dim)
        part = _put_together(part, dim, parameter.shape[dim] // still_cut, mesh.get_group(axis))
    return part


def _put_together(part: Tensor, dim: int, length: int, group: dist.ProcessGroup) -> Tensor:
    """What the ranks of a group hold, one behind the other along `dim`, `length` in all: of rows the last rank may have fewer or none,
    of columns each has as many."""
    most = -(-length // group.size()) if dim == 0 else len(part)
    piece = part if len(part) == most else torch.cat([part, part.new_zeros(most - len(part), part.shape[1])])
    whole = part.new_empty(most * group.size(), part.shape[1])
    dist.all_gather_single(whole, piece, group=group)
    return whole[:length] if dim == 0 else torch.cat(whole.chunk(group.size()), dim=1)
