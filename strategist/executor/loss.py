"""The loss of a step, weighted by tokens.

A step's loss is the sum over all counted tokens of the global batch divided by their number, whatever the split into
micro-batches and ranks. Means of means would weigh a token in a short sequence more than one in a long sequence.
Labels equal to IGNORED are not counted. `labels[b, t]` is what the model should say at position t: for a language
model the token after `input_ids[b, : t + 1]`, so labels are already shifted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strategist.errors import InputError
from strategist.records import dataclass

Batch = Mapping[str, Tensor]
LossFn = Callable[[Any, Batch], Tensor]

IGNORED = -100


def count_tokens(batch: Batch) -> Tensor:
    """How many labels count; sequences when the batch has no labels. A 0-dim integer tensor."""
    labels = batch.get("labels")
    if labels is None:
        first = next(iter(batch.values()))
        return torch.tensor(first.shape[0], device=first.device)
    return (labels != IGNORED).sum()


def summed_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy added up over the counted tokens, in at least float32. Logits (B, T, V), labels (B, T); of a classifier of
    whole samples (B, V) and (B,)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = nn.functional.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total.to_local() if isinstance(total, DTensor) else total


def logits_of(outputs: Any) -> Tensor:
    """The logits in what a model gives: the tensor itself, or its `logits` as Hugging Face models have them."""
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
    return logits


def only_input(batch: Batch) -> Tensor:
    """What a module takes that is given one tensor, whatever it calls it: tokens, or the one beside the labels. Raises InputError CHOICE
    where there are several."""
    if "input_ids" in batch:
        return batch["input_ids"]
    names = [name for name in batch if name != "labels"]
    if len(names) != 1:
        raise InputError(
            "CHOICE",
            f"A Sequential, as each stage of a pipeline, takes one tensor; beside the labels the batch has {', '.join(names) or 'none'}.",
            flag="batch",
            value=len(names),
            hint="Give samples with one tensor beside labels.",
        )
    return batch[names[0]]


def own_loss(outputs: Any, _batch: Batch) -> Tensor:
    """The loss that the model computed itself. With this loss function the model is given the labels, in its own sense."""
    loss: Tensor = outputs.loss
    return loss


@dataclass(frozen=True, slots=True)
class Objective:
    """How a model is called and what its loss is.

    The model is called with the tensors of the batch by name, one that `takes_one` with the only one beside the labels. Without `mean_loss` it gives logits and the token loss
    applies; `mean_loss(outputs, batch)` gives the mean over the counted items of one micro-batch instead. Where the loss is
    `chunked`, the model is given the labels and sums it up itself.
    """

    mean_loss: LossFn | None = None
    chunked: bool = False
    takes_one: bool = False

    def summed(self, model: nn.Module, batch: Batch) -> Tensor:
        """Loss of one micro-batch, added up over its counted tokens."""
        takes_labels = self.chunked or self.mean_loss is own_loss
        inputs = {name: value for name, value in batch.items() if name != "labels" or takes_labels}
        outputs = model(only_input(inputs)) if self.takes_one else model(**inputs)
        if self.chunked:
            total: Tensor = outputs
            return total
        if self.mean_loss is None:
            return summed_token_loss(logits_of(outputs), batch["labels"])
        return self.mean_loss(outputs, batch) * count_tokens(batch)
