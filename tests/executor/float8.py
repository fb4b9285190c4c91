"""Training in fp8: under a plan's layout, and in one process whose products are written out by hand."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategist.document.plan import Plan
from strategist.executor.build import build
from strategist.executor.data import SyntheticTokens
from strategist.executor.initialise import initialise
from strategist.executor.job import Instruments
from strategist.executor.models import model_from_shape
from strategist.executor.optimizers import default_optimizer

STEPS, BATCH, CLIP, LEARNING_RATE = 6, 8, 0.5, 1e-3


def _samples(plan: Plan) -> SyntheticTokens:
    return SyntheticTokens(plan.model.vocab, plan.workload.seq_len, STEPS * BATCH)


def trained(plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights under the plan's layout."""
    session = build(
        plan,
        model_from_shape(plan.model),
        default_optimizer(plan, LEARNING_RATE),
        clip_norm=CLIP,
        instruments=Instruments(compile_backend="aot_eager"),
    )
    losses = [session.step(batch).loss for batch in session.loader(_samples(plan), shuffle=False)]
    return losses, session.parameters_full()


def reference(plan: Plan, rounds: bool = True) -> tuple[list[float], dict[str, Tensor]]:
    """The same in one process: bfloat16 but for the matrices of the layers, which round what they read to a byte unless told
    not to; every micro-batch for itself, as its scales are its own."""
    model = model_from_shape(plan.model, "cpu")
    initialise(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    samples, size = _samples(plan), plan.strategy.micro_batch
    losses = []
    for step in range(STEPS):
        total = 0.0
        for first in range(step * BATCH, (step + 1) * BATCH, size):
            chosen = [samples[number] for number in range(first, first + size)]
            inputs, labels = (torch.stack([s[name] for s in chosen]) for name in ("input_ids", "labels"))
            lowered = _lowered(model, rounds)
            loss = F.cross_entropy(lowered(inputs).float().flatten(0, 1), labels.flatten()) * size / BATCH
            loss.backward()
            _take_over(model, lowered)
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Euclidean, over all weights."""
    return sum(float((one[name].float() - other[name].float()).norm() ** 2) for name in one) ** 0.5


def _lowered(model: nn.Module, rounds: bool) -> nn.Module:
    """A copy of the model in bfloat16 whose layers multiply bytes."""
    lowered = copy.deepcopy(model).to(torch.bfloat16)
    for parameter in lowered.parameters():
        parameter.grad = None
    for module in lowered.layers.modules() if rounds else ():  # type: ignore[union-attr]
        if isinstance(module, nn.Linear):
            module.__class__ = ByHand
    return lowered


def _take_over(model: nn.Module, lowered: nn.Module) -> None:
    """Add the copy's gradients to the model's, in float32."""
    for own, other in zip(model.parameters(), lowered.parameters(), strict=True):
        gradient = other.grad.float() if other.grad is not None else torch.zeros_like(own)
        own.grad = gradient if own.grad is None else own.grad + gradient


class ByHand(nn.Linear):
    """A linear layer whose three products see rounded tensors."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., inputs) to (..., outputs)."""
        given: Any = Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return given if self.bias is None else given + self.bias  # type: ignore[no-any-return]


class Product(torch.autograd.Function):
    """x W^T and its gradients in float32, of numbers that a byte can hold times one scale per tensor (Micikevicius et al. 2022, arXiv
    2209.05433): e4m3 up to 448 for what forward reads, e5m2 up to 57,344 for gradients."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        """The product in the format of x."""
        context.save_for_backward(x, weight)
        return (rounded(x) @ rounded(weight).T).to(x.dtype)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x and of the weight."""
        x, weight = context.saved_tensors
        given = rounded(gradients[0], torch.float8_e5m2)
        flat = rounded(x).flatten(0, -2)
        return (given @ rounded(weight)).to(x.dtype), (given.flatten(0, -2).T @ flat).to(weight.dtype)


def rounded(x: Tensor, byte: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """The tensor in float32, each element one that the byte can hold at the tensor's scale."""
    most = torch.finfo(byte).max
    scale = most / x.abs().max().double().clamp(min=1e-12)
    scaled = (x.float() * scale.float()).clamp(-most, most)
    return scaled.to(byte).float() / scale.float()
