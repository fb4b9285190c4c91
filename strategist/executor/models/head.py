"""The output head: logits of hidden states, or their summed loss a few tokens at a time.

The second has logits of one chunk of tokens only, and works its own gradient out while it has them (Hsu et al. 2024, Liger
Kernel, arXiv 2410.10989, section 3.2, fused linear cross entropy). What stands until backward is the gradient of the hidden
states, which takes the place of the states themselves, and that of the head's weight.
Shapes: N tokens, H model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from strategist.executor.loss import IGNORED
from strategist.facts.model import loss_chunk


class Head(nn.Linear):
    """Hidden states (..., H) to logits (..., V); given labels (...), to the loss summed over those that count, a number."""

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Nothing is summed where no labels are given."""
        if labels is None:
            return super().forward(hidden)
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        total: Tensor = ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, -2), self.weight.to(hidden.dtype), bias, labels.flatten()
        )
        return total


class ChunkedLoss(torch.autograd.Function):
    """Cross entropy of a linear head, added up over the tokens that count, in at least float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        """Hidden states (N, H), weight (V, H), bias (V,), labels (N,); a 0-dim tensor."""
        inputs = (hidden, weight, bias)
        gradients = [
            torch.zeros_like(each) if each is not None and wanted else None
            for each, wanted in zip(inputs, ctx.needs_input_grad[:3], strict=True)
        ]
        chunk = int(loss_chunk(len(hidden), weight.shape[1], weight.shape[0]))
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, len(hidden), chunk):
                span = slice(first, first + chunk)
                into = (None if gradients[0] is None else gradients[0][span], *gradients[1:])
                total += _summed(hidden[span], weight, bias, labels[span], into)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """What forward worked out, times the gradient of the sum; in place, because nobody else sees it."""
        (scale,) = outer
        return *(None if each is None else each.mul_(scale) for each in ctx.saved_tensors), None


Gradients = tuple[Tensor | None, ...]


def _summed(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, into: Gradients) -> Tensor:
    """The summed loss of one chunk; its gradients are written `into` those of hidden states, weight and bias."""
    chances = _log_probabilities(hidden, weight, bias)
    total = nn.functional.nll_loss(chances, labels, ignore_index=IGNORED, reduction="sum")
    if any(each is not None for each in into):
        _write(_of_logits(chances, labels).to(hidden.dtype), hidden, weight, into)
    return total


def _log_probabilities(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(N, V), in at least float32."""
    logits = nn.functional.linear(hidden, weight, bias)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    del logits
    return wide.log_softmax(-1)


def _of_logits(chances: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the summed loss in the logits, in the place of the log-probabilities: probabilities, less one at the label;
    zeros for tokens that do not count."""
    counts = labels != IGNORED
    places = labels.where(counts, 0)[:, None]
    chances.exp_().scatter_add_(1, places, -torch.ones_like(places, dtype=chances.dtype))
    return chances.mul_(counts[:, None])


def _write(of_logits: Tensor, hidden: Tensor, weight: Tensor, into: Gradients) -> None:
    of_hidden, of_weight, of_bias = into
    if of_hidden is not None:
        torch.mm(of_logits, weight, out=of_hidden)
    if of_weight is not None:
        of_weight.addmm_(of_logits.T, hidden)
    if of_bias is not None:
        of_bias.add_(of_logits.sum(0))
