"""Tell attention that other ranks hold the rest of each sequence."""

from __future__ import annotations

from torch import nn

from strategist.executor.context import AllToAll, Ring
from strategist.executor.job import Job
from strategist.executor.models import require_splittable


def context_parallel(model: nn.Module, job: Job) -> nn.Module:
    """`model` with attention over the cp axis; weights stay whole, as far as this axis goes.

    Raises ImpossibleError UNSUPPORTED for a model that is not of the executor's own.
    """
    if job.plan.mesh.cp > 1:
        kind = Ring if job.plan.strategy.context_parallel == "ring" else AllToAll
        require_splittable(model, "cp").spread_context(kind(job.tokens_here, job.mesh["cp"].get_group()))
    return model
