"""Modules that call their parts one behind the other, in three spellings, and one process that trains them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strategist.document.plan import Plan
from strategist.executor.build import build
from strategist.executor.data import SyntheticTokens
from strategist.executor.loss import Batch
from strategist.executor.session import Session
from tests.executor.modules import Mix
from tests.executor.ragged import RaggedTokens

VOCABULARY, WIDTH, LENGTH, BATCH, STEPS = 32, 12, 8, 8, 4


class Halve(nn.Module):
    """Something without weights between two layers, which gives a view of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return (x / 2).view_as(x)


def flat() -> nn.Module:
    """Blocks beside everything else, with something between two of them."""
    blocks = [Mix(WIDTH) for _ in range(4)]
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        *blocks[:3],
        Halve(),
        blocks[3],
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, VOCABULARY),
    )


def nested() -> nn.Module:
    """Blocks, each of several parts, in a container of their own."""
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Halve()) for _ in range(4))
    return nn.Sequential(
        OrderedDict(
            table=nn.Embedding(VOCABULARY, WIDTH), tower=nn.Sequential(*blocks), out=nn.Linear(WIDTH, VOCABULARY)
        )
    )


def plain() -> nn.Module:
    """Nothing but matrices and what stands between them: the matrices are the layers, the first and the last among them."""
    widths = (WIDTH, 24, WIDTH, 24, VOCABULARY)
    matrices = (nn.Linear(a, b) for a, b in pairwise(widths))
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *(part for matrix in matrices for part in (matrix, nn.Tanh()))
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"flat": flat, "nested": nested, "plain": plain}


def samples() -> SyntheticTokens:
    """Sequences of different lengths, as many as all steps take."""
    return RaggedTokens(VOCABULARY, LENGTH, STEPS * BATCH)


def distance(outputs: Tensor, batch: Batch) -> Tensor:
    """Mean over the counted labels of how far the first output is from the label: no loss over logits."""
    counts = batch["labels"] != -100
    return ((outputs[..., 0] - batch["labels"] / VOCABULARY).square() * counts).sum() / counts.sum().clamp(min=1)


def tokens(outputs: Tensor, batch: Batch) -> Tensor:
    """Mean cross entropy, as the executor takes it by itself."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


LOSSES: dict[str, Any] = {"own": distance, "tokens": None}


def alone(kind: str, loss: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one process in float64, each batch in one piece."""
    torch.manual_seed(0)
    model, data, losses = MODELS[kind]().double(), samples(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        chosen = [data[number] for number in range(BATCH * step, BATCH * (step + 1))]
        batch = {name: torch.stack([sample[name] for sample in chosen]) for name in ("input_ids", "labels")}
        value = (LOSSES[loss] or tokens)(model(batch["input_ids"]), batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses, dict(model.named_parameters())


def _session(plan: Plan, kind: str, loss: str) -> Session:
    torch.manual_seed(torch.distributed.get_rank())  # the values of rank 0 count
    return build(plan, MODELS[kind](), lambda groups: torch.optim.AdamW(groups, lr=0.01), loss_fn=LOSSES[loss])


def train(plan: Plan, kind: str, loss: str) -> tuple[list[float], dict[str, Tensor]]:
    """The same under a plan."""
    session = _session(plan, kind, loss)
    losses = [session.step(batch).loss for batch in session.loader(samples(), shuffle=False)]
    return losses, session.parameters_full()


def train_on(plan: Plan, then: Plan, kind: str, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Half of the steps under one plan, the others under another, with a checkpoint between them."""
    first = _session(plan, kind, "own")
    batches = list(first.loader(samples(), shuffle=False))[: STEPS // 2]
    losses = [first.step(batch).loss for batch in batches]
    first.save(Path(folder))
    second = _session(then, kind, "own")
    second.load(Path(folder))
    losses += [second.step(batch).loss for batch in second.loader(samples(), shuffle=False, first_step=second.steps)]
    return losses, second.parameters_full()
