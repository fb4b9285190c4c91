"""Put a model that was made for inference into the state for training."""

from __future__ import annotations

from torch import nn

from strategist.executor.job import Job


def training_mode(model: nn.Module, _job: Job) -> nn.Module:
    """`model` with dropout and the like on, and without a cache of keys and values.

    Hugging Face models keep one by default; recomputation would append every token to it a second time.
    """
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]
    return model.train()
