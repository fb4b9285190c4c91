"""Optimizers over parameters that may lie on several meshes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from strategist.document.plan import Plan
from strategist.executor.drive import StateOnDrive, block_elements
from strategist.executor.eight_bits import AdamW8bit
from strategist.executor.initialise import local_part
from strategist.executor.job import Job
from strategist.executor.mesh import shard_group
from strategist.executor.muon import MATRICES, Muon, hidden_matrices

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
    if plan.strategy.optimizer == "adamw8bit":
        return lambda groups: AdamW8bit(groups, lr=learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    if plan.strategy.optimizer == "muon":
        return lambda groups: Muon(groups, lr=learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    return lambda groups: torch.optim.AdamW(
        groups, lr=learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )


def parameter_groups(model: nn.Module) -> ParameterGroups:
    """One group per mesh: a fused update takes plain tensors, or DTensors of one mesh. Frozen parameters are left out."""
    return _groups([parameter for parameter in model.parameters() if parameter.requires_grad])


def _groups(parameters: Iterable[nn.Parameter]) -> ParameterGroups:
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        groups[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def _groups_for_muon(model: nn.Module) -> ParameterGroups:
    """The same, hidden matrices apart from all else."""
    matrices = hidden_matrices(model)
    apart = {
        is_matrix: _groups(p for p in model.parameters() if (p in matrices) == is_matrix) for is_matrix in (False, True)
    }
    return [group | {MATRICES: is_matrix} for is_matrix, groups in apart.items() for group in groups]


def make_optimizer_for(model: nn.Module, job: Job, make: MakeOptimizer) -> Optimizer:
    """The optimizer of this rank's parameters; with zero 1, of this rank's share, sent to the others after each step;
    with offload "optimizer", of their copies in the host's memory; with offload "nvme", with its state on a drive."""
    if job.keeps_state_on_drive:
        return StateOnDrive(list(model.parameters()), make, job.instruments.make_drive(), block_elements())
    if job.offloads_optimizer:
        return _on_host(model, job.device, make)
    group = shard_group(job.mesh)
    if job.plan.strategy.zero != 1 or group is None:
        return make(_groups_for_muon(model) if job.plan.strategy.optimizer == "muon" else parameter_groups(model))
    matrices = hidden_matrices(model) if job.plan.strategy.optimizer == "muon" else None
    return _shared_out(model, group, make, matrices)


def _shared_out(
    model: nn.Module, group: dist.ProcessGroup, make: MakeOptimizer, matrices: set[nn.Parameter] | None
) -> Optimizer:
    """torch's ZeRO-1 over the local parts of the parameters: it sends whole plain tensors, and DTensors are neither. With
    `matrices`, these are dealt when all else is."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns on import, through torch.jit

    parts = {parameter: _local_view(parameter) for parameter in model.parameters()}
    cut = [(parameter, part) for parameter, part in parts.items() if part is not parameter]
    kind: Any = make  # called as optimizer_class(groups)
    groups: ParameterGroups = [{"params": list(parts.values())}]
    if matrices is not None:
        apart = {is_matrix: [parts[p] for p in parts if (p in matrices) == is_matrix] for is_matrix in (False, True)}
        groups = [{"params": own, MATRICES: is_matrix} for is_matrix, own in apart.items() if own]
    optimizer: Any = ZeroRedundancyOptimizer(groups, optimizer_class=kind, process_group=group)
    optimizer.parts = parts

    def lend_gradients(*_arguments: object) -> None:
        for parameter, part in cut:
            part.grad = None if parameter.grad is None else local_part(parameter.grad)

    def take_back(*_arguments: object) -> None:
        for _, part in cut:
            part.grad = None

    optimizer.register_step_pre_hook(lend_gradients)
    optimizer.register_step_post_hook(take_back)
    return cast(Optimizer, optimizer)


def _on_host(model: nn.Module, device: torch.device, make: MakeOptimizer) -> Optimizer:
    """An optimizer that lives in the host's memory (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840, section 4): before each
    step gradients are copied to it, after each step the updated weights are copied back."""
    twins = {parameter: nn.Parameter(_host_copy(parameter, device)) for parameter in model.parameters()}
    places = {parameter: torch.empty_like(twin) for parameter, twin in twins.items()}
    optimizer: Any = make([{"params": list(twins.values())}])
    optimizer.parts = twins

    @torch.no_grad()
    def bring_gradients(*_arguments: object) -> None:
        for parameter, twin in twins.items():
            gradient = parameter.grad
            twin.grad = None if gradient is None else places[parameter].copy_(local_part(gradient), non_blocking=True)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    @torch.no_grad()
    def hand_back(*_arguments: object) -> None:
        for parameter, twin in twins.items():
            local_part(parameter).copy_(twin, non_blocking=True)

    optimizer.register_step_pre_hook(bring_gradients)
    optimizer.register_step_post_hook(hand_back)
    return cast(Optimizer, optimizer)


def _host_copy(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    """The local part of a parameter in the host's memory, pinned for a device that can fetch from it."""
    here = local_part(parameter.detach())
    return torch.empty_like(here, device="cpu", pin_memory=device.type != "cpu").copy_(here)


def _local_view(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or a plain one in the memory of a DTensor's local part."""
    return nn.Parameter(local_part(parameter.detach())) if isinstance(parameter, DTensor) else parameter
