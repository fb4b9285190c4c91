"""Ray Train starts the emitted job, whose losses are those of one rank."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from tests.frameworks.jobs import FSDP, WORDS, executor_plan, trained


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
def test_losses_are_those_of_one_rank(target: str, losses_of_one_rank: list[float], tmp_path: Path) -> None:
    """Two workers print what one rank prints."""
    assert trained(tmp_path, target, executor_plan(FSDP), WORDS) == pytest.approx(losses_of_one_rank, rel=1e-4)
