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

Groups = list[dict[str, Any]]
"""Parameters as an optimizer takes them: "params", and words of its own."""


class DealtOut(Optimizer):
    """One optimizer for each set of tensors that the same ranks share, all stepped together.

    They update plain tensors in the memory of the parameters' local `parts`: whole plain tensors are what is sent, and DTensors
    are neither. Gradients are lent to them for the update."""

    def __init__(self, parts: Mapping[nn.Parameter, nn.Parameter], dealt: Iterable[Optimizer]) -> None:
        self.parts, self._dealt = parts, tuple(dealt)
        super().__init__([group for own in self._dealt for group in own.param_groups], {})
        self._cut = [(parameter, part) for parameter, part in parts.items() if part is not parameter]
        self.register_step_pre_hook(self._lend_gradients)
        self.register_step_post_hook(self._take_back)

    @property
    def states(self) -> list[MutableMapping[torch.Tensor, Any]]:
        """What this rank keeps for the tensors that it owns, one mapping for each set."""
        return [getattr(own, "optim", own).state for own in self._dealt]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update what this rank owns and send it, set by set."""
        for own in self._dealt:
            own.step()

    def _lend_gradients(self, *_arguments: object) -> None:
        for parameter, part in self._cut:
            part.grad = None if parameter.grad is None else local_part(parameter.grad)

    def _take_back(self, *_arguments: object) -> None:
        for _, part in self._cut:
            part.grad = None


def deal_out(groups: Groups, job: Job, make: Callable[[Groups], Optimizer]) -> DealtOut:
    """The optimizer of `groups` of parameters under zero 1: what `make` makes of the tensors that each rank owns. Words of a group
    go with its parameters."""
    parts = {parameter: _local_view(parameter) for group in groups for parameter in group["params"]}
    sets: dict[dist.ProcessGroup | None, Groups] = {}
    for group in groups:
        for ranks in dict.fromkeys(_sharers(parameter, job) for parameter in group["params"]):
            own = [parts[parameter] for parameter in group["params"] if _sharers(parameter, job) is ranks]
            sets.setdefault(ranks, []).append(group | {"params": own})
    return DealtOut(parts, [_dealt_over(ranks, own, make) for ranks, own in sets.items()])


def _sharers(parameter: nn.Parameter, job: Job) -> dist.ProcessGroup | None:
    """The group that shares a parameter's state; None where this rank alone has it."""
    is_spread = isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())
    return expert_group(job.expert_mesh) if is_spread and job.expert_mesh is not None else shard_group(job.mesh)


def _dealt_over(ranks: dist.ProcessGroup | None, groups: Groups, make: Callable[[Groups], Optimizer]) -> Optimizer:
    if ranks is None:
        return make(groups)
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns on import, through torch.jit

    kind: Any = make  # called as optimizer_class(groups)
    return ZeroRedundancyOptimizer(groups, optimizer_class=kind, process_group=ranks)


def _local_view(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or a plain one in the memory of a DTensor's local part."""
    return nn.Parameter(local_part(parameter.detach())) if isinstance(parameter, DTensor) else parameter
