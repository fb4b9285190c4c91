"""A rank that keeps the others waiting. In a module of its own, so that fresh processes can import it."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist
from torch import nn

from strategist.document.plan import Plan
from strategist.executor.models import model_from_shape
from strategist.executor.train import train
from strategist.measure.observed_run import RunObserver
from strategist.runs.folder import RunFolder

STEPS = 7


def losses_of(plan: Plan, folder: Path, halting: int, seconds: float) -> tuple[list[float], list[float]]:
    """Losses of a run that nobody looks at, and of the same run observed into a folder while one rank halts in every forward
    pass of its part of the model."""

    def halting_model() -> nn.Module:
        model = model_from_shape(plan.model)
        if dist.get_rank() == halting:
            first = next(module for module in model.modules() if not list(module.children()))
            place = first if plan.mesh.pp == 1 else model.norm
            place.register_forward_pre_hook(lambda *_: time.sleep(seconds))
        return model

    observer = RunObserver(RunFolder(str(folder)))
    plain = train(plan, STEPS)
    seen = train(plan, STEPS, make_model=halting_model, observer=observer)
    return [step.loss for step in plain.steps], [step.loss for step in seen.steps]
