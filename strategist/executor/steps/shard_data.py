"""Shard or replicate the parameters over the data-parallel axes with FSDP2.

zero 2 gathers parameters once per forward and keeps them; zero 3 gives them back after each block's forward. With
tp or pp, zero 0 uses FSDP2's replicating twin: torch's DDP inside a pipeline is silently wrong, and it knows no DTensor.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard

from strategist.executor.blocks import find_blocks
from strategist.executor.job import Job
from strategist.executor.precision import sharding_policy
from strategist.executor.support import uses_fsdp


def shard_data(model: nn.Module, job: Job) -> nn.Module:
    """`model` under FSDP2, each block first and then the rest as the root group; unchanged when DDP will wrap it."""
    if not uses_fsdp(job.plan):
        return model
    share_values(model, job)
    wrap, options = _wrapping(job)
    for block in find_blocks(model).blocks():
        wrap(block, **options)
    wrap(model, **options)
    return model


def _wrapping(job: Job) -> tuple[Any, dict[str, Any]]:
    strategy, mesh = job.plan.strategy, job.mesh
    policy = sharding_policy(strategy.formats)
    if strategy.zero == 0:
        return replicate, {"mesh": mesh["dp_replicate"], "mp_policy": policy}
    two_levels = job.plan.mesh.dp_replicate > 1
    over = mesh["dp_replicate", "dp_shard"] if two_levels else mesh["dp_shard"]
    return fully_shard, {"mesh": over, "mp_policy": policy, "reshard_after_forward": strategy.zero == 3}


def share_values(model: nn.Module, job: Job) -> None:
    """Send rank 0's values to every data rank, as DDP does, when the model came with values and nothing cut it yet."""
    if job.splits_model or any(p.is_meta for p in model.parameters()):
        return
    model.to(job.device)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
