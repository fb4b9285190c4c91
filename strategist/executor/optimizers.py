"""Optimizers over parameters that may lie on several meshes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from strategist.document.plan import Plan
from strategist.errors import ImpossibleError
from strategist.executor.dealt import deal_out
from strategist.executor.drive import StateOnDrive, block_elements
from strategist.executor.eight_bits import AdamW8bit
from strategist.executor.initialise import local_part
from strategist.executor.job import Job
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


def parameter_groups(parameters: Iterable[nn.Parameter]) -> ParameterGroups:
    """One group per mesh: a fused update takes plain tensors, or DTensors of one mesh. Frozen parameters are left out."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in (parameter for parameter in parameters if parameter.requires_grad):
        groups[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return [{"params": own} for own in groups.values()]


Sorts = Mapping[bool, Sequence[nn.Parameter]]
"""Parameters that are no hidden matrices, and those that are; empty ones are left out."""


def _sorts(model: nn.Module, job: Job) -> Sorts:
    """All parameters as of one sort, or under Muon of two. Raises ImpossibleError UNSUPPORTED where there is nothing for it; a stage of a
    pipeline may have none."""
    if job.plan.strategy.optimizer != "muon":
        return {False: list(model.parameters())}
    matrices = hidden_matrices(model)
    if not matrices and job.plan.mesh.pp == 1:
        raise ImpossibleError(
            "UNSUPPORTED",
            "Muon updates matrices inside the layers of a model, which are those of its longest list of like modules; this model has none.",
            flag="$.strategy.optimizer",
            value="muon",
            hint="Use --optimizer adamw.",
        )
    sorts = {is_matrix: [p for p in model.parameters() if (p in matrices) == is_matrix] for is_matrix in (False, True)}
    return {is_matrix: own for is_matrix, own in sorts.items() if own}


def _with_word(groups: ParameterGroups, is_matrix: bool) -> ParameterGroups:
    """Groups of hidden matrices say so."""
    return [group | {MATRICES: True} for group in groups] if is_matrix else groups


def make_optimizer_for(model: nn.Module, job: Job, make: MakeOptimizer) -> Optimizer:
    """The optimizer of this rank's parameters; with zero 1, of this rank's share, sent to the others after each step;
    with offload "optimizer", of their copies in the host's memory; with offload "nvme", with its state on a drive."""
    if job.keeps_state_on_drive:
        return StateOnDrive(list(model.parameters()), make, job.instruments.make_drive(), block_elements())
    if job.offloads_optimizer:
        return _on_host(model, job.device, make)
    sorts = _sorts(model, job)
    if job.plan.strategy.zero == 1:
        return deal_out([g for sort, own in sorts.items() for g in _with_word([{"params": own}], sort)], job, make)
    return make([g for sort, own in sorts.items() for g in _with_word(parameter_groups(own), sort)])


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
