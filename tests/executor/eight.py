"""AdamW with moments in eight bits, said once more: under a plan's layout by the executor, and in one process from the paper."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategist.document.plan import Plan
from strategist.executor.build import build
from strategist.executor.data import SyntheticTokens
from strategist.executor.initialise import initialise
from strategist.executor.models import model_from_shape
from strategist.executor.optimizers import BETAS, WEIGHT_DECAY, default_optimizer
from strategist.facts.model import ModelShape

STEPS, BATCH, SEQ_LEN, LEARNING_RATE, EPSILON = 20, 8, 16, 3e-3, 1e-8


def trained(plan: Plan, learning_rate: float = LEARNING_RATE) -> list[float]:
    """Losses under the plan's layout."""
    session = build(plan, model_from_shape(plan.model), default_optimizer(plan, learning_rate))
    samples = SyntheticTokens(plan.model.vocab, SEQ_LEN, STEPS * BATCH)
    return [session.step(batch).loss for batch in session.loader(samples, shuffle=False)]


@cache
def trained_alone(shape: ModelShape, shards: int | None) -> list[float]:
    """Losses of one process in float32; every weight is cut into `shards` runs of rows, whose blocks know nothing of each other.
    Without `shards`, torch's own AdamW keeps its moments in float32."""
    model = model_from_shape(shape, "cpu")
    initialise(model, 0)
    return losses_of(model, shape, torchs(model) if shards is None else _ours(model, shards))


def losses_of(model: nn.Module, shape: ModelShape, update: Callable[[], object]) -> list[float]:
    """Losses of one process that trains a model with `update` after each backward."""
    samples = SyntheticTokens(shape.vocab, SEQ_LEN, STEPS * BATCH)
    losses = []
    for step in range(STEPS):
        chosen = [samples[i] for i in range(step * BATCH, (step + 1) * BATCH)]
        inputs, labels = (torch.stack([s[name] for s in chosen]) for name in ("input_ids", "labels"))
        loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), labels.flatten())
        loss.backward()
        update()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def torchs(model: nn.Module, learning_rate: float = LEARNING_RATE) -> Callable[[], object]:
    """torch's own AdamW on what is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY).step


def _ours(model: nn.Module, shards: int) -> Callable[[], None]:
    kept: dict[tuple[int, int, bool], Tensor] = {}
    steps = iter(range(1, STEPS + 1))

    @torch.no_grad()
    def update() -> None:
        step = next(steps)
        for number, weight in enumerate(model.parameters()):
            for part, gradient in zip(weight.chunk(shards), weight.grad.chunk(shards), strict=True):  # type: ignore[union-attr]
                keys = [(number, part.storage_offset(), signed) for signed in (True, False)]
                first, second = (kept.get(key, torch.zeros_like(part)) for key in keys)
                first = BETAS[0] * first + (1 - BETAS[0]) * gradient
                second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
                kept.update(
                    (key, rounded(value, signed=key[2])) for key, value in zip(keys, (first, second), strict=True)
                )
                root = (second / (1 - BETAS[1] ** step)).sqrt() + EPSILON
                part *= 1 - LEARNING_RATE * WEIGHT_DECAY
                part -= LEARNING_RATE * (first / (1 - BETAS[0] ** step)) / root

    return update


def rounded(numbers: Tensor, *, signed: bool) -> Tensor:
    """What eight bits keep of some numbers: of each block of 256 in a row, the nearest value of the table times the largest."""
    table = paper_table(signed)
    blocks = []
    for block in numbers.flatten().split(256):
        largest = block.abs().max()
        shares = block.double() / (largest.double() if largest > 0 else 1.0)
        nearest = (shares[:, None] - table.double()[None, :]).abs().argmin(dim=1)
        blocks.append(table[nearest] * largest)
    return torch.cat(blocks).view_as(numbers)


@cache
def paper_table(signed: bool) -> Tensor:
    """The data type bit by bit (arXiv 2110.02861, section 2.2, figure 2): a sign, zeros that count powers of ten, a one that
    ends them, and a fraction; the byte of zeros is 0, and one value that is left over is 1."""
    bits = 7 if signed else 8
    values = {0.0, 1.0}
    for byte in range(1 if signed else 2, 2**bits):  # minus zero, or the unsigned byte 1, is the one that is left over
        fraction_bits = byte.bit_length() - 1
        share = 0.1 + 0.9 * (byte - 2**fraction_bits + 0.5) / 2**fraction_bits
        power = 10.0 ** -(bits - 1 - fraction_bits)
        values |= {sign * share * power for sign in ((1, -1) if signed else (1,))}
    return torch.tensor(sorted(values), dtype=torch.float32)
