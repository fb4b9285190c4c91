"""ResNets down the ladder: the formulas against the program of transformers' own model under our executor, traced."""

from __future__ import annotations

from typing import Any

import pytest

from strategist import load_model, recommend
from strategist.document.observed import RankObservation
from strategist.document.plan import Plan
from strategist.facts.convolutions import blocks
from strategist.measure.kinds import Kind
from tests.executor.harness import run_alone

pytestmark = pytest.mark.slow

DEPTHS = [3, 4, 6, 3]
NEAR = 0.07
"""The program is given token ids in place of images, so that it holds an image less; roots of units are counted with the first block."""


def _network() -> Any:
    """The model as a language model would be called: it makes its images itself, in the format of its first weight."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    class OfTokens(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = ResNetForImageClassification(ResNetConfig(depths=DEPTHS, num_labels=1000))

        def forward(self, input_ids: torch.Tensor, **_more: Any) -> torch.Tensor:
            first = self.net.resnet.embedder.embedder.convolution.weight
            blank = torch.zeros(len(input_ids), 3, 224, 224, device=input_ids.device, dtype=first.dtype)
            logits: torch.Tensor = self.net(pixel_values=blank + input_ids.view(-1, 1, 1, 1).to(first.dtype)).logits
            return logits.unsqueeze(1).clone()  # no view: units of FSDP2 hang their hooks on it

    return OfTokens()


def _seen(plan: Plan) -> RankObservation:
    from strategist.measure.models import made_model
    from strategist.measure.trace_rank import trace_rank

    return trace_rank(plan, Kind("rank 0", 0, 0), made_model(_network))


@pytest.mark.parametrize(
    "pin",
    [
        "dp_replicate=8",
        "dp_replicate=8,recompute=selective",
        "dp_replicate=8,recompute=full",
        pytest.param("dp_shard=8,zero=1", marks=pytest.mark.nightly),
        pytest.param("dp_shard=8,zero=3", marks=pytest.mark.nightly),
        "dp_shard=8,zero=3,recompute=full",
    ],
)
def test_memory_of_a_resnet_is_that_of_its_program(pin: str) -> None:
    """Peak tensor bytes of transformers' ResNet-50 in bfloat16, and the bytes that it sends."""
    plan = recommend("resnet50", "dgx-a100-80gb", global_batch=512, pin=f"micro_batch=32,{pin}")
    seen: RankObservation = run_alone(_seen, plan, timeout_s=300.0)
    tensors = sum(t.bytes for t in plan.memory.worst.terms if t.name not in ("runtime", "slack"))
    assert tensors == pytest.approx(seen.memory.peak.allocated, rel=NEAR)


def test_products_of_a_resnet_are_those_of_its_program() -> None:
    """Six FLOP per weight and position of each image, but for the gradient of the image, which nobody asks for."""
    plan = recommend("resnet50", "dgx-a100-80gb", global_batch=256, pin="micro_batch=32,dp_replicate=8")
    seen: RankObservation = run_alone(_seen, plan, timeout_s=300.0)
    shape = load_model("resnet50")
    weights = sum(c.positions * c.matrix.weights for block in blocks(shape.extra) for c in block.convolutions)
    stem = blocks(shape.extra)[0].stem[0]
    per_image = 6 * (weights + 2048 * 1000) - 2 * stem.positions * stem.matrix.weights
    assert sum(operator.FLOP for operator in seen.operators) == 32 * per_image
