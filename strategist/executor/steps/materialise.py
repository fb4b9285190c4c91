"""Give the parameters memory and values."""

from __future__ import annotations

from torch import nn

from strategist.errors import InputError
from strategist.executor.initialise import initialise
from strategist.executor.job import Job
from strategist.executor.models.reference import ReferenceModel


def materialise(model: nn.Module, job: Job) -> nn.Module:
    """`model` on the device, its parameters in the host's memory when the plan offloads them.

    One that came on meta gets its initial weights, the same for every layout. Raises InputError MISSING for a module on
    meta that does not know any.
    """
    if not any(p.is_meta for p in model.parameters()):
        is_there = all(tensor.device == job.device for tensor in (*model.parameters(), *model.buffers()))
        return (
            model if job.offloads_parameters or is_there else model.to(job.device)
        )  # FSDP2 has put offloaded ones away
    if not isinstance(model, ReferenceModel):
        raise InputError(
            "MISSING",
            f"{type(model).__name__} has no values (it is on the meta device), and only the built-in model knows its own.",
            flag="model",
            hint="Build the module on the CPU.",
        )
    model.to_empty(device="cpu" if job.offloads_parameters else job.device)
    model.tie()  # to_empty gives each end its own memory
    initialise(model, job.seed, job.device)
    return model
