"""torchtitan's own parser takes every flag that the emitted script hands it, and refuses one that it does not know."""

from __future__ import annotations

import dataclasses
import json
import runpy
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from strategist.readers.foreign import keys_of
from tests.emitters.grid import distinct, written


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["torchtitan"])
def test_torchtitan_takes_every_flag(target: str, tmp_path: Path, clean_environment: pytest.MonkeyPatch) -> None:
    """The emitted script hands torchtitan's parser flags that it takes at the plan's number of ranks, with the plan's values."""
    from torchtitan import train
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    found: list[Any] = []
    clean_environment.setattr(train, "main", lambda: found.append(ConfigManager().parse_args()))
    for text, world in distinct(target, "torchtitan.json"):
        flags = json.loads(text)["flags"]
        experts = flags["parallelism.expert_parallel_degree"] > 1
        clean_environment.setattr(sys, "argv", ["train.py", *model_of_torchtitan(experts)])
        run_emitted(tmp_path, target, text)
        read = found.pop()
        assert {name: attrgetter(name)(read) for name in flags} == flags
        ParallelDims.from_config(read.parallelism, world)
        kind = type(read.activation_checkpoint).__qualname__.partition(".")[0]
        assert kind == {"full": "FullAC", "none": "NoneType"}[json.loads(text)["activation-checkpoint"]]


def model_of_torchtitan(experts: bool) -> list[str]:
    """Words that name a small model of torchtitan's registry."""
    name = "qwen3_moe_debug" if experts else "llama3_debugmodel"
    return ["--module", "qwen3" if experts else "llama3", "--config", name]


def run_emitted(folder: Path, target: str, text: str) -> None:
    """Run the emitted train.py beside one of its configuration files."""
    files = next(files for _, files in written(target))
    (folder / "torchtitan.json").write_text(text, encoding="utf-8")
    (folder / "train.py").write_text(files[PurePosixPath("train.py")], encoding="utf-8")
    runpy.run_path(str(folder / "train.py"), run_name="__main__")


def test_torchtitan_refuses_a_misspelt_flag(clean_environment: pytest.MonkeyPatch) -> None:
    """The parser that takes our flags refuses one that it does not know."""
    from torchtitan.config import ConfigManager

    with pytest.raises(SystemExit):
        ConfigManager().parse_args([*model_of_torchtitan(experts=False), "--training.local_batch_sise", "8"])


def test_our_table_of_torchtitan_is_its_configuration() -> None:
    """The flags that we know are the fields of the configuration of a model of its registry."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    assert set(keys_of("torchtitan")) == set(flags_of(llama3_debugmodel()))


def flags_of(configuration: Any, prefix: str = "") -> Iterator[str]:
    """Flags by section and key of a configuration; the model and the sub-command are no flags."""
    for field in dataclasses.fields(configuration):
        value = getattr(configuration, field.name)
        if field.name not in ("model_spec", "activation_checkpoint"):
            yield from (
                flags_of(value, f"{prefix}{field.name}.") if dataclasses.is_dataclass(value) else [prefix + field.name]
            )
