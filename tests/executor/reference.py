"""The truth that every layout must reproduce: one process, plain torch, no executor but its model and weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategist.executor.data import SyntheticTokens
from strategist.executor.initialise import initialise
from strategist.executor.models import model_from_shape
from strategist.facts.model import ModelShape
from tests.executor.ragged import RaggedTokens

STEPS = 5
GLOBAL_BATCH = 8
SEQ_LEN = 16
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Task:
    """What is trained, whatever the layout."""

    shape: ModelShape
    ragged: bool = False
    clip_norm: float | None = None
    seed: int = 3
    start: str = "float64"  # the format in which the initial weights are drawn
    scheduled: bool = False  # whether the learning rate changes from step to step
    optimizer: str = "adamw"  # or muon


def rate_of_step(step: int) -> float:
    """A rate that rises, then falls."""
    return (0.3, 1.0, 0.8, 0.5, 0.1)[step]


def dataset_of(task: Task) -> SyntheticTokens:
    """The samples of the task."""
    kind = RaggedTokens if task.ragged else SyntheticTokens
    return kind(task.shape.vocab, SEQ_LEN, STEPS * GLOBAL_BATCH)


@cache
def trained_by_one_process(task: Task) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Losses, final parameters and gradient norms of STEPS steps of the optimizer in float64, each batch in one piece."""
    model = model_from_shape(task.shape, "cpu", getattr(torch, task.start))
    initialise(model, task.seed)
    model.double()
    optimizers = _optimizers(model, task.optimizer)
    factor = (lambda step: rate_of_step(min(step, STEPS - 1))) if task.scheduled else (lambda _step: 1.0)
    rates = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]
    samples, losses, norms = dataset_of(task), [], []
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(task.seed)).tolist()
    for step in range(STEPS):
        chosen = [samples[i] for i in order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]]
        inputs, labels = (torch.stack([s[name] for s in chosen]) for name in ("input_ids", "labels"))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        limit = task.clip_norm if task.clip_norm is not None else float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, norms


def _optimizers(model: nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """torch's AdamW; or torch's Muon for matrices in layers, and AdamW for the rest."""
    inside = [p for n, p in model.named_parameters() if name == "muon" and n.startswith("layers.") and p.dim() == 2]
    outside = [p for p in model.parameters() if not any(p is matrix for matrix in inside)]
    adamw = torch.optim.AdamW(outside, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    if not inside:
        return [adamw]
    muon = torch.optim.Muon(inside, lr=LEARNING_RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return [adamw, muon]
