"""A small ResNet of transformers and what ranks do with it: a network in stages, with batch norms, whose samples have one label each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

from strategist import build
from strategist.document.plan import Plan

IMAGES, CLASSES, STEPS = 8, 5, 3


class Classifier(nn.Module):
    """Images (B, 3, 32, 32) to logits (B, 5)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"embedding_size": 8, "hidden_sizes": [16, 32, 64], "depths": [1, 4, 2], "num_labels": CLASSES}
        self.net = ResNetForImageClassification(ResNetConfig(**sizes))

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.net(pixel_values=pixel_values).logits
        return logits


def samples() -> dict[str, Tensor]:
    """A global batch, the same in every step."""
    torch.manual_seed(1)
    images = torch.randn(IMAGES, 3, 32, 32, dtype=torch.float64)
    return {"pixel_values": images, "labels": torch.randint(0, CLASSES, (IMAGES,))}


def losses(plan: Plan) -> list[float]:
    """What a rank reports of each step, in float64."""
    session = build(plan, Classifier().double(), lambda weights: torch.optim.SGD(weights, lr=0.01))
    share = session.share
    mine = {name: value[share.first : share.first + share.size] for name, value in samples().items()}
    return [session.step(mine).loss for _ in range(STEPS)]


def channels_last(plan: Plan) -> tuple[int, int]:
    """How many convolutions of a step read and write channels last, and how many there are."""
    session, seen = build(plan, Classifier().double(), lambda weights: torch.optim.SGD(weights, lr=0.01)), []

    def watch(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(all(each.is_contiguous(memory_format=torch.channels_last) for each in (*inputs, output)))

    for module in session.parts.model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(watch)
    share = session.share
    session.step({name: value[share.first : share.first + share.size] for name, value in samples().items()})
    return sum(seen), len(seen)


def losses_by_hand(micro_batch: int) -> list[float]:
    """The same from a plain loop over micro-batches of so many images, each of which has its own statistics."""
    model, batch, found = Classifier().double(), samples(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        total = 0.0
        for images, labels in zip(
            batch["pixel_values"].split(micro_batch), batch["labels"].split(micro_batch), strict=True
        ):
            loss = nn.functional.cross_entropy(model(images), labels, reduction="sum") / IMAGES
            loss.backward()
            total += float(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found
