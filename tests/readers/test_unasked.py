"""What a framework does unasked counts, and so do other words for the same job: such files come to what the words written out come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import call
from tests.readers.reading import read_file
from tests.readers.test_as_written import AXOLOTL, FACTORY, rules, weighed, written

ENGINE: dict[str, Any] = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3},
}  # fmt: skip
LINE = "--model_name_or_path meta-llama/Llama-3.2-1B --dataset_name x --per_device_train_batch_size 2 --output_dir out"
RUN = "torchrun --nproc_per_node 8"
SFT: dict[str, Any] = {"per_device_train_batch_size": 2, "packing": True, "output_dir": "out"}
WHOLE = {"gradient_checkpointing": True, "bf16": True, "max_length": 1024}
WORDS = "--gradient_checkpointing --bf16 True --max_length 1024"
MODEL = {"model_name_or_path": "meta-llama/Llama-3.2-1B"}


def same(folder: Path, short: str, long: str) -> bool:
    """Whether two files come to the same layout, memory and time."""
    one, other = weighed(folder, short), weighed(folder, long)
    return all(one[part] == other[part] for part in ("layout", "memory", "time", "workload"))


@pytest.mark.parametrize(
    "start",
    ["trl sft", "accelerate launch --multi_gpu --num_processes 8 trl/scripts/sft.py", f"{RUN} -m trl.scripts.sft", f"{RUN} sft.py --packing"],
)  # fmt: skip
def test_trl_recomputes_in_bf16_on_short_sequences_unasked(start: str, tmp_path: Path) -> None:
    """Its command, its script and a program with a key of its own come to what its defaults written out come to."""
    folder = written(tmp_path, short_sh=f"{start} {LINE}\n", long_sh=f"{start} {LINE} {WORDS}\n")
    assert same(folder, "short.sh", "long.sh")


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ({}, {}),
        ({"max_length": 512}, {"max_length": 512}),
        ({"fp16": True, "bf16": None}, {"fp16": True, "bf16": False}),
        ({"gradient_checkpointing": False}, {"gradient_checkpointing": False}),
        ({"activation_checkpointing": False}, {"gradient_checkpointing": False}),
    ],
)
@pytest.mark.parametrize("model", [MODEL, {}], ids=["recipe", "SFTConfig"])
def test_trl_s_file_has_its_defaults_too(
    said: dict[str, Any], changes: dict[str, Any], model: dict[str, Any], tmp_path: Path
) -> None:
    """Where it says nothing; what it says counts."""
    folder = written(tmp_path, short_yaml=SFT | model | said, long_yaml=SFT | model | WHOLE | changes)
    short, long = (read_file(folder / name, 8) for name in ("short.yaml", "long.yaml"))
    assert short.says == long.says
    assert short.findings == long.findings == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("zero3", "--use_deepspeed --zero_stage 3"),
        ("zero2", "--use_deepspeed --zero_stage 2"),
        ("fsdp2", "--use_fsdp --fsdp_version 2"),
        ("multi_gpu", "--multi_gpu"),
        ("accelerate.yaml", "--use_fsdp --fsdp_version 2 --fsdp_offload_params true"),
    ],
)
def test_what_trl_launches_with_is_what_accelerate_does(named: str, options: str, tmp_path: Path) -> None:
    """A file that TRL brings along by its name, or one by its path, on the line or in a recipe."""
    table = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}}
    folder = written(
        tmp_path,
        accelerate_yaml=table,
        short_sh=f"trl sft {LINE} --accelerate_config {named}\n",
        recipe_yaml=SFT | MODEL | {"accelerate_config": named},
        file_sh="trl sft --config recipe.yaml\n",
        long_sh=f"accelerate launch {options} --num_processes 8 trl/scripts/sft.py {LINE}\n",
    )
    assert same(folder, "short.sh", "long.sh")
    assert same(folder, "file.sh", "long.sh")


def test_a_program_that_is_not_trl_s_has_trainer_s_defaults(tmp_path: Path) -> None:
    """Of transformers' example nothing is recomputed, and it computes in fp32; a switch of TRL's that is on is turned off with no_."""
    folder = written(
        tmp_path,
        clm_sh=f"{RUN} run_clm.py {LINE} --block_size 1024\n",
        off_sh=f"trl sft {LINE} --no_gradient_checkpointing\n",
    )
    of_trainer, off = (read_file(folder / name, 8).says for name in ("clm.sh", "off.sh"))
    assert (of_trainer["recompute"], of_trainer["compute"]) == ("none", "float32")
    assert (off["recompute"], off["compute"]) == ("none", "bfloat16")


def test_a_recipe_without_a_model_is_read_beside_its_line(tmp_path: Path) -> None:
    """The line names the model, the recipe the batch."""
    folder = written(
        tmp_path,
        recipe_yaml=SFT | {"dataset_name": "x"},
        run_sh="trl sft --config recipe.yaml --model_name_or_path meta-llama/Llama-3.2-1B\n",
        whole_yaml=SFT | MODEL | WHOLE,
    )
    assert same(folder, "run.sh", "whole.yaml")


@pytest.mark.parametrize(("table", "key", "usual"), [(FACTORY, "cutoff_len", 2048), (AXOLOTL, "sequence_len", 512)])
def test_sequences_are_as_long_as_the_framework_makes_them(
    table: dict[str, Any], key: str, usual: int, tmp_path: Path
) -> None:
    """Where the file does not say how long."""
    short = {name: word for name, word in (table | {"sample_packing": True}).items() if name != key}
    folder = written(tmp_path, short_yaml=short, long_yaml=short | {key: usual})
    assert read_file(folder / "short.yaml", 8).says == read_file(folder / "long.yaml", 8).says
    assert read_file(folder / "short.yaml", 8).says["seq_len"] == usual


@pytest.mark.parametrize(
    "start", ["llamafactory-cli train", f"{RUN} src/train.py", "deepspeed --num_gpus 8 src/train.py"]
)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_llama_factory_s_arguments_on_a_line_are_those_of_its_file(start: str, kind: str, tmp_path: Path) -> None:
    """What is trained, recomputation and the length of sequences among them."""
    table = FACTORY | {"finetuning_type": kind}
    words = " ".join(f"--{name} {word}" for name, word in table.items())
    folder = written(tmp_path, job_yaml=table, run_sh=f"{start} {words}\n")
    assert same(folder, "run.sh", "job.yaml")
    assert rules(folder, "run.sh") == rules(folder, "job.yaml") + ["deepspeed-local-rank"] * start.startswith(
        "deepspeed"
    )


@pytest.mark.parametrize(
    ("said", "targets", "rank", "method"),
    [
        ({"use_peft": True, "lora_target_modules": ["q_proj", "k_proj", "v_proj"]}, ["q", "k", "v"], 16, "lora"),
        ({"use_peft": True, "lora_target_modules": "all-linear"}, ["q", "k", "v", "o", "gate", "up", "down"], 16, "lora"),
        ({"use_peft": True}, ["q", "v"], 16, "lora"),
        ({"use_peft": True, "model_name_or_path": "microsoft/phi-2"}, ["q", "v", "up", "down"], 16, "lora"),
        ({"lora_enable": True}, ["q", "k", "v", "o", "gate", "up", "down"], 64, "lora"),
        ({"lora_enable": True, "lora_r": 128, "bits": 4}, ["q", "k", "v", "o", "gate", "up", "down"], 128, "qlora"),
        ({"q_lora": True}, ["q", "v"], 8, "qlora"),
    ],
)  # fmt: skip
def test_adapters_stand_where_the_program_puts_them(
    said: dict[str, Any], targets: list[str], rank: int, method: str, tmp_path: Path
) -> None:
    """Beside the matrices that are named, or those that PEFT takes for the kind of the model, FastChat's two, all of LLaVA's."""
    table = MODEL | {"per_device_train_batch_size": 2, "bf16": True, "output_dir": "out"} | said
    words = " ".join(f"--{name} {' '.join(word) if isinstance(word, list) else word}" for name, word in table.items())
    folder = written(tmp_path, job_yaml=table, run_sh=f"{RUN} train.py {words}\n")
    for name in ("job.yaml", "run.sh"):
        adapters = weighed(folder, name)["model"]["adapters"]
        assert (list(adapters["targets"]), adapters["rank"], adapters["method"]) == (targets, rank, method)


def test_formats_that_somebody_fills_in_are_not_fp32(tmp_path: Path) -> None:
    """DeepSpeed's file with "auto" alone leaves the precision to the usual one, which is printed as an assumption."""
    folder = written(
        tmp_path,
        auto_yaml=ENGINE,
        bf16_yaml=ENGINE | {"bf16": {"enabled": True}},
        fp32_yaml=ENGINE | {"bf16": {"enabled": False}},
    )
    job = ("--model", "llama-3.2-1b", "--hardware", "dgx-h100", "--micro-batch", "2", "--json")
    auto, bf16, fp32 = (
        call("predict", str(folder / f"{name}.yaml"), *job).document for name in ("auto", "bf16", "fp32")
    )
    assert auto["memory"] == bf16["memory"] != fp32["memory"]
    assert "precision" in [one["what"] for one in auto["assumptions"]]
    assert "precision" not in [one["what"] for one in bf16["assumptions"]]


@pytest.mark.parametrize("word", ["Adam", "AdamW", "SGD"])
def test_deepspeed_s_optimizer_is_the_one_that_is_counted(word: str, tmp_path: Path) -> None:
    """In its own file, and before the one that whoever names the file would make."""
    engine = ENGINE | {"bf16": {"enabled": True}, "optimizer": {"type": word}}
    arguments = MODEL | {"per_device_train_batch_size": 2, "bf16": True, "output_dir": "out", "optim": "adamw_bnb_8bit"}
    folder = written(
        tmp_path,
        zero_yaml=engine,
        job_yaml=arguments | {"deepspeed": "zero.yaml"},
        axolotl_yaml=AXOLOTL | {"deepspeed": "zero.yaml", "optimizer": "adamw_bnb_8bit"},
        run_sh=f"accelerate launch --use_deepspeed --deepspeed_config_file zero.yaml train.py {LINE} --optim adamw_bnb_8bit\n",
    )
    counted = "sgd" if word == "SGD" else "adamw"
    for name in ("zero.yaml", "job.yaml", "axolotl.yaml", "run.sh"):
        assert read_file(folder / name, 8).says["optimizer"] == counted


def test_accelerate_s_ulysses_cuts_sequences(tmp_path: Path) -> None:
    """Two ranks share a sequence, as in DeepSpeed's own words, and the batch is that of half as many replicas."""
    table = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 8, "num_machines": 1, "mixed_precision": "bf16",
        "deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 1}, "parallelism_config": {"parallelism_config_sp_size": 2},
    }  # fmt: skip
    folder = written(tmp_path, accelerate_yaml=table)
    job = ("--model", "llama-3.2-1b", "--hardware", "dgx-h100", "--micro-batch", "2", "--json")
    found = call("predict", str(folder / "accelerate.yaml"), *job).document
    assert (found["mesh"]["cp"], found["mesh"]["dp_shard"], found["strategy"]["context_parallel"]) == (
        2,
        4,
        "all-to-all",
    )
    assert found["workload"]["global_batch"] == 2 * 4


@pytest.mark.parametrize(
    ("older", "now"),
    [
        ({"fsdp": ["shard_grad_op", "offload"]}, {"fsdp": True, "fsdp_config": {"reshard_after_forward": False, "cpu_offload": True}}),
        ({"fsdp": ["full_shard", "auto_wrap"]}, {"fsdp": True, "fsdp_config": {"reshard_after_forward": True}}),
        ({"fsdp": []}, {}),
    ],
)  # fmt: skip
def test_fsdp_s_words_in_a_list_are_read(older: dict[str, Any], now: dict[str, Any], tmp_path: Path) -> None:
    """As in a text, and as today's switches."""
    table = {"per_device_train_batch_size": 2, "bf16": True}
    texts = {name: " ".join(word) if isinstance(word, list) else word for name, word in older.items()}
    folder = written(tmp_path, list_yaml=table | older, text_yaml=table | texts, now_yaml=table | now)
    listed, text, today = (read_file(folder / f"{name}.yaml", 8).says for name in ("list", "text", "now"))
    assert listed == text == today


@pytest.mark.parametrize(
    ("said", "stage"),
    [
        ({"fsdp": ["shard_grad_op", "auto_wrap"], "fsdp_config": {"fsdp_offload_params": False}}, 2),
        ({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, 2),
        ({"fsdp_config": {"sharding_strategy": "HYBRID_SHARD"}}, 3),
        ({"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True}}, 3),
        ({"fsdp": "full_shard auto_wrap"}, 3),
    ],
)
def test_axolotl_s_strategies_say_the_stage(said: dict[str, Any], stage: int, tmp_path: Path) -> None:
    """Under fsdp, and under fsdp_config with or without the older prefix; today's switch wins."""
    folder = written(tmp_path, job_yaml=AXOLOTL | said)
    assert read_file(folder / "job.yaml", 8).says["zero"] == stage


@pytest.mark.parametrize(
    "section",
    [{}, {"sharding_strategy": "no_shard"}, {"sharding_strategy": "NO_SHARD", "data_parallel_shard_degree": -1}],
)
def test_composer_s_fsdp_that_shards_nothing_replicates(section: dict[str, Any], tmp_path: Path) -> None:
    """Whole weights on every rank are replicas, with a section of FSDP as without one."""
    job = {"device_train_microbatch_size": 2, "precision": "amp_bf16", "parallelism_config": {"fsdp": section}}
    says = read_file(written(tmp_path, job_yaml=job) / "job.yaml", 8).says
    assert [says.get(name) for name in ("zero", "dp_replicate", "dp_shard")] == [0, 8, None]


def test_a_line_without_a_batch_has_trainer_s(tmp_path: Path) -> None:
    """Eight sequences per device; the line names the model."""
    bare = LINE.replace("--per_device_train_batch_size 2 ", "")
    folder = written(
        tmp_path,
        short_sh=f"{RUN} run_clm.py {bare} --bf16\n",
        long_sh=f"{RUN} run_clm.py {bare} --bf16 --per_device_train_batch_size 8\n",
        batch_sh=f"{RUN} run_clm.py {bare} --bf16 --per_device_train_batch_size $BATCH\n",
    )
    assert same(folder, "short.sh", "long.sh")
    assert "micro_batch" not in read_file(folder / "batch.sh", 8).says


def test_a_script_that_only_names_a_model_and_a_folder_trains_nothing(tmp_path: Path) -> None:
    """What converts or merges weights has both; it says no layout, and no batch."""
    folder = written(tmp_path, run_sh="python merge.py --model_name_or_path gpt2 --output_dir out\n")
    assert read_file(folder / "run.sh", 8).says == {}


def test_what_a_task_of_skypilot_sets_is_put_into_its_commands(tmp_path: Path) -> None:
    """Variables under envs, as the task's shell has them; one without a value is whoever's who starts it."""
    task = {
        "resources": {"accelerators": "H100:8"},
        "envs": {"MODEL": "meta-llama/Llama-3.2-1B", "BATCH": 4, "TOKEN": None},
    }
    line = f"{RUN} train.py --model_name_or_path $MODEL --per_device_train_batch_size $BATCH --bf16\n"
    plain = line.replace("$MODEL", "meta-llama/Llama-3.2-1B").replace("$BATCH", "4")
    folder = written(tmp_path, task_yaml=task | {"run": line}, run_sh=plain)
    assert same(folder, "task.yaml", "run.sh")
