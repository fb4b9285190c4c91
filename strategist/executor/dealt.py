"""ZeRO-1: whole tensors are dealt to the ranks that share their state, each is updated by its owner and sent to the others.

torch's `ZeroRedundancyOptimizer` deals over one group. Where experts lie on other ranks than the rest of their layer, other ranks
share their state: they are dealt on their own (docs/decisions/0117).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from strategist.executor.initialise import local_part
from strategist.executor.job import Job
from strategist.executor.mesh import expert_group, shard_group


class DealtOut(Optimizer):
    """One optimizer for each set of tensors that the same ranks share, all stepped together.

    They update plain tensors in the memory of the parameters' local parts, `views`: whole plain tensors are what is sent, and
    DTensors are neither. Gradients are lent to them for the update."""

    def __init__(self, views: Mapping[nn.Parameter, nn.Parameter], parts: Iterable[Optimizer]) -> None:
        self.views, self.parts = views, tuple(parts)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._cut = [(parameter, view) for parameter, view in views.items() if view is not parameter]
        self.register_step_pre_hook(self._lend_gradients)
        self.register_step_post_hook(self._take_back)

    @property
    def states(self) -> list[MutableMapping[torch.Tensor, Any]]:
        """What this rank keeps for the tensors that it owns, one mapping for each set."""
        return [getattr(part, "optim", part).state for part in self.parts]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update what this rank owns and send it, set by set."""
        for part in self.parts:
            part.step()

    def _lend_gradients(self, *_arguments: object) -> None:
        for parameter, view in self._cut:
            view.grad = None if parameter.grad is None else local_part(parameter.grad)

    def _take_back(self, *_arguments: object) -> None:
        for _, view in self._cut:
            view.grad = None


def deal_out(model: nn.Module, job: Job, make: Callable[[list[dict[str, Any]]], Optimizer]) -> DealtOut:
    """The optimizer of `model` under zero 1: what `make` makes of the tensors that each rank owns."""
    views = {parameter: _local_view(parameter) for parameter in model.parameters()}
    sets: dict[dist.ProcessGroup | None, list[nn.Parameter]] = {}
    for parameter, view in views.items():
        sets.setdefault(_sharers(parameter, job), []).append(view)
    return DealtOut(views, [_dealt_over(group, members, make) for group, members in sets.items()])


def _sharers(parameter: nn.Parameter, job: Job) -> dist.ProcessGroup | None:
    """The group that shares a parameter's state; None where this rank alone has it."""
    is_spread = isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())
    return expert_group(job.expert_mesh) if is_spread and job.expert_mesh is not None else shard_group(job.mesh)


def _dealt_over(
    group: dist.ProcessGroup | None, members: list[nn.Parameter], make: Callable[[list[dict[str, Any]]], Optimizer]
) -> Optimizer:
    if group is None:
        return make([{"params": members}])
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns on import, through torch.jit

    kind: Any = make  # called as optimizer_class(groups)
    return ZeroRedundancyOptimizer([{"params": members}], optimizer_class=kind, process_group=group)


def _local_view(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or a plain one in the memory of a DTensor's local part."""
    return nn.Parameter(local_part(parameter.detach())) if isinstance(parameter, DTensor) else parameter
