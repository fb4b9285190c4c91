"""Optimizers over parameters that may lie on several meshes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from strategist.document.plan import Plan
from strategist.executor.initialise import local_part
from strategist.executor.job import Job
from strategist.executor.mesh import shard_group

ParameterGroups = list[dict[str, Any]]
MakeOptimizer = Callable[[ParameterGroups], Optimizer]

LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
"""Llama 2 (Touvron et al. 2023, arXiv 2307.09288, section 2.2), learning rate of its 7B model."""
MOMENTUM = 0.9


def default_optimizer(plan: Plan, learning_rate: float = LEARNING_RATE) -> MakeOptimizer:
    """A maker of the plan's optimizer."""
    if plan.strategy.optimizer == "sgd":
        return lambda groups: torch.optim.SGD(groups, lr=learning_rate, momentum=MOMENTUM)
    return lambda groups: torch.optim.AdamW(
        groups, lr=learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )


def parameter_groups(model: nn.Module) -> ParameterGroups:
    """One group per mesh: a fused update takes plain tensors, or DTensors of one mesh."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        groups[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def make_optimizer_for(model: nn.Module, job: Job, make: MakeOptimizer) -> Optimizer:
    """The optimizer of this rank's parameters; with zero 1, of this rank's share, sent to the others after each step."""
    group = shard_group(job.mesh)
    if job.plan.strategy.zero != 1 or group is None:
        return make(parameter_groups(model))
    return _shared_out(model, group, make)


def _shared_out(model: nn.Module, group: dist.ProcessGroup, make: MakeOptimizer) -> Optimizer:
    """torch's ZeRO-1 over the local parts of the parameters: it sends whole plain tensors, and DTensors are neither."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns on import, through torch.jit

    parts = {parameter: _local_view(parameter) for parameter in model.parameters()}
    cut = [(parameter, part) for parameter, part in parts.items() if part is not parameter]
    kind: Any = make  # called as optimizer_class(groups)
    optimizer = ZeroRedundancyOptimizer([{"params": list(parts.values())}], optimizer_class=kind, process_group=group)

    def lend_gradients(*_arguments: object) -> None:
        for parameter, part in cut:
            part.grad = None if parameter.grad is None else local_part(parameter.grad)

    def take_back(*_arguments: object) -> None:
        for _, part in cut:
            part.grad = None

    optimizer.register_step_pre_hook(lend_gradients)
    optimizer.register_step_post_hook(take_back)
    return optimizer


def _local_view(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or a plain one in the memory of a DTensor's local part."""
    return nn.Parameter(local_part(parameter.detach())) if isinstance(parameter, DTensor) else parameter
