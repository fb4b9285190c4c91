"""What ranks do with models of transformers, beside training cells of the matrix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from strategist.document.plan import Plan
from strategist.errors import StrategistError
from strategist.executor.build import build
from strategist.executor.job import Instruments
from strategist.executor.loss import own_loss
from strategist.executor.optimizers import default_optimizer
from tests.executor.cells import CLIP, EXACT, SEED, Job, Trained, samples, train_cells
from tests.executor.hugging_face import lifted_to_float64, tiny

OWN_LOSS = "own loss"
"""In place of a class: the model that was asked for, with the loss that it computes."""


def train_part(plan: Plan, start: Path | None, until: int, target: Path) -> Trained:
    """Go on from a checkpoint to step `until` and save: losses of these steps, parameters."""
    model = tiny(plan.model, torch.float64, SEED + dist.get_rank())
    session = build(plan, model, default_optimizer(plan, EXACT.rate), clip_norm=CLIP)
    if start is not None:
        session.load(start)
    data = samples(plan.model, EXACT, plan.workload.global_batch)
    batches = iter(session.loader(data, shuffle=False, first_step=session.steps))
    losses = [session.step(next(batches)).loss for _ in range(session.steps, until)]
    session.save(target)
    return losses, session.parameters_full()


def train_with_chance(plan: Plan, changes: dict[str, Any]) -> Trained:
    """Losses and parameters of a model that draws random numbers, from one seed."""
    session = build(plan, tiny(plan.model, torch.float64, SEED, **changes), default_optimizer(plan, EXACT.rate))
    torch.manual_seed(SEED)
    data = samples(plan.model, EXACT, plan.workload.global_batch)
    return [session.step(batch).loss for batch in session.loader(data, shuffle=False)], session.parameters_full()


def refused_import(plan: Plan, folder: Path) -> str:
    """The code of the error that importing weights into a session raises."""
    from strategist.executor.weights import import_weights

    try:
        import_weights(build(plan, tiny(plan.model, torch.float64, SEED)), folder)
    except StrategistError as error:
        return error.code
    return ""


def train_compiled(plan: Plan) -> Trained:
    """Losses and parameters with compiled blocks, of every rank's own values those of the first."""
    compiled = replace(plan, strategy=replace(plan.strategy, compile=True))
    model = tiny(plan.model, torch.float64, SEED + dist.get_rank())
    session = build(
        compiled,
        model,
        default_optimizer(plan, EXACT.rate),
        clip_norm=CLIP,
        instruments=Instruments(compile_backend="aot_eager"),
    )
    data = samples(plan.model, EXACT, plan.workload.global_batch)
    return [session.step(batch).loss for batch in session.loader(data, shuffle=False)], session.parameters_full()


def trained_in_float64(job: Job) -> Trained:
    """What a job of a float64 plan, or one process where no ranks run, makes of it where nothing of the library's is in float32."""
    with lifted_to_float64():
        return train_cells([job])[0] if dist.is_initialized() else job.alone


def refusals(asked: list[tuple[Plan, str, dict[str, Any]]]) -> list[tuple[str, str]]:
    """Code and sentence of the errors that building some sessions raises."""
    return [_refusal(*each) for each in asked]


def _refusal(plan: Plan, kind: str, changes: dict[str, Any]) -> tuple[str, str]:
    """Code and sentence of the error that building a session raises, for a class of transformers or with the model's own loss if one
    is named."""
    import transformers

    model = tiny(plan.model, torch.float32, SEED, **changes)
    loss = own_loss if kind == OWN_LOSS else None
    try:
        build(plan, getattr(transformers, kind)(model.config) if kind and loss is None else model, loss_fn=loss)
    except StrategistError as error:
        return error.code, error.message
    return "", ""
