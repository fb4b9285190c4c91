"""Keep the layers of this rank's pipeline stage."""

from __future__ import annotations

from torch import nn

from strategist.executor.job import Job
from strategist.executor.models import require_splittable


def pipeline_split(model: nn.Module, job: Job) -> nn.Module:
    """`model` with only the parts that this rank's stage owns; names stay those of the whole model."""
    if job.plan.mesh.pp > 1:
        first, end = job.stage.layers[0]
        cuts = require_splittable(model, "pp")
        cuts.keep_stage(range(first, end), embedding=job.stage.embedding, head=job.stage.head)
    return model
