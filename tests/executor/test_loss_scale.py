"""float16: the loss is scaled, steps whose gradients overflow change nothing, and all ranks decide alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strategist.document.plan import NumberFormats
from strategist.executor.loss_scale import FIRST, INTERVAL, LEAST, LossScale
from tests.plans import make_plan, tiny_gpt2, tiny_llama, tiny_mixtral

FLOAT16 = NumberFormats(parameter="float32", gradient="float32", reduce="float32", compute="float16")
BOUND = 5e-3
"""Of losses in half precision over five updates; a gradient that was not divided by the scale is off by more at once."""


@pytest.mark.slow
def test_the_scale_follows_torchs_own_scaler() -> None:
    """Halved by an overflow and doubled after an interval without any, as torch.amp.GradScaler does it, step by step."""
    import torch

    ours, theirs = LossScale(interval=3), torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    assert theirs.get_scale() == FIRST
    assert theirs.get_growth_interval() != INTERVAL == torch.amp.GradScaler("cpu").get_growth_interval()
    for is_finite in (True, True, False, True, True, True, True, False, False, True, True, True):
        theirs.scale(torch.zeros(()))
        weight.grad = torch.ones(1) if is_finite else torch.full((1,), float("inf"))
        theirs.step(optimizer)
        theirs.update()
        (ours.went_well if is_finite else ours.overflowed)()
        assert ours.value == theirs.get_scale()


def test_a_scale_of_one_cannot_help() -> None:
    """At the least scale an overflow is the gradients' own."""
    scale = LossScale(value=2 * LEAST)
    assert scale.can_shrink
    scale.overflowed()
    assert not scale.can_shrink


LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "single": (tiny_llama, {"accumulation": 2, "recompute": "selective"}),
    "ddp2": (tiny_llama, {"dp_replicate": 2}),
    "fsdp4": (tiny_llama, {"dp_shard": 4, "zero": 3, "recompute": "full"}),
    "zero1": (tiny_gpt2, {"dp_shard": 2, "zero": 1}),
    "tp2": (tiny_llama, {"tp": 2, "sequence_parallel": True, "accumulation": 2}),
    "pp2-fsdp2": (tiny_gpt2, {"pp": 2, "dp_shard": 2, "zero": 2, "accumulation": 2}),
    "cp2": (tiny_mixtral, {"cp": 2, "context_parallel": "ring"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_in_float16_is_that_of_one_process(name: str) -> None:
    """Every rank passes over the step that one process under autocast with torch's own scaler passes over, changes no weight
    in it, has the same scale behind it, and the same losses but for rounding."""
    from tests.executor.half import reference, trained
    from tests.executor.harness import run_alone, run_ranks

    make, layout = LAYOUTS[name]
    plan = make_plan(make(), **layout, micro_batch=1, formats=FLOAT16)
    batch = 8 // (plan.mesh.data_parallel * plan.strategy.accumulation)
    plan = replace(
        plan,
        strategy=replace(plan.strategy, micro_batch=batch),
        workload=replace(plan.workload, global_batch=8, precision="fp16"),
    )
    losses, done, scale = run_alone(reference, plan)
    assert done.count(False) == 1
    for got_losses, got_done, got_scale in run_ranks(plan.mesh.world, trained, plan):
        assert (got_done, got_scale) == (done, scale)
        assert got_losses == pytest.approx(losses, abs=BOUND, rel=0)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_no_matter_of_scale() -> None:
    """A NaN in one rank's weights stops every rank, in float16 as otherwise."""
    from tests.executor.harness import run_ranks
    from tests.executor.workers import refusal

    plan = make_plan(dp_replicate=2, micro_batch=4, formats=FLOAT16)
    for code, said, _ in run_ranks(2, refusal, plan, "poison"):
        assert code == "TRAINING"
        assert "loss nan" in said
