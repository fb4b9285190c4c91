"""Keep the layers of this rank's pipeline stage."""

from __future__ import annotations

from torch import nn

from strategist.errors import ImpossibleError
from strategist.executor.job import Job
from strategist.executor.models.splittable import SplittableModel


def pipeline_split(model: nn.Module, job: Job) -> nn.Module:
    """`model` with only the parts that this rank's stage owns; names stay those of the whole model."""
    if job.plan.mesh.pp == 1:
        return model
    stage = job.stage
    first, end = stage.layers[0]
    splittable(model, "pp").keep_stage(range(first, end), embedding=stage.embedding, head=stage.head)
    return model


def splittable(model: nn.Module, axis: str) -> SplittableModel:
    """`model` as one that can be cut; raises ImpossibleError UNSUPPORTED for a module that does not say how."""
    if isinstance(model, SplittableModel):
        return model
    raise ImpossibleError(
        "UNSUPPORTED",
        f"{axis} cuts the model itself, and {type(model).__name__} does not say how it may be cut.",
        flag=f"$.mesh.{axis}",
        value=type(model).__name__,
        hint="Use the built-in model, derive yours from SplittableModel, or plan with data parallelism only.",
    )
