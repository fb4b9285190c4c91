"""Shard or replicate the parameters over the data-parallel axes with FSDP2.

zero 2 gathers parameters once per forward and keeps them; zero 3 gives them back after each block's forward. With
tp or pp, zero 0 uses FSDP2's replicating twin: torch's DDP inside a pipeline is silently wrong, and it knows no DTensor.
"""

from __future__ import annotations

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
    wrap = _replicated if job.plan.strategy.zero == 0 else _sharded
    for block in find_blocks(model).blocks.values():
        wrap(block, job, reshard=job.plan.strategy.zero == 3)
    # backward begins with what forward ended with, so giving the root group back would only gather it twice
    wrap(model, job, reshard=False)
    return model


def _replicated(module: nn.Module, job: Job, *, reshard: bool) -> None:
    """Keep `module` whole; nothing is ever given back, whatever `reshard` says."""
    replicate(module, mesh=job.mesh["dp_replicate"], mp_policy=sharding_policy(job.plan.strategy.formats))


def _sharded(module: nn.Module, job: Job, *, reshard: bool) -> None:
    two_levels = job.plan.mesh.dp_replicate > 1
    fully_shard(
        module,
        mesh=job.mesh["dp_replicate", "dp_shard"] if two_levels else job.mesh["dp_shard"],
        mp_policy=sharding_policy(job.plan.strategy.formats),
        reshard_after_forward=reshard,
    )
