"""Ray Train starts the emitted job, whose losses are those of one rank."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from tests.frameworks.jobs import EXECUTOR_CASES, executor_losses


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["ray"])
def test_ray_has_every_word_that_the_script_uses(target: str) -> None:
    """What the script tells Ray's classes are parameters of theirs."""
    words = {
        ScalingConfig: {"num_workers", "use_gpu", "resources_per_worker", "placement_strategy"},
        TorchConfig: {"backend"},
        TorchTrainer: {"torch_config", "scaling_config"},
    }
    for kind, names in words.items():
        assert names <= set(inspect.signature(kind).parameters)


@pytest.mark.proves("trained")
@pytest.mark.parametrize("target", ["ray"])
@pytest.mark.parametrize("choices", EXECUTOR_CASES, ids=str)
def test_losses_are_those_of_one_worker(target: str, choices: dict[str, Any], tmp_path: Path) -> None:
    """Two workers print what one prints."""
    alone, together = executor_losses(target, choices, tmp_path)
    assert together == pytest.approx(alone, rel=1e-4)
