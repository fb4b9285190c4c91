"""Shard or replicate the parameters over the data-parallel axes with FSDP2.

zero 2 gathers parameters once per forward and keeps them; zero 3 gives them back after each unit's forward. With
tp, pp or ep, zero 0 and 1 use FSDP2's replicating twin: torch's DDP inside a pipeline is silently wrong, it knows no DTensor, and
all that it wraps has the same replicas.

Units are what is gathered and reduced at once: the embedding, each block, and last norm with head, as in
pytorch/torchtitan (torchtitan/models/llama3/parallelize.py); where matrices are tiled, each slice of
one, and what else the block has. The root unit takes what is left: nothing, or both ends of a
model whose embedding and head share one weight, or everything but the blocks of a module nobody described.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from strategist.executor.blocks import find_blocks
from strategist.executor.job import Job
from strategist.executor.mesh import EXPERT_SHARDS, data_mesh, expert_data_mesh, shard_axis
from strategist.executor.models import splittable
from strategist.executor.precision import sharding_policy
from strategist.executor.steps.expert_parallel import spread_experts
from strategist.executor.support import uses_fsdp
from strategist.executor.tiled_linear import slices_in


def shard_data(model: nn.Module, job: Job) -> nn.Module:
    """`model` under FSDP2, unit by unit and the root last; unchanged when DDP will wrap it."""
    if not uses_fsdp(job.plan):
        return model
    gives_back = job.plan.strategy.zero == 3
    embedding, head = _free_ends(model)
    for module in _make_unit(embedding, job, reshard=gives_back):
        module.set_unshard_in_backward(False)  # the gradient of a table does not depend on its values
    for block in find_blocks(model).blocks.values():
        for experts in spread_experts(block):
            _make_unit([experts], job, reshard=gives_back, apart=True)
        for part in slices_in(block):
            _make_unit([part], job, reshard=gives_back)
            part.register_forward_hook(_give_back_in_backward)
        _make_unit([block], job, reshard=gives_back)
    # backward begins with what forward ended with, so giving the last units back would only gather them twice
    _make_unit(head, job, reshard=False)
    for root in _make_unit([model], job, reshard=False):
        if gives_back:
            root.set_reshard_after_backward = _no_other_policy  # type: ignore[method-assign]
    return model


def _give_back_in_backward(unit: Any, _inputs: object, _output: object) -> None:
    """Recomputation runs a unit's forward inside backward, where FSDP2 would keep its weights until its own backward: for a
    slice that is as long as the layer works, with all others gathered beside it."""
    if torch._C._current_graph_task_id() != -1:
        unit.reshard()


def _no_other_policy(*_flags: object, **_options: object) -> None:
    """Ignore torch's pipeline stage, which asks FSDP2 to keep weights gathered after each backward until the last one."""


def _free_ends(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Embedding with learned positions, and last norm with head, as far as this stage has them and they share no weight."""
    cuts = splittable(model)
    if cuts is None or cuts.tied:
        return [], []
    return cuts.embedding_parts(), cuts.head_parts()


def _make_unit(modules: list[nn.Module], job: Job, *, reshard: bool, apart: bool = False) -> list[FSDPModule]:
    """Gather and reduce `modules` together from now on; `reshard` gives their weights back after forward. Experts that lie
    `apart` have other ranks to share their state with than the rest of their layer."""
    if not modules:
        return []
    options: dict[str, Any] = {"mp_policy": sharding_policy(job.plan.strategy.formats)}
    every, shards, alike = job.mesh, shard_axis(job.mesh), data_mesh
    if apart and job.expert_mesh is not None:
        every, shards, alike = job.expert_mesh, EXPERT_SHARDS, expert_data_mesh
    if job.plan.strategy.zero < 2:
        return [*replicate(modules, mesh=alike(every), **options)]
    two_levels = job.plan.mesh.dp_replicate > 1
    mesh = every["dp_replicate", shards] if two_levels else every[shards]
    return fully_shard(
        modules, mesh=mesh, reshard_after_forward=reshard, offload_policy=_offload_policy(job), **options
    )


def _offload_policy(job: Job) -> OffloadPolicy:
    """Where parameters, gradients and optimizer state rest; memory is pinned for a device that can fetch from it."""
    if not job.offloads_parameters:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=job.device.type != "cpu")
