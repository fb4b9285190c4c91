"""Tell attention that other ranks hold the rest of each sequence."""

from __future__ import annotations

from torch import nn

from strategist.executor.context import AllToAll, Context, Hierarchical, Ring
from strategist.executor.job import Job
from strategist.executor.mesh import INSIDE_CP, RING_OF_CP
from strategist.executor.models import require_splittable


def context_parallel(model: nn.Module, job: Job) -> nn.Module:
    """`model` with attention over the cp axis; weights stay whole, as far as this axis goes.

    Raises ImpossibleError UNSUPPORTED for a model that is not of the executor's own.
    """
    if job.plan.mesh.cp > 1:
        require_splittable(model, "cp").spread_context(_context(job))
    return model


def _context(job: Job) -> Context:
    if job.context_mesh is not None:
        inside, around = (job.context_mesh[axis].get_group() for axis in (INSIDE_CP, RING_OF_CP))
        return Hierarchical(job.tokens_here, inside, around)
    kind = Ring if job.plan.strategy.context_parallel == "ring" else AllToAll
    return kind(job.tokens_here, job.mesh["cp"].get_group())
