"""Megatron-Bridge's own validation takes the container that every emitted recipe fills, with the plan's layout in it.

What it imports for GPUs alone is stood in for: its configuration uses none of it.
"""

from __future__ import annotations

import json
import runpy
from argparse import Namespace
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from strategist.readers.foreign import keys_of
from tests.emitters.grid import each_once, written
from tests.frameworks.jobs import as_the_script_sets_it
from tests.frameworks.stand_ins.sitecustomize import stand_in

stand_in("transformer_engine", "flash_attn", "nvtx", "modelopt", "tensorstore", "nvidia_resiliency_ext", "torchvision")
from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: E402
from megatron.bridge.training import config  # noqa: E402
from megatron.bridge.training.config import ConfigContainer, runtime_config_update  # noqa: E402
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig  # noqa: E402

SECTIONS = {
    "model": GPTModelProvider, "train": config.TrainingConfig, "optimizer": config.OptimizerConfig,
    "ddp": config.DistributedDataParallelConfig, "scheduler": config.SchedulerConfig, "checkpoint": config.CheckpointConfig,
    "mixed_precision": MixedPrecisionConfig, "dist": config.DistributedInitConfig, "rng": config.RNGConfig,
}  # fmt: skip
"""The classes of the container's sections whose keys our reader knows."""

OPTIONS = Namespace(data=None, tokenizer=None, steps=4, seed=1, learning_rate=3e-4)


def filled(folder: Path, files: dict[PurePosixPath, str]) -> Any:
    """The container that the emitted recipe makes."""
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return runpy.run_path(str(folder / "train.py"))["recipe"](OPTIONS)


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["megatron-bridge"])
def test_megatron_bridge_takes_every_recipe(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the plan's number of ranks each container passes its validation and keeps the plan's choices."""
    plans = tuple(each_once(target, "megatron_bridge.json"))
    assert len(plans) > 20
    for plan, files in plans:
        as_the_script_sets_it(monkeypatch, files[PurePosixPath("launch.sh")], plan.mesh.world)
        container = filled(tmp_path, dict(files))
        runtime_config_update(container)
        choices = json.loads(files[PurePosixPath("megatron_bridge.json")])
        assert container.data_parallel_size == plan.mesh.data_parallel
        kept = {name: getattr(container.model, name) for name in choices["model"]}
        assert kept == choices["model"]
        assert (container.model.bf16, container.model.fp16) == tuple(
            choices["mixed_precision"].get(name, False) for name in ("bf16", "fp16")
        )


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["megatron-bridge"])
@pytest.mark.parametrize(
    ("section", "wrong"),
    [("model", {"hiden_size": 8}), ("train", {"micro_bach_size": 1}), ("model", {"tensor_model_parallel_size": 3})],
    ids=str,
)
def test_megatron_bridge_refuses_what_is_wrong(
    target: str, section: str, wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classes and the validation that take our recipes refuse a misspelt name, and a layout that does not divide."""
    plan, files = next(written(target))
    as_the_script_sets_it(monkeypatch, files[PurePosixPath("launch.sh")], plan.mesh.world)
    document = json.loads(files[PurePosixPath("megatron_bridge.json")])
    document[section] |= wrong
    changed = dict(files) | {PurePosixPath("megatron_bridge.json"): json.dumps(document)}
    with pytest.raises((TypeError, ValueError, AssertionError)):
        runtime_config_update(filled(tmp_path, changed))


def names(kind: Any) -> set[str]:
    """The fields of a class that a file can set."""
    return {field.name for field in fields(kind) if field.init and not field.name.startswith("_")}


def test_our_table_of_megatron_bridge_is_its_classes() -> None:
    """The keys of the container and of its sections are the fields of its classes."""
    assert set(keys_of("megatron-bridge")) == names(ConfigContainer)
    for section, kind in SECTIONS.items():
        assert set(keys_of("megatron-bridge", section)) == names(kind), section
