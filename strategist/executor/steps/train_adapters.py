"""Train adapters alone where the plan says so: they rest in the format of their gradients, the frozen weights in the plan's."""

from __future__ import annotations

from torch import nn

from strategist.errors import ImpossibleError
from strategist.executor.job import Job
from strategist.executor.models.adapters import adapters_of
from strategist.executor.precision import gradient_dtype


def train_adapters(model: nn.Module, job: Job) -> nn.Module:
    """`model` with its adapters in their own number format; unchanged without any.

    Raises ImpossibleError UNSUPPORTED for a module that has none where the plan trains them: adapters are put beside the layers of
    the built-in model only.
    """
    if job.plan.model.adapters is None:
        return model
    own = adapters_of(model)
    if not own:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"The plan trains adapters, and {type(model).__name__} has none that the executor knows.",
            flag="model",
            value=type(model).__name__,
            hint="Use the built-in model, or plan with --method full and freeze what you like yourself.",
        )
    for adapter in own:
        adapter.to(gradient_dtype(job.plan))
    return model
