"""Tiny encoders with decoders of transformers, what ranks do with them, and the one process that they are compared with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from strategist.document.plan import Plan
from strategist.errors import StrategistError
from strategist.executor.build import build
from strategist.executor.data import SyntheticPairs
from strategist.executor.optimizers import BETAS, WEIGHT_DECAY, default_optimizer
from strategist.executor.train import train
from tests.executor.pair_configs import config_of

SEED, CLIP, STEPS, RATE = 3, 0.5, 5, 1e-2
Trained = tuple[list[float], dict[str, Tensor]]
"""Losses and final weights."""


def tiny_pair(family: str, seed: int, **changes: Any) -> nn.Module:
    """A model with random weights in float64, in training mode."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    words = config_of(family) | changes
    config = AutoConfig.for_model(words.pop("model_type"), **words)
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float64).train()
    return model


def pairs(plan: Plan) -> SyntheticPairs:
    """Samples of all steps."""
    work = plan.workload
    return SyntheticPairs(plan.model.vocab, work.seq_len, work.targets, STEPS * work.global_batch)


def train_pair(family: str, plan: Plan) -> Trained:
    """Losses of five steps and weights of a plan's ranks, which come with other values than rank 0 has."""
    model = tiny_pair(family, SEED + dist.get_rank())
    session = build(plan, model, default_optimizer(plan, RATE), clip_norm=CLIP)
    losses = [session.step(batch).loss for batch in session.loader(pairs(plan), shuffle=False)]
    return losses, session.parameters_full()


def train_pair_alone(family: str, plan: Plan) -> Trained:
    """The same with nothing but torch, each global batch in one piece."""
    model, data, size = tiny_pair(family, SEED), pairs(plan), plan.workload.global_batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
    losses = []
    for first in range(0, len(data), size):
        rows = [data[number] for number in range(first, first + size)]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        labels = batch.pop("labels")
        loss = cross_entropy(model(**batch).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def train_on_synthetic_pairs(plan: Plan) -> list[float]:
    """Losses of five steps on what `train` makes by itself."""
    report = train(plan, STEPS, make_model=lambda: tiny_pair("t5", SEED))
    return [step.loss for step in report.steps]


def refusal(family: str, plan: Plan, changes: dict[str, Any]) -> tuple[str, str]:
    """Code and sentence of the error that building a session raises."""
    try:
        build(plan, tiny_pair(family, SEED, **changes))
    except StrategistError as error:
        return error.code, error.message
    return "", ""
