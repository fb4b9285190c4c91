"""Put a model that was made for inference into the state for training."""

from __future__ import annotations

from torch import nn

from strategist.errors import ImpossibleError
from strategist.executor.chance import draws
from strategist.executor.job import Job


def training_mode(model: nn.Module, job: Job) -> nn.Module:
    """`model` with dropout and the like on, and without a cache of keys and values.

    Hugging Face models keep one by default; recomputation would append every token to it a second time. Raises ImpossibleError
    UNSUPPORTED for dropout under tensor parallelism: its ranks hold the same hidden states, and each would drop others.
    """
    if job.plan.mesh.tp > 1 and draws(model):
        raise ImpossibleError(
            "UNSUPPORTED",
            f"{type(model).__name__} drops activations at random, or adds noise, and tp = {job.plan.mesh.tp} ranks that hold the "
            "same hidden states would each draw for themselves.",
            flag="$.mesh.tp",
            value=job.plan.mesh.tp,
            hint="Set all rates of dropout and noise in the model's configuration to 0, or plan with --pin tp=1.",
        )
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]
    return model.train()
