"""Average gradients with torch's DDP: zero 0 and zero 1 without tp or pp."""

from __future__ import annotations

from torch import nn

from strategist.executor.job import Job
from strategist.executor.mesh import data_group
from strategist.executor.support import uses_fsdp


def wrap_ddp(model: nn.Module, job: Job) -> nn.Module:
    """`model` inside DDP when more than one data rank holds a whole copy of it, with the plan's hook."""
    group = data_group(job.mesh)
    if group is None or uses_fsdp(job.plan):
        return model
    replica = job.instruments.replica(model, process_group=group, gradient_as_bucket_view=True)
    if job.plan.strategy.compression != "none":
        from strategist.executor.compression import compress  # torch's hooks are not loaded for plans without

        compress(replica, job.plan.strategy, group)
    return replica
