"""Files as people write them, weighed: what another file of theirs says counts, and so does what a framework does unasked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.harness import call

JOB = ("--model", "llama-3.2-1b", "--hardware", "dgx-h100")
AXOLOTL: dict[str, Any] = {
    "base_model": "meta-llama/Llama-3.2-1B", "datasets": [{"path": "x"}], "sequence_len": 2048, "micro_batch_size": 2,
    "gradient_accumulation_steps": 4, "bf16": "auto",
}  # fmt: skip
FACTORY: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Llama-3.2-1B", "stage": "sft", "finetuning_type": "full", "dataset": "x", "template": "llama3",
    "cutoff_len": 2048, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": True, "output_dir": "out",
}  # fmt: skip
ENGINE = {"train_batch_size": "auto", "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def predicted(folder: Path, table: dict[str, Any], *more: str) -> dict[str, Any]:
    """What `predict` says of a YAML file."""
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(table), encoding="utf-8")
    found: dict[str, Any] = call("predict", str(path), *JOB, *more, "--json").document
    return found


@pytest.mark.parametrize("table", [AXOLOTL, FACTORY], ids=["axolotl", "llama-factory"])
def test_a_file_that_names_no_engine_replicates(table: dict[str, Any], tmp_path: Path) -> None:
    """Its launcher starts a rank per device, each with the whole model, and its batch is what it says on all of them."""
    found = predicted(tmp_path, table)
    mesh = found["mesh"]
    assert (mesh["dp_replicate"], mesh["dp_shard"], found["strategy"]["zero"]) == (8, 1, 0)
    assert found["workload"]["global_batch"] == 2 * 4 * 8


@pytest.mark.parametrize("table", [AXOLOTL, FACTORY], ids=["axolotl", "llama-factory"])
@pytest.mark.parametrize("place", ["engines", "../engines"])
def test_a_named_deepspeed_file_says_how_states_are_kept(table: dict[str, Any], place: str, tmp_path: Path) -> None:
    """By a path from the folder of the file, or from one above it, in which the framework is started."""
    folder = tmp_path / "examples"
    folder.mkdir()
    engines = folder / place
    engines.mkdir()
    (engines / "zero.json").write_text(json.dumps(ENGINE), encoding="utf-8")
    found = predicted(folder, {**table, "deepspeed": "engines/zero.json"})
    assert (found["strategy"]["zero"], found["strategy"]["offload"]) == (2, "optimizer")


def test_accelerate_s_deepspeed_file_says_the_batch_too(tmp_path: Path) -> None:
    """Accelerate takes it from there, and the number of ranks from its own file."""
    engine = {**ENGINE, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    (tmp_path / "zero.json").write_text(json.dumps(engine), encoding="utf-8")
    table = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 8, "num_machines": 1, "mixed_precision": "bf16",
        "deepspeed_config": {"deepspeed_config_file": "zero.json"},
    }  # fmt: skip
    found = predicted(tmp_path, table)
    assert (found["strategy"]["zero"], found["strategy"]["micro_batch"], found["workload"]["global_batch"]) == (
        2,
        3,
        48,
    )


def test_a_deepspeed_file_that_is_not_there_leaves_the_layout_open(tmp_path: Path) -> None:
    """Nothing is guessed: the error says what is missing."""
    found = predicted(tmp_path, {**FACTORY, "deepspeed": "nowhere.json"})["error"]
    assert found["code"] == "E_MISSING"
    assert "ZeRO stage" in found["message"]


def test_what_lacks_a_micro_batch_says_so(tmp_path: Path) -> None:
    """Accelerate's file leaves the batch to the program; with one named beside it there is a prediction."""
    table = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 8, "num_machines": 1, "mixed_precision": "bf16",
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
    }  # fmt: skip
    assert "no micro-batch" in predicted(tmp_path, table)["error"]["message"]
    assert predicted(tmp_path, table, "--micro-batch", "2")["strategy"]["zero"] == 3


@pytest.mark.parametrize(
    ("said", "method", "targets"),
    [
        ({"adapter": "lora", "lora_r": 8, "lora_target_modules": ["q_proj", "v_proj"]}, "lora", ["q", "v"]),
        ({"adapter": "qlora", "lora_r": 8, "lora_target_linear": True}, "qlora", ["q", "k", "v", "o", "gate", "up", "down"]),
        ({}, "full", None),
    ],
)  # fmt: skip
def test_axolotl_s_adapters_are_weighed(
    said: dict[str, Any], method: str, targets: list[str] | None, tmp_path: Path
) -> None:
    """Adapters and weights of four bits hold less than all weights in training; the file's own matrices have them."""
    found = predicted(tmp_path, {**AXOLOTL, **said})
    adapters = found["model"].get("adapters")
    assert (adapters["method"] if adapters else "full") == method
    assert (list(adapters["targets"]) if adapters else None) == targets
    whole = predicted(tmp_path, AXOLOTL)["memory"]["peak"]["value"]
    assert (found["memory"]["peak"]["value"] < whole) == (method != "full")


@pytest.mark.parametrize(
    ("word", "code"),
    [("2_048", None), ("1_048_576", None), ("20_48", "E_TYPE"), ("0x800", "E_TYPE"), ("0_048", "E_TYPE")],
)
def test_thousands_apart_are_a_number(word: str, code: str | None, tmp_path: Path) -> None:
    """As the loaders of these frameworks read them; other spellings, which they read differently, are refused."""
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**AXOLOTL, "sequence_len": "HERE"}).replace("HERE", word), encoding="utf-8")
    ran = call("validate", str(path), "--json")
    if code is None:
        assert dict(ran.document[0]["says"])["seq_len"] == yaml.safe_load(word)
    else:
        assert ran.error["code"] == code


def test_degrees_of_other_machines_are_said_to_be(tmp_path: Path) -> None:
    """Replicas that a file numbers are all there are: not the batch is wrong, but the number of devices."""
    table = {
        "general": {"project": "p"}, "parallelism": {"dp": 2, "pp": 1, "tp": 2}, "model": {"dtype": "bfloat16"},
        "tokens": {"micro_batch_size": 2, "batch_accumulation_per_replica": 1, "sequence_length": 2048},
    }  # fmt: skip
    assert predicted(tmp_path, table)["error"]["code"] == "E_DIVISIBILITY"


def test_a_layout_that_says_its_batch_has_that_batch() -> None:
    """--strategy with micro-batch and accumulation is not held against the usual batch, and one that is named still counts."""
    words = ("predict", *JOB, "--strategy", "tp=2,zero=3,mbs=3,accumulation=5", "--json")
    assert call(*words).document["workload"]["global_batch"] == 3 * 5 * 4
    assert call(*words, "--global-batch", "256").error["code"] == "E_BATCH_SPLIT"
