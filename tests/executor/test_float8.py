"""fp8: the matrices of the blocks are torchao's, and whatever the layout they train as products written out by hand do."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from strategist import recommend
from strategist.document.plan import Plan
from strategist.errors import InputError
from strategist.executor.support import obstacles, require_packages
from tests.examples import by_night
from tests.plans import BFLOAT16, make_plan, tiny_gpt2, tiny_llama

BOUND = 1e-3
"""Of losses over six updates; those of bfloat16 are up to 5e-4 from those of fp8."""

LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "single": (tiny_llama, {"accumulation": 2, "recompute": "selective"}),
    "ddp2": (tiny_gpt2, {"dp_replicate": 2, "accumulation": 2}),
    "zero1": (tiny_llama, {"dp_shard": 2, "zero": 1, "compile": True}),
    "zero2": (tiny_llama, {"dp_shard": 2, "zero": 2, "recompute": "full"}),
    "zero3": (tiny_llama, {"dp_shard": 2, "zero": 3, "loss": "chunked"}),
    "zero3-compiled": (tiny_llama, {"dp_shard": 2, "zero": 3, "compile": True, "recompute": "selective"}),
    "hsdp": (tiny_gpt2, {"dp_replicate": 2, "dp_shard": 2, "zero": 3, "compile": True}),
    "cp2-ring": (tiny_llama, {"cp": 2, "context_parallel": "ring", "zero": 3, "compile": True}),
    "pp2": (tiny_gpt2, {"pp": 2, "accumulation": 4, "recompute": "full", "compile": True}),
    "pp2-fsdp2": (tiny_llama, {"pp": 2, "dp_shard": 2, "zero": 3, "accumulation": 2}),
    "offloaded": (tiny_llama, {"dp_shard": 2, "zero": 3, "offload": "parameters"}),
}


def plan_in_fp8(make: Any, layout: dict[str, Any]) -> Plan:
    """A plan of eight sequences a step."""
    plan = make_plan(make(), **layout, micro_batch=1, formats=BFLOAT16)
    batch = 8 // (plan.mesh.data_parallel * plan.strategy.accumulation)
    return replace(
        plan,
        strategy=replace(plan.strategy, micro_batch=batch),
        workload=replace(plan.workload, global_batch=8, precision="fp8"),
    )


def test_without_torchao_a_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lacks the package is told which extra brings it, and needs it for fp8 alone."""
    monkeypatch.setitem(sys.modules, "torchao", None)
    require_packages("Running", "full", "bf16")
    with pytest.raises(InputError) as refused:
        require_packages("Running", "full", "fp8")
    assert refused.value.code == "MISSING"
    assert "strategist[fp8]" in str(refused.value.hint)


def test_a_plan_in_fp8_is_compiled() -> None:
    """Only then are casts one kernel each, as the time model has them; bfloat16 is not compiled."""
    asked = {"model": "llama-3.1-8b", "hardware": "dgx-h100", "seq_len": 4096, "global_batch": 64}
    eight, sixteen = (recommend(**asked, precision=word, frontend="strategist") for word in ("fp8", "bf16"))
    assert (eight.strategy.compile, sixteen.strategy.compile) == (True, False)
    assert not obstacles(eight)
    assert eight.time.step.value < sixteen.time.step.value


@pytest.mark.slow
@pytest.mark.parametrize("name", by_night(LAYOUTS, ("hsdp", "pp2-fsdp2", "zero3-compiled")))
def test_training_in_fp8_is_that_of_one_process(name: str) -> None:
    """Losses of every rank are those of one process with products by hand, and weights are nearer to its than those are to weights
    of one that rounds nothing to a byte; ranks that share sequences have scales of their own parts."""
    from tests.executor.float8 import distance, reference, trained
    from tests.executor.harness import run_alone, run_ranks

    plan = plan_in_fp8(*LAYOUTS[name])
    expected, weights = run_alone(reference, plan)
    _, unrounded = run_alone(reference, plan, False)
    for losses, own in run_ranks(plan.mesh.world, trained, plan):
        assert losses == pytest.approx(expected, abs=BOUND, rel=0)
        assert plan.mesh.cp > 1 or distance(own, weights) < 0.5 * distance(weights, unrounded)
