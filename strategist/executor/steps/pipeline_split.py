"""Keep the layers of this rank's pipeline stage."""

from __future__ import annotations

from torch import nn

from strategist.errors import StaleError
from strategist.executor.job import Job
from strategist.executor.models import require_splittable


def pipeline_split(model: nn.Module, job: Job) -> nn.Module:
    """`model` with only the parts that this rank's stage owns; names stay those of the whole model.

    Raises StaleError FACTS_DIFFER when the model has another number of layers than the plan spreads over the stages.
    """
    if job.plan.mesh.pp > 1:
        cuts = require_splittable(model, "pp")
        found, planned = cuts.layer_count(), job.plan.model.layers
        if found != planned:
            raise StaleError(
                "FACTS_DIFFER",
                f"The plan spreads {planned} layers over its stages, but the model has {found}.",
                flag="$.model.layers",
                value=found,
                hint="Plan again for this model.",
            )
        first, end = job.stage.layers[0]
        cuts.keep_stage(range(first, end), embedding=job.stage.embedding, head=job.stage.head)
    return model
