"""llm-foundry's own loader takes every file and makes its TrainConfig, and Composer the section of FSDP in it.

The package's own start imports what needs an older torch, so that its loader is taken without it.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

from strategist.readers.foreign import keys_of
from tests.emitters.grid import distinct
from tests.frameworks.stand_ins.sitecustomize import StandIn, stand_in
from tests.frameworks.test_frozen_composer import check_section

PACKAGES = ("llmfoundry", "llmfoundry.utils")
UNUSED = ("llmfoundry.models", "llmfoundry.models.utils")
"""What the loader imports for other functions, and what of it needs an older torch."""
stand_in("mlflow")

TOLD = ("model.pretrained_model_name_or_path=llama", "tokenizer.name=llama", "train_loader.dataset.local=data")
"""What the command adds to the file."""


@pytest.fixture(scope="module")
def loader() -> Any:
    """llmfoundry.utils.config_utils, of whose packages only the folders are made known."""
    spec = find_spec("llmfoundry")
    assert spec is not None and spec.submodule_search_locations is not None
    (root,) = spec.submodule_search_locations
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(Path(root, *name.split(".")[1:]))]
        sys.modules[name] = package
    sys.modules |= {name: StandIn(name) for name in UNUSED}
    from llmfoundry.utils import config_utils

    return config_utils


def made(loader: Any, text: str, words: tuple[str, ...] = ()) -> tuple[dict[str, Any], Any]:
    """What its training command makes of a file and words: the batch by its own arithmetic, then the class."""
    document = OmegaConf.merge(OmegaConf.create(text), OmegaConf.from_cli([*TOLD, *words]))
    return loader.make_dataclass_and_log_config(
        document, loader.TrainConfig, loader.TRAIN_CONFIG_KEYS, transforms=[loader.update_batch_size_info]
    )


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["llm-foundry"])
def test_llm_foundry_takes_every_file(target: str, loader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loader accepts each file at the plan's number of ranks and finds the plan's accumulation in it."""
    kinds = set()
    for text, world in distinct(target, "llm_foundry.yaml"):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        said, read = made(loader, text)
        steps = said["global_train_batch_size"] // world // said["device_train_microbatch_size"]
        assert (read.device_train_grad_accum, read.n_gpus) == (steps, world)
        assert read.model["pretrained_model_name_or_path"] == "llama"
        kinds.add(read.fsdp_config["sharding_strategy"] if read.fsdp_config else "DDP")
        if read.fsdp_config:
            check_section(read.fsdp_config, read.precision)
    assert kinds == {"DDP", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"}


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["llm-foundry"])
def test_llm_foundry_refuses_a_misspelt_key(target: str, loader: Any) -> None:
    """The loader that takes our files refuses a key that is none of its own."""
    text, _ = distinct(target, "llm_foundry.yaml")[0]
    with pytest.raises(ValueError, match="global_train_bach_size"):
        made(loader, text, ("global_train_bach_size=8",))


def test_our_table_of_llm_foundry_is_its_class(loader: Any) -> None:
    """The keys that we know at the top level are the fields of TrainConfig."""
    assert set(keys_of("llm-foundry")) == {field.name for field in fields(loader.TrainConfig)}
