"""Composer's Trainer takes the arguments of every file, and the emitted job gives the losses of one process."""

from __future__ import annotations

import json
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from strategist.readers.foreign import keys_of
from tests.emitters.grid import distinct
from tests.frameworks.jobs import trained
from tests.frameworks.one_process import one_process, plan_of, words_for
from tests.frameworks.stand_ins.sitecustomize import stand_in

MISSING = ("torchvision", "mcli")
"""What Composer imports for pictures, of which no build loads beside torch for CPUs, and for a platform of its own."""
stand_in(*MISSING)
from composer import Trainer  # noqa: E402
from composer.core import Precision  # noqa: E402
from composer.distributed.mosaic_parallelism import SHARDING_MAP, get_mixed_precision  # noqa: E402
from composer.utils.parallelism import FSDPConfig, TPConfig  # noqa: E402


def test_our_tables_are_composers() -> None:
    """The keys that we know are the Trainer's arguments, and in sections the fields of Composer's classes."""
    assert set(keys_of("composer")) == set(signature(Trainer).parameters) - {"self"}
    for framework, section, kind in (
        ("llm-foundry", "fsdp_config", FSDPConfig),
        ("composer", "parallelism_config.fsdp", FSDPConfig),
        ("composer", "parallelism_config.tp", TPConfig),
    ):
        assert set(keys_of(framework, section)) == {f.name for f in fields(kind) if not f.name.startswith("_")}


def test_composer_looks_at_no_other_section() -> None:
    """A section of parallelism called otherwise than our table's two is dropped without a word."""
    parse = Trainer._parse_parallelism_config
    assert parse(None, {"fsdp2": {"reshard_after_forward": True}}) is None
    assert parse(None, {name: {} for name in keys_of("composer", "parallelism_config")}).tp == TPConfig()


def check_section(section: dict[str, Any], precision: str) -> None:
    """Composer makes its class from a section, knows its kind and its casts, and each key is a field."""
    read = FSDPConfig(**section)
    assert set(section) <= {field.name for field in fields(FSDPConfig)}
    assert read.sharding_strategy in SHARDING_MAP
    get_mixed_precision(Precision(precision), mixed_precision=read.mixed_precision)


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["composer"])
def test_composer_takes_every_argument(target: str) -> None:
    """Each argument of each file is one of the Trainer's, and its section of FSDP makes Composer's own class."""
    kinds = set()
    for text, _ in distinct(target, "composer.json"):
        arguments = json.loads(text)
        assert set(arguments) <= set(signature(Trainer).parameters)
        section = arguments.get("parallelism_config", {}).get("fsdp")
        kinds.add(section["sharding_strategy"] if section else "DDP")
        if section:
            check_section(section, arguments["precision"])
    assert kinds == {"DDP", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"}


@pytest.mark.proves("trained")
@pytest.mark.parametrize(
    ("target", "choices"),
    [("composer", {"recompute": "full"}), ("composer", {"optimizer": "sgd"})],
    ids=str,
)
def test_losses_are_those_of_one_process(
    target: str, choices: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    """Two ranks of DDP give each step's loss of one process, within 1e-4."""
    plan = plan_of({"dp_replicate": 2, "backend": "gloo"} | choices)
    alone = one_process(model_folder, plan.strategy.optimizer)
    assert trained(tmp_path, target, plan, words_for(model_folder), {"STAND_INS": ",".join(MISSING)}) == pytest.approx(
        alone, rel=1e-4
    )
    assert max(alone) - min(alone) > 10 * 1e-4 * max(alone)
