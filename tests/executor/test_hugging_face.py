"""Hugging Face's Llama, Mistral, Qwen2 and Qwen3 train under tensor and pipeline parallelism as in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plans import make_plan, tiny_llama

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2, "micro_batch": 2, "accumulation": 2},
    "zero3": {"dp_shard": 2, "zero": 3, "micro_batch": 4, "recompute": "full"},
    "tp": {"tp": 2, "micro_batch": 8, "recompute": "selective"},
    "pp": {"pp": 2, "micro_batch": 2, "accumulation": 4},
    "zero3-tp": {"dp_shard": 2, "zero": 3, "tp": 2, "micro_batch": 4},
    "pp-v2": {"pp": 2, "virtual_stages": 2, "micro_batch": 2, "accumulation": 4},
    "zero3-offload": {"dp_shard": 2, "zero": 3, "micro_batch": 4, "offload": "parameters"},
    "pp-tp-ddp": {"pp": 2, "dp_replicate": 2, "tp": 2, "micro_batch": 2, "accumulation": 2},
}
CASES = [("llama", False, name) for name in LAYOUTS]
CASES += [("llama", True, "pp-tp-ddp"), ("qwen3", True, "zero3-tp"), ("qwen3", False, "pp"), ("llama", True, "pp-v2")]
CASES += [("qwen2", False, "tp"), ("qwen2", True, "pp"), ("mistral", False, "zero3-tp")]


@pytest.mark.parametrize(("family", "tied", "layout"), CASES)
def test_hugging_face_models_train_as_in_one_process(family: str, tied: bool, layout: str) -> None:
    """Losses and final parameters equal plain torch on one process, with every name as transformers has it."""
    from tests.executor.harness import run_alone, run_ranks
    from tests.executor.hugging_face import LAYERS, train_alone, train_tiny

    losses, parameters = run_alone(train_alone, family, tied)
    plan = make_plan(tiny_llama(layers=LAYERS), **LAYOUTS[layout])
    for got_losses, got_parameters in run_ranks(plan.mesh.world, train_tiny, plan, family, tied):
        assert got_losses == pytest.approx(losses, abs=1e-12, rel=0)
        assert got_parameters.keys() == parameters.keys()
        assert max(float((got_parameters[n] - p).abs().max()) for n, p in parameters.items()) <= 1e-9
