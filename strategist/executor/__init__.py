"""A Plan as live torch objects. Only this folder and `measure` may import torch.

`support` answers without torch whether a plan can run here; every other name is loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from strategist.executor.support import refuse, unsupported

_HOMES = {
    "build": "build",
    "own_loss": "loss",
    "process_group": "processes",
    "Session": "session",
    "StepResult": "session",
    "train": "train",
}

__all__ = ["Session", "StepResult", "build", "own_loss", "process_group", "refuse", "train", "unsupported"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
