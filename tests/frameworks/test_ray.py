"""Ray Train starts the emitted job, whose losses are those of one rank."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from strategist.readers.foreign import keys_of
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


@pytest.mark.parametrize("kind", [ScalingConfig, TorchConfig])
def test_our_table_of_ray_is_its_classes(kind: type) -> None:
    """The words that we know are the parameters of Ray's classes."""
    assert set(keys_of("ray", kind.__name__)) == set(inspect.signature(kind).parameters)


def test_ray_refuses_devices_that_are_not_used() -> None:
    """Workers that ask for devices and do not use them are an error of Ray's, as our trap says."""
    with pytest.raises(ValueError, match="use_gpu"):
        ScalingConfig(num_workers=1, resources_per_worker={"GPU": 1})


@pytest.mark.proves("trained")
@pytest.mark.parametrize("target", ["ray"])
def test_losses_are_those_of_one_rank(target: str, losses_of_one_rank: list[float], tmp_path: Path) -> None:
    """Two workers print what one rank prints."""
    assert trained(tmp_path, target, executor_plan(FSDP), WORDS) == pytest.approx(losses_of_one_rank, rel=1e-4)
