"""Keep the layers of this rank's pipeline stage."""

from __future__ import annotations

from torch import nn

from strategist.errors import StaleError
from strategist.executor.chunks import Chunks, copy_structure
from strategist.executor.job import Job
from strategist.executor.models import require_splittable


def pipeline_split(model: nn.Module, job: Job) -> nn.Module:
    """`model` with only the parts that this rank's stage owns; names stay those of the whole model.

    A stage with several runs of layers (virtual stages) becomes Chunks. Raises StaleError FACTS_DIFFER when the model has
    another number of layers than the plan spreads over the stages.
    """
    if job.plan.mesh.pp == 1:
        return model
    _check_layers(model, job)
    runs = job.stage.layers
    if len(runs) == 1:
        return _keep(model, job, 0)
    return Chunks([_keep(copy_structure(model), job, number) for number in range(len(runs))])


def _check_layers(model: nn.Module, job: Job) -> None:
    found, planned = require_splittable(model, "pp").layer_count(), job.plan.model.depth
    if found != planned:
        raise StaleError(
            "FACTS_DIFFER",
            f"The plan spreads {planned} layers over its stages, but the model has {found}.",
            flag="$.model.layers",
            value=found,
            hint="Plan again for this model.",
        )


def _keep(model: nn.Module, job: Job, number: int) -> nn.Module:
    """`model` cut down to one run of this stage's layers; the ends of the model go with the first and the last run."""
    stage = job.stage
    first, end = stage.layers[number]
    cuts = require_splittable(model, "pp")
    cuts.keep_stage(
        range(first, end),
        embedding=stage.embedding and number == 0,
        head=stage.head and number == len(stage.layers) - 1,
    )
    return model
