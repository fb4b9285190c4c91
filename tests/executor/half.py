"""Training in float16: under a plan's layout, and in one process with nothing but torch's own tools."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from strategist.document.plan import Plan
from strategist.executor.build import build
from strategist.executor.data import SyntheticTokens
from strategist.executor.initialise import initialise
from strategist.executor.loss_scale import FIRST, LossScale
from strategist.executor.models import model_from_shape
from strategist.executor.optimizers import default_optimizer

STEPS, BATCH, CLIP, LEARNING_RATE = 6, 8, 0.5, 1e-3
TOO_LARGE, AT = 2.0**40, 2
"""A scale at which every gradient overflows on every layout, and the step that is taken with it. Near the limit of float16 it
depends on the layout who overflows: data ranks average gradients, so each has some that are larger by their number."""
Outcome = tuple[list[float], list[bool], float]
"""Losses, which steps changed the weights, and the scale behind the one that must not."""


def _samples(plan: Plan) -> SyntheticTokens:
    return SyntheticTokens(plan.model.vocab, plan.workload.seq_len, STEPS * BATCH)


def trained(plan: Plan) -> Outcome:
    """Under the plan's layout."""
    session = build(plan, model_from_shape(plan.model), default_optimizer(plan, LEARNING_RATE), clip_norm=CLIP)
    losses: list[float] = []
    done: list[bool] = []
    behind = 0.0
    for step, batch in enumerate(session.loader(_samples(plan), shuffle=False)):
        scale = LossScale(TOO_LARGE if step == AT else FIRST)
        session.loss_scale = scale
        before = session.parameters_full()
        result = session.step(batch)
        losses.append(result.loss)
        done.append(any(not value.equal(before[name]) for name, value in session.parameters_full().items()))
        behind = scale.value if step == AT else behind
        assert (result.gradient_norm is not None) == done[-1]
    return losses, done, behind


def reference(plan: Plan) -> Outcome:
    """One process under autocast with torch's scaler."""
    model = model_from_shape(plan.model, "cpu")
    initialise(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu")
    samples = _samples(plan)
    losses: list[float] = []
    done: list[bool] = []
    behind = 0.0
    for step in range(STEPS):
        chosen = [samples[number] for number in range(step * BATCH, (step + 1) * BATCH)]
        inputs, labels = (torch.stack([s[name] for s in chosen]) for name in ("input_ids", "labels"))
        with torch.autocast("cpu", torch.float16):
            logits = model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        scale = TOO_LARGE if step == AT else FIRST
        scaler.scale(loss.detach())  # makes the scale, which can be set from then on
        scaler.update(scale)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        done.append(scaler.get_scale() >= scale)
        behind = scaler.get_scale() if step == AT else behind
    return losses, done, behind
