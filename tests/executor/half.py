"""Training in float16: under a plan's layout, and in one process with nothing but torch's own tools."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from strategist.document.plan import Plan
from strategist.executor.build import build
from strategist.executor.data import SyntheticTokens
from strategist.executor.initialise import initialise
from strategist.executor.loss_scale import LossScale
from strategist.executor.models import model_from_shape
from strategist.executor.optimizers import default_optimizer

STEPS, BATCH, CLIP = 10, 8, 0.5
Outcome = tuple[list[float], list[float | None], list[bool]]
"""Losses, the scale of each step, and whether it changed the weights."""


def _samples(plan: Plan) -> SyntheticTokens:
    return SyntheticTokens(plan.model.vocab, plan.workload.seq_len, STEPS * BATCH)


def trained(plan: Plan, scale: float) -> Outcome:
    """Under the plan's layout, beginning with a scale."""
    session = build(plan, model_from_shape(plan.model), default_optimizer(plan, 1e-3), clip_norm=CLIP)
    session.loss_scale = LossScale(scale)
    results = [session.step(batch) for batch in session.loader(_samples(plan), shuffle=False)]
    return [r.loss for r in results], [r.loss_scale for r in results], [r.gradient_norm is not None for r in results]


def reference(plan: Plan, scale: float) -> Outcome:
    """One process under autocast with torch's scaler."""
    model = model_from_shape(plan.model, "cpu")
    initialise(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    samples = _samples(plan)
    losses: list[float] = []
    scales: list[float | None] = []
    done: list[bool] = []
    for step in range(STEPS):
        chosen = [samples[number] for number in range(step * BATCH, (step + 1) * BATCH)]
        inputs, labels = (torch.stack([s[name] for s in chosen]) for name in ("input_ids", "labels"))
        with torch.autocast("cpu", torch.float16):
            logits = model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        scales.append(scaler.get_scale())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        done.append(scaler.get_scale() >= (scales[-1] or 0.0))
    return losses, scales, done
