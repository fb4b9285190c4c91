"""Give the parameters memory and values."""

from __future__ import annotations

from torch import nn

from strategist.errors import InputError
from strategist.executor.initialise import initialise
from strategist.executor.job import Job
from strategist.executor.models.reference import ReferenceModel


def materialise(model: nn.Module, job: Job) -> nn.Module:
    """`model` on the device; one that came on meta gets its initial weights, the same for every layout."""
    if not any(p.is_meta for p in model.parameters()):
        return model.to(job.device)
    if not isinstance(model, ReferenceModel):
        raise InputError(
            "MISSING",
            f"{type(model).__name__} has no values (it is on the meta device), and only the built-in model knows its own.",
            flag="model",
            hint="Build the module on the CPU.",
        )
    model.to_empty(device=job.device)
    model.tie()  # to_empty gives each end its own memory
    initialise(model, job.seed)
    return model
