"""Classifiers of images under data parallelism: what batch norms see is a micro-batch of one rank, and nothing else tells layouts apart."""

from __future__ import annotations

from typing import Any

import pytest

from strategist import load_model
from tests.executor.harness import run_alone, run_ranks
from tests.plans import FLOAT64, make_plan

pytestmark = pytest.mark.slow

LAYOUTS = (
    {"micro_batch": 4, "accumulation": 2},
    {"dp_replicate": 2, "micro_batch": 4},
    {"dp_replicate": 2, "micro_batch": 4, "recompute": "full"},
    {"dp_shard": 2, "zero": 1, "micro_batch": 4},
    {"dp_shard": 2, "zero": 3, "micro_batch": 4},
    {"dp_shard": 2, "zero": 3, "micro_batch": 4, "recompute": "selective"},
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_losses_of_a_resnet_are_those_of_its_micro_batches_in_one_process(layout: dict[str, Any]) -> None:
    """Two ranks with four images each lose what one process does with two micro-batches of four: in float64, to the last bits. Batch
    norms take their statistics from a micro-batch, so that nothing is said about eight images at once."""
    from tests.executor.images import losses, losses_by_hand

    plan = make_plan(load_model("resnet50"), seq_len=1, formats=FLOAT64, **layout)
    expected = run_alone(losses_by_hand, 4)
    for found in run_ranks(plan.mesh.world, losses, plan):
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "layout", [{"dp_replicate": 2, "micro_batch": 4}, {"dp_shard": 2, "zero": 3, "micro_batch": 4}], ids=["ddp", "fsdp"]
)
def test_images_lie_channels_last_as_plans_take_them(layout: dict[str, Any]) -> None:
    """A data set gives images channels first, in which convolutions of an H200 take 1.9 times as long (benchmarks/device/rows): every
    convolution of a step reads and writes channels last."""
    from tests.executor.images import channels_last

    plan = make_plan(load_model("resnet50"), seq_len=1, formats=FLOAT64, **layout)
    for last, count in run_ranks(plan.mesh.world, channels_last, plan):
        assert last == count > 20
