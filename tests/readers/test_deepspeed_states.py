"""What DeepSpeed's own ZeRO holds, whoever's file names it: its authors' count of bytes per weight, and the same for every way to say one job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strategist.facts.models import load_model
from strategist.facts.parameters import count
from tests.cli.harness import call

MACHINE = ("--gpus-per-node", "8", "--nodes", "1", "--seq-len", "2048", "--gpu", "a100-sxm-40gb")
ALONE = ("--gpus-per-node", "1", "--nodes", "1", "--seq-len", "512", "--gpu", "v100-sxm2-32gb")
LLAMA = "llama-2-7b"


def weights(name: str) -> int:
    """Parameters of a model of the catalogue."""
    return count(load_model(name)).total


def table(stage: int, low: str = "bf16", **zero: Any) -> dict[str, Any]:
    """A DeepSpeed file."""
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    return {**sizes, low: {"enabled": True}, "zero_optimization": {"stage": stage, **zero}}


def predicted(path: Path, value: object, *words: str) -> dict[str, Any]:
    """What `predict` says of a file."""
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    found: dict[str, Any] = call("predict", str(path), *words, "--json").document
    return found


def states(found: dict[str, Any]) -> int:
    """Bytes of weights, gradients and optimizer on the device."""
    terms = {term["name"]: term["bytes"] for term in found["memory"]["stages"][0]["terms"]}
    return sum(terms.get(name, 0) for name in ("parameters", "gradients", "optimizer"))


@pytest.mark.parametrize(
    ("stage", "zero", "per_weight"),
    [
        (1, {}, 2 + 2 + 12 / 8),
        (2, {}, 2 + 14 / 8),
        (3, {}, 16 / 8),
        (2, {"offload_optimizer": {"device": "cpu"}}, 2),
        (3, {"offload_optimizer": {"device": "cpu"}}, 2 / 8),
        (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, 0),
    ],
)
def test_bytes_per_weight_are_those_of_zero(
    stage: int, zero: dict[str, Any], per_weight: float, tmp_path: Path
) -> None:
    """Half-precision weights and gradients, masters and two moments of four bytes (Rajbhandari et al. 2020, arXiv 1910.02054; Ren et al. 2021,
    arXiv 2101.06840: with the optimizer on the host no gradient stays)."""
    found = predicted(tmp_path / "zero.json", table(stage, **zero), "--model", LLAMA, *MACHINE)
    assert states(found) == pytest.approx(per_weight * weights(LLAMA), rel=0.001, abs=1)
    assert found["framework"] == ("deepspeed-zero3" if stage == 3 else "deepspeed")


def test_thirteen_billion_weights_train_on_one_v100(tmp_path: Path) -> None:
    """ZeRO-Offload trains 13 billion weights on a V100 of 32 GB (Ren et al. 2021, table 3), whose host must hold 16 bytes for each."""
    offloaded = table(2, low="fp16", offload_optimizer={"device": "cpu", "pin_memory": True})
    found = predicted(tmp_path / "zero.json", offloaded, "--model", "opt-13b", *ALONE, "--strategy", "recompute=full")
    assert found["memory"]["peak"]["value"] < found["memory"]["usable_bytes"]
    whole = predicted(tmp_path / "plain.json", table(2, low="fp16"), "--model", "opt-13b", *ALONE)
    assert not whole["fits"]


@pytest.mark.parametrize(
    ("stage", "per_weight", "name"),
    [
        (1, 4 + 4 + 12 / 8, "deepspeed-autocast-copies"),
        (2, 4 + 16 / 8, "deepspeed-autocast-copies"),
        (3, 16 / 8, "deepspeed-zero3-autocast"),
    ],
)
@pytest.mark.parametrize("is_autocast", [True, False])
def test_weights_that_stay_in_fp32(stage: int, per_weight: float, name: str, is_autocast: bool, tmp_path: Path) -> None:
    """Under torch_autocast, or in fp32 throughout, weights, gradients and moments are in fp32; stages 1 and 2 copy a rank's part of the weights
    all the same (DeepSpeed 0.19.8, stage_1_and_2.py, single_partition_of_fp32_groups), stage 3 updates its own (stage3.py, _create_fp32_partitions)."""
    words = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}} if is_autocast else {}
    told = {key: value for key, value in table(stage).items() if key != "bf16"} | words
    found = predicted(tmp_path / "zero.json", told, "--model", LLAMA, *MACHINE)
    assert found["framework"] == name
    assert found["strategy"]["formats"]["parameter"] == "float32"
    assert states(found) == pytest.approx(per_weight * weights(LLAMA), rel=0.001)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_job_has_one_peak_however_it_is_said(stage: int, tmp_path: Path) -> None:
    """DeepSpeed's file, Accelerate's, and a launch line of a program with TrainingArguments: the same bytes."""
    job = ("--model", LLAMA, *MACHINE)
    (tmp_path / "auto.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}), encoding="utf-8")
    own = predicted(tmp_path / "zero.json", table(stage), *job, "--strategy", "recompute=full")
    section = f"deepspeed_config: {{gradient_accumulation_steps: 4, zero_stage: {stage}}}"
    accelerate = f"distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\nnum_machines: 1\n{section}\n"
    line = "deepspeed --num_gpus 8 train.py --per_device_train_batch_size 1 --gradient_accumulation_steps 4 --bf16 --gradient_checkpointing --deepspeed auto.json --output_dir x\n"
    others = (
        predicted(tmp_path / "job.yaml", accelerate, *job, "--strategy", "mbs=1,recompute=full"),
        predicted(tmp_path / "train.sh", line, *job),
    )
    assert [other["memory"]["peak"]["value"] for other in others] == [own["memory"]["peak"]["value"]] * 2


@pytest.mark.parametrize(
    ("stage", "zero", "per_element"),
    [
        (3, {}, 2),
        (3, {"reduce_bucket_size": 1e8}, 2),
        (3, {"contiguous_gradients": False}, 0),
        (2, {"overlap_comm": True, "reduce_bucket_size": 2e9}, 4),
    ],
)
def test_buffers_are_as_large_as_the_file_says(
    stage: int, zero: dict[str, Any], per_element: float, tmp_path: Path
) -> None:
    """ZeRO-3 keeps one buffer of reduce_bucket_size gradients, ZeRO-2 one or, to reduce behind backward, two until its last gradient is
    reduced (DeepSpeed 0.19.8, stage3.py and stage_1_and_2.py); the sizes are those of the file, or DeepSpeed's own."""
    found = predicted(tmp_path / "zero.json", table(stage, **zero), "--model", "llama-3.2-1b", *MACHINE)
    terms = {term["name"]: term["bytes"] for term in found["memory"]["stages"][0]["terms"]}
    size = zero.get("reduce_bucket_size", 5e8)
    if stage == 3:
        assert terms.get("bucket_buffers", 0) == per_element * size
    else:
        assert terms["bucket_buffers"] in (per_element * size, per_element * size + 2 * weights("llama-3.2-1b"))


def test_an_automatic_buffer_is_the_width_squared(tmp_path: Path) -> None:
    """What Trainer and Accelerate put in for "auto"."""
    automatic = table(3, reduce_bucket_size="auto")
    found = predicted(tmp_path / "zero.json", automatic, "--model", LLAMA, *MACHINE)
    terms = {term["name"]: term["bytes"] for term in found["memory"]["stages"][0]["terms"]}
    assert terms["bucket_buffers"] == 2 * 4096**2
