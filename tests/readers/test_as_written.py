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


LLAMA = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": True, "hidden_act": "silu", "is_llama_config": True,
}  # fmt: skip
MEGATRON = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 \\
  --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope \\
  --max-position-embeddings 131072 --seq-length 2048 --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.2-1B \\
  --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 --global-batch-size 16 --bf16 --use-distributed-optimizer
"""
OF_ONE_MODEL: dict[str, str] = {
    "axolotl.yaml": yaml.safe_dump(AXOLOTL),
    "factory.yaml": yaml.safe_dump(FACTORY),
    "megatron.sh": MEGATRON,
    "nanotron.yaml": yaml.safe_dump({
        "parallelism": {"dp": 4, "pp": 1, "tp": 2, "pp_engine": "1f1b"}, "model": {"dtype": "bfloat16", "model_config": LLAMA},
        "tokens": {"micro_batch_size": 1, "batch_accumulation_per_replica": 2, "sequence_length": 2048},
    }),
    "foundry.yaml": yaml.safe_dump({
        "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": "meta-llama/Llama-3.2-1B"}, "device_train_microbatch_size": 2,
        "global_train_batch_size": 32, "train_loader": {}, "max_seq_len": 2048, "fsdp_config": {"sharding_strategy": "FULL_SHARD"},
    }),
    "bridge.yaml": yaml.safe_dump({
        "model": {"hf_model_id": "meta-llama/Llama-3.2-1B", "tensor_model_parallel_size": 2, "seq_length": 2048},
        "train": {"micro_batch_size": 1, "global_batch_size": 16}, "ddp": {},
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ONE_MODEL)
def test_the_model_is_the_one_that_the_file_is_for(name: str, tmp_path: Path) -> None:
    """A file that describes or names its model is judged without another word of it, and comes to what naming it comes to; a model that
    is named beside it is the one that counts."""
    path = tmp_path / name
    path.write_text(OF_ONE_MODEL[name], encoding="utf-8")
    alone, named, other = (
        call("predict", str(path), "--hardware", "dgx-h100", *words, "--json").document
        for words in ((), ("--model", "llama-3.2-1b"), ("--model", "llama-3.2-3b"))
    )
    assert alone["memory"] == named["memory"]
    assert alone["time"] == named["time"]
    assert other["memory"] != alone["memory"]
    judged = call("validate", str(path), "--hardware", "dgx-h100", "--json").document
    assert judged[0]["prediction"]["time"] == alone["time"]


def test_a_model_that_nobody_knows_is_said_with_its_place(tmp_path: Path) -> None:
    """Nothing is downloaded to find out."""
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**AXOLOTL, "base_model": "somebody/else-9b"}), encoding="utf-8")
    done = call("predict", str(path), "--hardware", "dgx-h100")
    assert done.code == 2
    assert "base_model" in done.err


def test_a_file_s_variant_of_a_model_is_counted_as_its_base(tmp_path: Path) -> None:
    """The same memory, and an assumption that says so."""
    variant = written(tmp_path, job_yaml={**AXOLOTL, "base_model": "unsloth/Llama-3.2-1B-Instruct"}, base_yaml=AXOLOTL)
    found, base = weighed(variant, "job.yaml"), weighed(variant, "base.yaml")
    assert found["memory"] == base["memory"]
    said = [one["value"] for one in found["assumptions"] if one["what"] == "model"]
    assert said == ["unsloth/Llama-3.2-1B-Instruct has the shape of llama-3.2-1b"]
    assert "model" not in [one["what"] for one in base["assumptions"]]


def test_a_file_without_a_model_asks_for_one(tmp_path: Path) -> None:
    """DeepSpeed's file says nothing of it."""
    path = tmp_path / "job.json"
    path.write_text(json.dumps(ENGINE), encoding="utf-8")
    done = call("predict", str(path), "--hardware", "dgx-h100")
    assert done.code == 2
    assert "--model" in done.err


BRIDGE = yaml.safe_load(OF_ONE_MODEL["bridge.yaml"])


@pytest.mark.parametrize(
    ("name", "text", "precision", "offload"),
    [
        ("megatron.sh", MEGATRON, "bf16", "none"),
        ("megatron.sh", f"{MEGATRON.strip()} --fp8-format hybrid --fp8-recipe mxfp8", "fp8", "none"),
        ("megatron.sh", f"{MEGATRON.strip()} --fp4-format e2m1", "fp4", "none"),
        ("megatron.sh", f"{MEGATRON.strip()} --optimizer-cpu-offload", "bf16", "optimizer"),
        ("megatron.sh", f"{MEGATRON.strip()} --optimizer-cpu-offload --optimizer-offload-fraction 0.5", "bf16", "none"),
        ("bridge.yaml", yaml.safe_dump(BRIDGE | {"mixed_precision": "bf16_with_fp8_current_scaling_mixed"}), "fp8", "none"),
        ("bridge.yaml", yaml.safe_dump(BRIDGE | {"mixed_precision": {"bf16": True, "fp8": "hybrid"}}), "fp8", "none"),
        ("bridge.yaml", yaml.safe_dump(BRIDGE | {"mixed_precision": "bf16_mixed"}), "bf16", "none"),
    ],
)  # fmt: skip
def test_megatron_s_narrow_products_and_state_on_the_host_count(
    name: str, text: str, precision: str, offload: str, tmp_path: Path
) -> None:
    """Formats of matrix products are arguments of their own beside --bf16, and so is where the optimizer's state lies: all of it, for a
    part of it has no word."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    found = call("predict", str(path), "--hardware", "dgx-b200", "--json").document
    assert (found["workload"]["precision"], found["strategy"]["offload"]) == (precision, offload)


def test_gradients_are_as_wide_as_megatron_s_arguments_make_them(tmp_path: Path) -> None:
    """Those of fp16 are added up in fp16, and those of bf16 in fp32, unless an argument says otherwise."""
    bare = MEGATRON.strip().replace(" --bf16", "")
    held = {}
    for words in ("--bf16", "--bf16 --grad-reduce-in-bf16", "--fp16", "--fp16 --accumulate-allreduce-grads-in-fp32"):
        path = tmp_path / "megatron.sh"
        path.write_text(f"{bare} {words}", encoding="utf-8")
        found = call("predict", str(path), "--hardware", "dgx-h100", "--json").document
        terms = {term["name"]: term["bytes"] for term in found["memory"]["stages"][0]["terms"]}
        held[words] = terms["gradients"] / terms["parameters"]
    fine, low, of_fp16, fine_of_fp16 = held.values()
    assert fine - low == pytest.approx(1.0, rel=1e-3)  # two bytes more of each weight, as many as it has itself
    assert (of_fp16, fine_of_fp16) == pytest.approx((low, fine), rel=1e-3)


ARGUMENTS = (
    "train.py --model_name_or_path meta-llama/Llama-3.2-1B --per_device_train_batch_size 2 --gradient_accumulation_steps 4 "
    "--bf16 True --block_size 2048 --output_dir out"
)
FSDP_FILE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 8, "num_machines": 1, "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_activation_checkpointing": True},
}  # fmt: skip


def launched(folder: Path, line: str, *more: str) -> Any:
    """What `predict` makes of a launch line in a script, beside a file of DeepSpeed and one of Accelerate."""
    (folder / "zero.json").write_text(json.dumps(ENGINE), encoding="utf-8")
    (folder / "fsdp.yaml").write_text(yaml.safe_dump(FSDP_FILE), encoding="utf-8")
    trainer = {"reshard_after_forward": False, "activation_checkpointing": True}
    (folder / "trainer.json").write_text(json.dumps(trainer), encoding="utf-8")
    path = folder / "train.sh"
    path.write_text(f"#!/bin/bash\nexport NCCL_DEBUG=INFO\n{line}\n", encoding="utf-8")
    return call("predict", str(path), "--hardware", "dgx-h100", *more, "--json")


@pytest.mark.parametrize(
    ("line", "zero", "shards", "offload", "recompute"),
    [
        (f"torchrun --nproc_per_node 8 {ARGUMENTS}", 0, 1, "none", "none"),
        (f"torchrun --nproc_per_node 8 {ARGUMENTS} --gradient_checkpointing", 0, 1, "none", "full"),
        (f"torchrun --nproc_per_node 8 {ARGUMENTS} --deepspeed zero.json", 2, 8, "optimizer", "none"),
        (f"deepspeed --num_gpus 8 {ARGUMENTS} --deepspeed zero.json", 2, 8, "optimizer", "none"),
        (f"accelerate launch --config_file fsdp.yaml {ARGUMENTS}", 3, 8, "none", "full"),
        (f"accelerate launch --config_file=fsdp.yaml --num_processes=8 {ARGUMENTS.replace(' --bf16 True', '')}", 3, 8, "none", "full"),
        (f"accelerate launch --use_deepspeed --zero_stage 1 --num_processes 8 {ARGUMENTS}", 1, 8, "none", "none"),
        (f"accelerate launch --use_deepspeed --deepspeed_config_file zero.json {ARGUMENTS}", 2, 8, "optimizer", "none"),
        (f"accelerate launch --use_fsdp --fsdp_reshard_after_forward false --num_processes 8 {ARGUMENTS}", 2, 8, "none", "none"),
        (f"accelerate launch --num_processes 8 --multi_gpu {ARGUMENTS}", 0, 1, "none", "none"),
        (f"accelerate launch --use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP --num_processes 8 {ARGUMENTS}", 2, 8, "none", "none"),
        (f"python prepare.py && accelerate launch --config_file fsdp.yaml -m my.{ARGUMENTS.replace('.py', '')}", 3, 8, "none", "full"),
        (f"python -m torch.distributed.run --nproc_per_node 8 {ARGUMENTS} --fsdp 'shard_grad_op offload'", 2, 8, "parameters", "none"),
        (f"torchrun --nproc_per_node 8 {ARGUMENTS} --fsdp True --fsdp_config trainer.json", 2, 8, "none", "full"),
    ],
)  # fmt: skip
def test_a_launch_line_says_the_layout(
    line: str, zero: int, shards: int, offload: str, recompute: str, tmp_path: Path
) -> None:
    """Of a program with Trainer's arguments: model, batch, sequences and formats stand behind it, how states are kept before it or in a
    file that either names."""
    found = launched(tmp_path, line).document
    strategy = found["strategy"]
    assert (strategy["zero"], found["mesh"]["dp_shard"]) == (zero, shards)
    assert (strategy["offload"], strategy["recompute"]) == (offload, recompute)
    assert (strategy["micro_batch"], strategy["accumulation"], found["workload"]["global_batch"]) == (2, 4, 64)
    assert (found["model"]["name"], found["workload"]["seq_len"], found["workload"]["precision"]) == (
        "llama-3.2-1b",
        2048,
        "bf16",
    )


@pytest.mark.parametrize("options", ["", "--config_file elsewhere.yaml "], ids=["default file", "missing file"])
def test_what_accelerate_reads_from_a_file_that_is_not_here_is_not_guessed(options: str, tmp_path: Path) -> None:
    """Its own default file lies in somebody's home: nothing says how states are kept."""
    done = launched(tmp_path, f"accelerate launch {options}{ARGUMENTS}")
    assert done.code == 2
    assert "no degrees" in done.document["error"]["message"]
    found = launched(tmp_path, f"accelerate launch {options}{ARGUMENTS}", "--strategy", "zero=3").document
    assert (found["strategy"]["zero"], found["strategy"]["micro_batch"]) == (3, 2)


def test_adapters_of_a_launch_line_are_trained_alone(tmp_path: Path) -> None:
    """As TRL's programs take them."""
    found = launched(
        tmp_path, f"torchrun --nproc_per_node 8 {ARGUMENTS} --use_peft --lora_r 8 --load_in_4bit true"
    ).document
    assert (found["model"]["adapters"]["method"], found["model"]["adapters"]["rank"]) == ("qlora", 8)


def test_a_misspelt_argument_of_trainer_is_found(tmp_path: Path) -> None:
    """Arguments of the program's own are no fault, one that is almost Trainer's is; so is another number of ranks."""
    path = tmp_path / "train.sh"
    path.write_text(f"torchrun --nproc_per_node 4 {ARGUMENTS} --gradient_checkpointin --my_own 3", encoding="utf-8")
    judged = call("validate", str(path), "--hardware", "dgx-h100", "--json").document[0]
    assert [(fault["rule"], fault["place"]) for fault in judged["findings"]][:2] == [
        ("unknown-key", "gradient_checkpointin"),
        ("ranks-product", "the launcher"),
    ]


@pytest.mark.parametrize(
    ("strategy", "shards", "zero", "recompute"),
    [
        ("zero=2", 8, 2, "full"),
        ("recompute=none", 8, 3, "none"),
        ("dp=4,tp=2", 4, 3, "full"),
        ("dp_replicate=2,dp_shard=4", 4, 3, "full"),
    ],
)
def test_choices_beside_a_file_win_over_it(
    strategy: str, shards: int, zero: int, recompute: str, tmp_path: Path
) -> None:
    """What --strategy names is as it says, and all else as the file does."""
    found = launched(
        tmp_path, f"accelerate launch --config_file fsdp.yaml {ARGUMENTS}", "--strategy", strategy
    ).document
    assert (found["mesh"]["dp_shard"], found["strategy"]["zero"], found["strategy"]["recompute"]) == (
        shards,
        zero,
        recompute,
    )
    assert found["strategy"]["micro_batch"] == 2


@pytest.mark.parametrize(
    ("section", "zero", "replicas", "shards"),
    [
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, 3, 1, 16),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, 2, 1, 16),
        ({"fsdp_sharding_strategy": 2}, 2, 1, 16),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, 0, 16, 1),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, 3, 2, 8),
        ({"fsdp_sharding_strategy": "5"}, 2, 2, 8),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_sharding_strategy": "FULL_SHARD"}, 2, 1, 16),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, 2, 1, 16),
        ({}, 3, 1, 16),
    ],
)
def test_strategies_of_the_first_fsdp_count(
    section: dict[str, Any], zero: int, replicas: int, shards: int, tmp_path: Path
) -> None:
    """By name or number, as most files of Accelerate still say them; hybrid ones share a machine's ranks. The second FSDP has a switch."""
    path = tmp_path / "fsdp.yaml"
    table = FSDP_FILE | {"fsdp_config": section, "num_processes": 16, "num_machines": 2}
    path.write_text(yaml.safe_dump(table), encoding="utf-8")
    words = ("--model", "llama-3.2-1b", "--hardware", "dgx-h100:2", "--micro-batch", "1")
    found = call("predict", str(path), *words, "--json").document
    mesh = found["mesh"]
    assert (found["strategy"]["zero"], mesh["dp_replicate"], mesh["dp_shard"]) == (zero, replicas, shards)


@pytest.mark.parametrize(
    ("options", "strategy", "replicas", "shards"),
    [("--multi_gpu", "zero=3", 1, 8), ("--use_fsdp", "zero=0", 8, 1), ("--use_fsdp", "zero=2", 1, 8), ("--multi_gpu", "zero=3,dp_replicate=2,dp_shard=4", 2, 4)],
)  # fmt: skip
def test_who_shards_what_a_file_replicates_shards_it_over_all_ranks(
    options: str, strategy: str, replicas: int, shards: int, tmp_path: Path
) -> None:
    """Its replicas are not kept beside a stage of ZeRO that shards, nor its shards beside none."""
    line = f"accelerate launch {options} --num_processes 8 {ARGUMENTS}"
    mesh = launched(tmp_path, line, "--strategy", strategy).document["mesh"]
    assert (mesh["dp_replicate"], mesh["dp_shard"]) == (replicas, shards)


def written(folder: Path, **files: Any) -> Path:
    """The folder with some files: tables as YAML, texts as they are."""
    for name, content in files.items():
        text = content if isinstance(content, str) else yaml.safe_dump(content)
        (folder / name.replace("_", ".")).write_text(text, encoding="utf-8")
    return folder


def rules(folder: Path, name: str, *more: str) -> list[str]:
    """The faults that `validate` finds in a file."""
    judged = call("validate", str(folder / name), *more, "--json").document
    return [fault["rule"] for each in judged for fault in each["findings"]]


TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
{training}
[parallelism]
data_parallel_shard_degree = -1
{parallelism}
[activation_checkpoint]
{again}
"""
"""A file of torchtitan 0.2."""


def of_titan(folder: Path, training: str = "", parallelism: str = "", again: str = 'mode = "full"') -> dict[str, Any]:
    """What `predict` says of such a file on two nodes."""
    text = TITAN.format(training=training, parallelism=parallelism, again=again)
    path = written(folder, llama3_toml=text) / "llama3.toml"
    found: dict[str, Any] = call("predict", str(path), "--hardware", "dgx-h100:2", "--json").document
    return found


def test_the_toml_of_older_torchtitan_says_model_and_layout(tmp_path: Path) -> None:
    """Sections and keys are those of today's flags; shards take the ranks that are left, and what nobody says is the release's own: eight
    sequences of 2,048 tokens."""
    found = of_titan(tmp_path, parallelism="tensor_parallel_degree = 2")
    mesh, strategy, work = found["mesh"], found["strategy"], found["workload"]
    assert (found["model"]["name"], mesh["dp_shard"], mesh["tp"], strategy["zero"]) == ("llama-3.1-8b", 8, 2, 3)
    assert (strategy["micro_batch"], work["global_batch"], work["seq_len"]) == (8, 64, 2048)
    said = of_titan(tmp_path, training="local_batch_size = 2\nglobal_batch_size = 64\nseq_len = 8192")
    assert (said["strategy"]["micro_batch"], said["strategy"]["accumulation"]) == (2, 2)
    assert (said["workload"]["global_batch"], said["workload"]["seq_len"]) == (64, 8192)


@pytest.mark.parametrize(
    ("again", "recompute", "every"),
    [
        ('mode = "none"', "none", 0),
        ('mode = "selective"\nselective_ac_option = "op"', "selective", 0),
        ('mode = "selective"\nselective_ac_option = "3"', "full", 3),
        ('mode = "selective"\nselective_ac_option = 1', "full", 0),
        ("", "full", 2),
    ],
)
def test_which_layers_older_torchtitan_computes_again(again: str, recompute: str, every: int, tmp_path: Path) -> None:
    """Operations of each layer, or every so-many-th layer whole: every second one where nothing is said."""
    strategy = of_titan(tmp_path, again=again)["strategy"]
    assert (strategy["recompute"], strategy["recompute_every"]) == (recompute, every)


def test_stages_of_torchtitan_keep_what_they_gathered(tmp_path: Path) -> None:
    """Unless it is told otherwise: with a pipeline each micro-batch would gather again."""
    stages = "pipeline_parallel_degree = 2"
    zero = [of_titan(tmp_path, parallelism=f"{stages}\n{more}")["strategy"]["zero"]
            for more in ("", 'fsdp_reshard_after_forward = "always"', 'fsdp_reshard_after_forward = "never"')]  # fmt: skip
    assert zero == [2, 3, 2]


def test_ranks_of_a_sequence_share_the_weights_of_torchtitan(tmp_path: Path) -> None:
    """FSDP shards over the ranks of context parallelism too, those of one replica where there are no others (torchtitan 0.3.0,
    distributed/parallel_dims.py, fsdp_enabled)."""
    degrees = "tensor_parallel_degree = 8\ndata_parallel_replicate_degree = {}\ncontext_parallel_degree = {}"
    found = [of_titan(tmp_path, parallelism=degrees.format(replicas, cp)) for replicas, cp in ((1, 2), (2, 1))]
    shards, whole = ({term["name"]: term["bytes"] for term in one["memory"]["stages"][0]["terms"]} for one in found)
    assert [(one["mesh"]["dp_shard"], one["mesh"]["cp"], one["strategy"]["zero"]) for one in found] == [
        (1, 2, 3),
        (1, 1, 0),
    ]
    assert 0.49 * whole["optimizer"] < shards["optimizer"] < 0.51 * whole["optimizer"]


def test_a_configuration_of_torchtitan_names_its_model(tmp_path: Path) -> None:
    """Behind --config, with or without what it adds to the model; one that the catalogue does not have is asked for."""
    flags = "--training.local_batch_size 1 --training.seq_len 4096 --parallelism.data_parallel_shard_degree 8"
    found = []
    for config in ("qwen3_1_7b", "deepseek_v3_16b_hybridep", "llama3_debugmodel"):
        line = f"torchrun --nproc_per_node 8 -m torchtitan.train --module x --config {config} {flags}"
        found.append(launched(tmp_path, line).document)
    assert [each["model"]["name"] for each in found[:2]] == ["qwen3-1.7b", "deepseek-v2-lite"]
    assert found[2]["error"]["code"] == "E_MISSING"


@pytest.mark.parametrize(("word", "dispatcher"), [("standard", "alltoall"), ("deepep", "deepep")])
def test_older_torchtitan_names_its_dispatcher(word: str, dispatcher: str, tmp_path: Path) -> None:
    """Its standard one is torch's all-to-all; today's stands in the name of a configuration."""
    text = TITAN.format(training="", parallelism=f'expert_parallel_comm_backend = "{word}"', again='mode = "full"')
    line = "torchrun --nproc_per_node 8 -m torchtitan.train --module x --config deepseek_v3_16b_hybridep\n"
    folder = written(tmp_path, llama3_toml=text, run_sh=line)
    said = [dict(call("validate", str(folder / name), "--json").document[0]["says"]) for name in ("llama3.toml", "run.sh")]  # fmt: skip
    assert [each["dispatcher"] for each in said] == [dispatcher, "hybridep"]


def terms_at_rest(found: dict[str, Any]) -> tuple[float, ...]:
    """Bytes of weights, gradients (where any are left at the peak) and optimizer state of the first stage."""
    terms = {term["name"]: term["bytes"] for term in found["memory"]["stages"][0]["terms"]}
    return tuple(terms.get(name, 0) for name in ("parameters", "gradients", "optimizer"))


PURE = {**{key: word for key, word in FACTORY.items() if key != "bf16"}, "pure_bf16": True}


@pytest.mark.parametrize("kind", ["llama-factory", "axolotl", "launch line", "torchtitan"])
def test_weights_that_rest_in_bf16_take_half(kind: str, tmp_path: Path) -> None:
    """With their gradients and moments: pure_bf16, a model that was loaded in bf16 and that no engine keeps copies of, training.dtype."""
    if kind == "torchtitan":
        wide, narrow = of_titan(tmp_path), of_titan(tmp_path, training='dtype = "bfloat16"')
    elif kind == "launch line":
        line = f"torchrun --nproc_per_node 8 {ARGUMENTS}"
        wide, narrow = (launched(tmp_path, f"{line}{more}").document for more in ("", " --torch_dtype bfloat16"))
    else:
        wide = predicted(tmp_path, FACTORY)
        narrow = predicted(tmp_path, PURE if kind == "llama-factory" else AXOLOTL)
    assert narrow["strategy"]["formats"]["parameter"] == "bfloat16"
    assert narrow["strategy"]["formats"]["compute"] == wide["strategy"]["formats"]["compute"] == "bfloat16"
    counters = 1 << 20  # bytes: one number per weight, which stays as wide as it is
    for less, more in zip(terms_at_rest(narrow), terms_at_rest(wide), strict=True):
        assert 2 * less == pytest.approx(more, abs=counters)


@pytest.mark.parametrize(
    ("more", "stored"),
    [
        ({"deepspeed": "zero.json"}, "bfloat16"),
        ({"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}, "float32"),
    ],
)
def test_engines_keep_weights_in_fp32(more: dict[str, Any], stored: str, tmp_path: Path) -> None:
    """DeepSpeed beside the weights, with the moments, and Accelerate's FSDP instead of them, whatever a model was loaded in."""
    (tmp_path / "zero.json").write_text(json.dumps(ENGINE), encoding="utf-8")
    found = predicted(tmp_path, {**AXOLOTL, **more})
    assert found["strategy"]["formats"] == predicted(tmp_path, {**FACTORY, **more, "fsdp": ""})["strategy"]["formats"]
    assert found["strategy"]["formats"]["parameter"] == stored


def test_who_names_formats_beside_a_file_has_them(tmp_path: Path) -> None:
    """A precision or a framework on the command line wins over how the file's weights rest."""
    for more in (("--precision", "bf16"), ("--framework", "hf-trainer")):
        assert predicted(tmp_path, PURE, *more)["strategy"]["formats"]["parameter"] == "float32"


PROGRAM = (
    "run_clm.py --model_name_or_path meta-llama/Llama-3.2-1B --bf16 --per_device_train_batch_size 2 --block_size 2048"
)
SKY = {"resources": {"accelerators": "H100:8"}, "num_nodes": 2, "setup": "pip install transformers", "run": f"cd work\ntorchrun --nnodes $SKYPILOT_NUM_NODES --nproc_per_node 8 {PROGRAM}\n"}  # fmt: skip


def of_pods(command: list[str], **container: Any) -> dict[str, Any]:
    """A PyTorchJob of two nodes of eight devices."""
    pod = {"name": "pytorch", "image": "x", "command": command, "resources": {"limits": {"nvidia.com/gpu": 8}}}
    roles = {"Worker": {"replicas": 2, "template": {"spec": {"containers": [{**pod, **container}]}}}}
    job = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "llama"}}
    return {**job, "spec": {"pytorchReplicaSpecs": roles}}


JOBS: dict[str, dict[str, Any]] = {
    "skypilot": SKY,
    "words": of_pods(["torchrun", "--nproc_per_node=8", *PROGRAM.split()]),
    "a text for a shell": of_pods(["bash", "-c", f"torchrun --nproc_per_node=8 {PROGRAM}"]),
    "a variable": of_pods(["sh", "-c", f"torchrun --nproc_per_node=8 {PROGRAM.replace('size 2 ', 'size $EACH ')}"], env=[{"name": "EACH", "value": "2"}]),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_what_a_job_runs_is_read(name: str, tmp_path: Path) -> None:
    """Model, batch and layout stand in the commands of a job, as they do in a script; its machines in the job itself."""
    machines = ("--hardware", "dgx-h100:2")
    path = written(tmp_path, job_yaml=JOBS[name]) / "job.yaml"
    found = call("predict", str(path), *machines, "--json").document
    assert (found["model"]["name"], found["framework"]) == ("llama-3.2-1b", "hf-trainer")
    assert (found["mesh"]["dp_replicate"], found["strategy"]["micro_batch"], found["workload"]["seq_len"]) == (16, 2, 2048)  # fmt: skip
    assert rules(tmp_path, "job.yaml", *machines) == []


def test_a_job_of_megatron_has_megatron_s_formats(tmp_path: Path) -> None:
    """A prediction counts with the kernels and formats of what the job starts."""
    line = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 32 --bf16 --vocab-size 32000 --use-distributed-optimizer"  # fmt: skip
    path = written(tmp_path, job_yaml={**SKY, "run": line}) / "job.yaml"
    found = call("predict", str(path), "--hardware", "dgx-h100:2", "--json").document
    assert (found["framework"], found["model"]["layers"], found["strategy"]["zero"]) == ("megatron-core", 4, 1)
    assert found["strategy"]["formats"]["parameter"] == "bfloat16"


@pytest.mark.parametrize(
    "launcher",
    ["torchrun --nnodes $NNODES --nproc_per_node 8", "torchrun --nnodes=1:4 --nproc_per_node 8", "deepspeed --hostfile hosts --num_gpus 8"],
)  # fmt: skip
def test_a_number_of_nodes_that_is_said_elsewhere_is_not_taken_for_one(launcher: str, tmp_path: Path) -> None:
    """A variable of whoever starts the script, a range or a file with hosts: no number of ranks contradicts the machines."""
    folder = written(tmp_path, run_sh=f"{launcher} {PROGRAM}\n")
    assert "ranks-product" not in rules(folder, "run.sh", "--hardware", "dgx-h100:2")


RECIPE: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Llama-3.2-1B", "attn_implementation": "flash_attention_2", "dataset_mixer": {"x/y": 1.0}, "bf16": True,
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "gradient_checkpointing": True, "max_length": 2048, "output_dir": "out",
}  # fmt: skip
SHARDED = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 8, "num_machines": 1, "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True},
}  # fmt: skip


def test_a_recipe_names_its_model_and_what_its_program_adds(tmp_path: Path) -> None:
    """The file that `trl sft --config` takes has more keys than Trainer's arguments: they are no faults, unless they are almost one."""
    folder = written(tmp_path, recipe_yaml=RECIPE, wrong_yaml=RECIPE | {"per_device_train_batchsize": 2})
    found = call("predict", str(folder / "recipe.yaml"), "--hardware", "dgx-h100", "--json").document
    assert (found["model"]["name"], found["workload"]["seq_len"]) == ("llama-3.2-1b", 2048)
    assert (found["mesh"]["dp_replicate"], found["strategy"]["micro_batch"], found["strategy"]["accumulation"]) == (8, 2, 4)  # fmt: skip
    assert rules(folder, "recipe.yaml") == []
    assert rules(folder, "wrong.yaml") == ["unknown-key"]


@pytest.mark.parametrize("option", ["--config recipe.yaml", "--config=recipe.yaml", "recipe.yaml"])
def test_a_launch_line_s_recipe_counts_beside_it(option: str, tmp_path: Path) -> None:
    """Layout of accelerate's file, batch and model of the recipe, and the line's own words before both."""
    line = f"accelerate launch --config_file fsdp.yaml run_sft.py {option} --gradient_accumulation_steps 8\n"
    folder = written(tmp_path, recipe_yaml=RECIPE, fsdp_yaml=SHARDED, run_sh=line)
    found = call("predict", str(folder / "run.sh"), "--hardware", "dgx-h100", "--json").document
    assert found["model"]["name"] == "llama-3.2-1b"
    assert (found["strategy"]["zero"], found["mesh"]["dp_shard"], found["strategy"]["recompute"]) == (3, 8, "full")
    assert (found["strategy"]["micro_batch"], found["strategy"]["accumulation"]) == (2, 8)


@pytest.mark.parametrize(
    ("line", "table"),
    [
        ("FORCE_TORCHRUN=1 NNODES=2 llamafactory-cli train job.yaml", FACTORY),
        ("axolotl train job.yaml", AXOLOTL),
        ("accelerate launch -m axolotl.cli.train job.yaml", AXOLOTL),
    ],
)
def test_the_file_that_a_script_gives_to_a_program_is_read(line: str, table: dict[str, Any], tmp_path: Path) -> None:
    """As if it were named itself; so it is where a job of SkyPilot has the line."""
    folder = written(tmp_path, job_yaml=table, run_sh=f"{line}\n", sky_yaml=SKY | {"run": line})
    for name in ("run.sh", "sky.yaml"):
        found = call("predict", str(folder / name), "--hardware", "dgx-h100:2", "--json").document
        alone = call("predict", str(folder / "job.yaml"), "--hardware", "dgx-h100:2", "--json").document
        assert found["layout"] == alone["layout"]
        assert found["memory"] == alone["memory"]


TUNE: dict[str, Any] = {
    "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}, "tokenizer": {"max_seq_len": 2048}, "optimizer": {"_component_": "torch.optim.AdamW"},
    "batch_size": 2, "gradient_accumulation_steps": 4, "dtype": "bf16", "enable_activation_checkpointing": True, "compile": False,
}  # fmt: skip
RUN = "tune run --nproc_per_node 8 full_finetune_distributed --config"


def weighed(folder: Path, name: str, machines: str = "dgx-h100") -> dict[str, Any]:
    """What `predict` says of a file that names its model."""
    found: dict[str, Any] = call("predict", str(folder / name), "--hardware", machines, "--json").document
    return found


@pytest.mark.parametrize("table", [AXOLOTL | {"optimizer": "paged_adamw_8bit"}, FACTORY | {"optim": "adamw_bnb_8bit"}, TUNE | {"optimizer": {"_component_": "torchao.optim.AdamW8bit"}}], ids=["axolotl", "llama-factory", "torchtune"])  # fmt: skip
def test_the_optimizer_of_a_file_is_weighed(table: dict[str, Any], tmp_path: Path) -> None:
    """Moments of eight bits hold what `--optimizer adamw8bit` says, unless another one is named beside the file."""
    folder = written(tmp_path, job_yaml=table)
    path = str(folder / "job.yaml")
    own = weighed(folder, "job.yaml")
    named = {name: call("predict", path, "--hardware", "dgx-h100", "--optimizer", name, "--json").document for name in ("adamw", "adamw8bit")}  # fmt: skip
    assert own["workload"]["optimizer"] == "adamw8bit"
    assert own["memory"] == named["adamw8bit"]["memory"]
    assert own["memory"]["peak"]["value"] < named["adamw"]["memory"]["peak"]["value"]


@pytest.mark.parametrize("table", [AXOLOTL | {"torch_compile": True}, FACTORY | {"torch_compile": True}, TUNE | {"compile": True}, TUNE | {"compile": {"loss": True}}], ids=["axolotl", "llama-factory", "torchtune", "torchtune's parts"])  # fmt: skip
def test_a_file_that_compiles_is_weighed_with_compiled_kernels(table: dict[str, Any], tmp_path: Path) -> None:
    """Memory-bound work is fused then: it moves fewer bytes, and matrix products are what they were."""
    folder = written(tmp_path, job_yaml=table, eager_yaml={key: said for key, said in table.items() if "compile" not in key})  # fmt: skip
    fused, eager = (exposed(weighed(folder, name)) for name in ("job.yaml", "eager.yaml"))
    assert fused["elementwise"] < 0.6 * eager["elementwise"]
    assert fused["matmul"] == eager["matmul"]


@pytest.mark.parametrize(
    ("table", "key"), [(AXOLOTL, "optimizer"), (FACTORY, "optim")], ids=["axolotl", "llama-factory"]
)
def test_an_update_in_one_kernel_is_quicker_than_operations_of_torch(
    table: dict[str, Any], key: str, tmp_path: Path
) -> None:
    """As the file names it, and as Transformers does where nothing is said; the operations make roots of all second moments as well."""
    silent = {name: said for name, said in table.items() if name != key}
    plain, fused = (table | {key: name} for name in ("adamw_torch", "adamw_torch_fused"))
    folder = written(tmp_path, silent_yaml=silent, plain_yaml=plain, fused_yaml=fused)
    update, others, usual = (
        exposed(weighed(folder, f"{name}.yaml"))["optimizer"] for name in ("fused", "plain", "silent")
    )
    assert update < 0.6 * others
    assert usual == update


def test_torchtune_shards_where_there_is_a_second_device(tmp_path: Path) -> None:
    """With bf16 everything rests in it: two bytes each for weights, gradients and both moments."""
    folder = written(tmp_path, job_yaml=TUNE, kept_yaml=TUNE | {"fsdp_reshard_after_forward": False})
    found = weighed(folder, "job.yaml")
    assert (found["model"]["name"], found["framework"]) == ("llama-3.2-1b", "torchtune")
    assert (found["strategy"]["zero"], found["mesh"]["dp_shard"], found["strategy"]["recompute"]) == (3, 8, "full")
    assert (found["strategy"]["micro_batch"], found["workload"]["global_batch"], found["workload"]["seq_len"]) == (2, 64, 2048)  # fmt: skip
    assert set(found["strategy"]["formats"].values()) == {"bfloat16", "none"}
    assert weighed(folder, "kept.yaml")["strategy"]["zero"] == 2


@pytest.mark.parametrize(
    ("model", "method", "targets"),
    [
        ({"_component_": "torchtune.models.llama3_2.lora_llama3_2_1b", "lora_attn_modules": ["q_proj", "output_proj"], "apply_lora_to_mlp": True, "lora_rank": 64}, "lora", ["q", "o", "gate", "up", "down"]),
        ({"_component_": "torchtune.models.llama3_2.qlora_llama3_2_1b", "lora_attn_modules": ["q_proj"], "lora_rank": 64}, "qlora", ["q"]),
    ],
)  # fmt: skip
def test_torchtune_s_adapters_are_weighed(
    model: dict[str, Any], method: str, targets: list[str], tmp_path: Path
) -> None:
    """The builder's name says what is trained, and its arguments which matrices."""
    adapters = weighed(written(tmp_path, job_yaml=TUNE | {"model": model}), "job.yaml")["model"]["adapters"]
    assert (adapters["method"], adapters["rank"], list(adapters["targets"])) == (method, 64, targets)


def test_words_behind_a_configuration_win(tmp_path: Path) -> None:
    """`tune run` puts them into the file, by places joined by dots; a component is replaced by its name; a tilde takes a key out."""
    line = f"{RUN} job.yaml batch_size=1 tokenizer.max_seq_len=1024 optimizer=torch.optim.SGD ~fsdp_reshard_after_forward\n"
    folder = written(tmp_path, job_yaml=TUNE | {"fsdp_reshard_after_forward": False}, run_sh=line, sky_yaml=SKY | {"num_nodes": 1, "run": line})  # fmt: skip
    for name in ("run.sh", "sky.yaml"):
        found = weighed(folder, name)
        assert (found["strategy"]["micro_batch"], found["workload"]["seq_len"]) == (1, 1024)
        assert (found["workload"]["optimizer"], found["strategy"]["zero"]) == ("sgd", 3)


def test_a_configuration_that_torchtune_brings_along_is_known_by_its_name(tmp_path: Path) -> None:
    """`tune run` looks there before it looks for a file."""
    folder = written(tmp_path, run_sh=f"{RUN} llama3_1/8B_lora batch_size=3\n")
    found = weighed(folder, "run.sh")
    assert (found["model"]["name"], found["model"]["adapters"]["rank"]) == ("llama-3.1-8b", 8)
    assert (found["strategy"]["micro_batch"], found["strategy"]["accumulation"]) == (3, 8)


@pytest.mark.parametrize("more", [{"teacher_model": {}}, {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}])
def test_torchtune_s_recipes_with_a_second_model_are_refused(more: dict[str, Any], tmp_path: Path) -> None:
    """Nobody counted what the teacher, or the reference, holds."""
    folder = written(tmp_path, job_yaml=TUNE | more)
    refused = call("predict", str(folder / "job.yaml"), "--hardware", "dgx-h100", "--json")
    assert (refused.code, refused.document["error"]["code"]) == (2, "E_KIND")


def exposed(found: dict[str, Any]) -> dict[str, int]:
    """Predicted nanoseconds by term, exposed ones."""
    return {term["name"]: term["exposed_ns"] for term in found["time"]["terms"]}


MEGATRON = "--tensor-model-parallel-size 2 --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 64 --fp16 --vocab-size 32000"  # fmt: skip


@pytest.mark.parametrize(
    ("more", "zero"), [("--zero-stage 2", 2), ("--deepspeed_config ds.json", 3), ("--deepspeed_config nowhere.json", 1)]
)
def test_deepspeed_keeps_the_states_of_megatron_deepspeed(more: str, zero: int, tmp_path: Path) -> None:
    """As its file says, or the stage among the arguments; its arguments are no strangers among Megatron's."""
    engine = json.dumps({"train_batch_size": 64, "zero_optimization": {"stage": 3}})
    line = f"export CUDA_DEVICE_MAX_CONNECTIONS=1\ntorchrun --nproc_per_node 8 pretrain_gpt.py {MEGATRON} --deepspeed --deepspeed-activation-checkpointing {more}\n"  # fmt: skip
    folder = written(tmp_path, ds_json=engine, run_sh=line)
    found = call("predict", str(folder / "run.sh"), "--hardware", "dgx-h100", "--json").document
    assert (found["framework"], found["strategy"]["zero"], found["mesh"]["dp_shard"]) == ("megatron-deepspeed", zero, 4)
    assert found["strategy"]["recompute"] == "full"
    assert rules(folder, "run.sh") == []


@pytest.mark.parametrize(
    ("words", "recompute"),
    [("--recompute-activations", "selective"), ("--recompute-activations --recompute-granularity full --recompute-method uniform", "selective"), ("", "none")],
)  # fmt: skip
def test_megatron_s_switch_for_selective_recomputation_counts(words: str, recompute: str, tmp_path: Path) -> None:
    """It sets --recompute-granularity to selective, whatever else is said (Megatron-LM d98e8a6, training/arguments.py)."""
    folder = written(tmp_path, run_sh=f"torchrun --nproc_per_node 8 pretrain_gpt.py {MEGATRON} {words}\n")
    found = call("predict", str(folder / "run.sh"), "--hardware", "dgx-h100", "--json").document
    assert found["strategy"]["recompute"] == recompute


TITANS = "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b --training.local_batch_size 2 --training.seq_len 4096"


@pytest.mark.parametrize(
    ("unsaid", "said", "beside"),
    [
        ("--parallelism.tensor_parallel_degree $1", "--parallelism.tensor_parallel_degree 2", "tp=2,sequence_parallel=1"),
        ("--parallelism.pipeline_parallel_degree $1", "--parallelism.pipeline_parallel_degree 2", "pp=2,zero=2,micro_batch=1,accumulation=2"),
        ("--parallelism.data_parallel_shard_degree $1", "--parallelism.data_parallel_shard_degree 8", "dp_shard=8,zero=3"),
        ("--parallelism.context_parallel_degree $1", "--parallelism.context_parallel_degree 2", "cp=2,zero=3"),
        ("--training.global_batch_size $1", "--training.global_batch_size 64", "accumulation=4"),
    ],
)  # fmt: skip
def test_what_flags_of_torchtitan_do_not_say_is_asked_for(unsaid: str, said: str, beside: str, tmp_path: Path) -> None:
    """With that and what follows from it beside the script, it is the one that is written out; without, nothing is weighed."""
    folder = written(tmp_path, open_sh=f"{TITANS} {unsaid}\n", run_sh=f"{TITANS} {said}\n")
    refused = weighed(folder, "open.sh")["error"]
    assert (refused["code"], unsaid in refused["message"]) == ("E_MISSING", True)
    found = call("predict", str(folder / "open.sh"), "--hardware", "dgx-h100", "--strategy", beside, "--json").document
    whole = weighed(folder, "run.sh")
    assert [found[part] for part in ("layout", "workload", "memory")] == [whole[part] for part in ("layout", "workload", "memory")]  # fmt: skip


def test_what_a_program_with_trainer_s_arguments_is_not_told_is_asked_for(tmp_path: Path) -> None:
    """A number of accumulated micro-batches that the script does not say was one."""
    line = "torchrun --nproc_per_node 8 train.py --model_name_or_path meta-llama/Llama-3.2-1B --bf16 True --per_device_train_batch_size 1 --gradient_accumulation_steps"  # fmt: skip
    folder = written(tmp_path, open_sh=f"{line} $2\n", run_sh=f"{line} 4\n")
    assert weighed(folder, "open.sh")["error"]["code"] == "E_MISSING"
    found = call("predict", str(folder / "open.sh"), "--hardware", "dgx-h100", "--grad-accum", "4", "--json").document
    assert found["memory"] == weighed(folder, "run.sh")["memory"]
    assert found["workload"]["global_batch"] == 4 * 8
