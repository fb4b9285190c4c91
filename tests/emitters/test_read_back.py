"""What the files of frameworks say, read back by other code, is what the plan says: nothing is dropped or changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml

from strategist import StrategistError, emit
from strategist.document.plan import Mesh, Plan, Strategy
from strategist.emitters import EMITTERS, find_emitter
from strategist.emitters import emit as emit_files
from strategist.emitters.coverage import plain_values
from strategist.emitters.emitter import Options
from strategist.facts.model import ModelShape
from tests.emitters.grid import COMMON, grid, plan_for, plan_on, targets, written
from tests.plans import BFLOAT16, FLOAT32, tiny_llama, tiny_mixtral

FLOAT16 = replace(FLOAT32, compute="float16")
LOW_THROUGHOUT = replace(BFLOAT16, parameter="bfloat16", gradient="bfloat16", master="float32")
LOW_REDUCE = replace(BFLOAT16, reduce="bfloat16")
FOLDER = "/mnt/drive-0"
Said = dict[str, Any]
Files = Mapping[PurePosixPath, str]
LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "no": "float32"}


def from_deepspeed(files: Files) -> Said:
    """DeepSpeed's JSON: the batch, ZeRO, what is offloaded, formats."""
    text = json.loads(files[PurePosixPath("deepspeed.json")])
    zero, batch = text["zero_optimization"], text["train_batch_size"]
    offload = "parameters" if "offload_param" in zero else "optimizer" if "offload_optimizer" in zero else "none"
    micro, accumulation = text["train_micro_batch_size_per_gpu"], text["gradient_accumulation_steps"]
    devices = {name: place["device"] for name, place in zero.items() if name.startswith("offload")}
    if "nvme" in devices.values():
        assert devices == {
            "offload_optimizer": "nvme",
            "offload_param": "cpu",
        }  # weights and gradients stay on the host
        assert zero["offload_optimizer"]["nvme_path"] == FOLDER
        offload = "nvme"
    assert set(devices.values()) <= {"cpu", "nvme"}
    assert ("aio" in text) == (offload == "nvme")
    said = {"zero": zero["stage"], "offload": offload, "micro_batch": micro, "accumulation": accumulation}
    tensors = text.get("tensor_parallel", {"autotp_size": 1, "vocab_parallel_lm_head": True})
    assert tensors["vocab_parallel_lm_head"]
    said["tp"] = tensors["autotp_size"]
    return said | {"data_parallel": batch // micro // accumulation, "batch": batch} | deepspeed_formats(text)


def deepspeed_formats(text: Said) -> Said:
    """Weights, reduction and compute by DeepSpeed's sections."""
    if "torch_autocast" in text:
        low = text["torch_autocast"]["dtype"]
        reduce = "float32" if text["torch_autocast"].get("lower_precision_safe_modules") == [] else low
        return {"parameter": "float32", "gradient": "float32", "reduce": reduce, "compute": low}
    for short in ("bf16", "fp16"):
        if text.get(short, {}).get("enabled"):
            low, gradient = LONG[short], LONG[text["data_types"]["grad_accum_dtype"]]
            reduce = LONG[text["communication_data_type"]]
            return {"parameter": low, "gradient": gradient, "reduce": reduce, "compute": low}
    return dict.fromkeys(("parameter", "gradient", "reduce", "compute"), "float32")


def from_accelerate(files: Files) -> Said:
    """Accelerate's YAML, and DeepSpeed's JSON where it points to it."""
    text = yaml.safe_load(files[PurePosixPath("accelerate.yaml")])
    tensors = text.get("parallelism_config", {}).get("parallelism_config_tp_size", 1)
    said: Said = {"data_parallel": text["num_processes"] // tensors, "nodes": text["num_machines"], "tp": tensors}
    said["compile"] = text.get("dynamo_config", {}).get("dynamo_backend") == "INDUCTOR"
    kind = text["distributed_type"]
    if kind == "DEEPSPEED":
        assert PurePosixPath(text["deepspeed_config"]["deepspeed_config_file"]) in files
        assert "mixed_precision" not in text
        return said | from_deepspeed(files)
    said["compute"] = LONG[text["mixed_precision"]]
    if tensors > 1:
        cut = from_distributed_config(files, said["compute"])
        assert text["parallelism_config"]["parallelism_config_dp_shard_size"] == cut["dp_replicate"] * cut["dp_shard"]
        return said | cut
    if kind != "FSDP":
        assert kind == ("MULTI_GPU" if said["data_parallel"] > 1 else "NO")
        return said | {"zero": 0, "offload": "none"}
    section, sizes = text["fsdp_config"], text.get("parallelism_config", {})
    assert section["fsdp_version"] == 2
    return said | {
        "zero": 3 if section["fsdp_reshard_after_forward"] else 2,
        "offload": "parameters" if section["fsdp_offload_params"] else "none",
        "recompute": "full" if section["fsdp_activation_checkpointing"] else "none",
        "dp_replicate": sizes.get("parallelism_config_dp_replicate_size", 1),
        "dp_shard": sizes.get("parallelism_config_dp_shard_size", said["data_parallel"]),
    }


def from_distributed_config(files: Files, compute: str) -> Said:
    """Transformers' DistributedConfig; its policy of FSDP2 goes with bfloat16 that is reduced over other ranks."""
    text = json.loads(files[PurePosixPath("distributed.json")])
    said = {"dp_replicate": text["dp_replicate_size"], "dp_shard": text["fsdp_size"], "tp": text["tp_size"]}
    over_others = said["dp_replicate"] * said["dp_shard"] > 1
    assert text["fsdp_mixed_precision"] == (compute == "bfloat16" and over_others)
    return said | {"reduce": "float32", "offload": "none"}


def from_transformers(files: Files, name: str = "training.json") -> Said:
    """The fields of TrainingArguments."""
    text = json.loads(files[PurePosixPath(name)])
    section = text.get("fsdp_config")
    recompute = section["activation_checkpointing"] if section else text.get("gradient_checkpointing", False)
    assert bool(text.get("fsdp")) == bool(section)
    said = {
        "micro_batch": text["per_device_train_batch_size"],
        "accumulation": text["gradient_accumulation_steps"],
        "optimizer": {"adamw_torch": "adamw", "sgd": "sgd", "adamw_bnb_8bit": "adamw8bit"}[text["optim"]],
        "compute": "bfloat16" if text["bf16"] else "float16" if text["fp16"] else "float32",
        "backend": "gloo" if text["use_cpu"] else "nccl",
        "compile": text["torch_compile"],
        "recompute": "full" if recompute else "none",
    }
    if PurePosixPath("distributed.json") in files:
        assert section is None
        return said | from_distributed_config(files, said["compute"])
    return said | {
        "zero": 0 if not section else 3 if section["reshard_after_forward"] else 2,
        "offload": "parameters" if section and section["cpu_offload"] else "none",
        "tp": 1,
    }


def from_trl(files: Files) -> Said:
    """The fields of SFTConfig, which are those of TrainingArguments and more."""
    text = json.loads(files[PurePosixPath("sft.json")])
    assert (text["packing"], text["dataset_kwargs"]) == (False, {"skip_prepare_dataset": True})
    said = from_transformers(files, "sft.json") | {"seq_len": text["max_length"]}
    return said if "fsdp" in text else said | {"recompute": "full" if text["gradient_checkpointing"] else "none"}


def from_llama_factory(files: Files) -> Said:
    """LLaMA-Factory's YAML, and DeepSpeed's JSON where it points to it."""
    text = yaml.safe_load(files[PurePosixPath("llama_factory.yaml")])
    assert (text["stage"], text["finetuning_type"], "packing" in text) == ("pt", "full", False)
    said = {
        "micro_batch": text["per_device_train_batch_size"],
        "accumulation": text["gradient_accumulation_steps"],
        "seq_len": text["cutoff_len"],
        "optimizer": {"adamw_torch": "adamw", "sgd": "sgd"}[text["optim"]],
        "compute": "bfloat16" if text["bf16"] else "float16" if text["fp16"] else "float32",
        "backend": "gloo" if text["use_cpu"] else "nccl",
        "compile": text["torch_compile"],
        "recompute": "none" if text["disable_gradient_checkpointing"] else "full",
    }
    return said | zero_beside(files, text)


def from_axolotl(files: Files) -> Said:
    """axolotl's YAML, and DeepSpeed's JSON where it points to it."""
    text = yaml.safe_load(files[PurePosixPath("axolotl.yaml")])
    assert (text["fp16"], text["tf32"], text["sample_packing"]) == (False, False, False)
    said = {
        "micro_batch": text["micro_batch_size"],
        "accumulation": text["gradient_accumulation_steps"],
        "seq_len": text["sequence_len"],
        "optimizer": {"adamw_torch": "adamw", "sgd": "sgd"}[text["optimizer"]],
        "compute": "bfloat16" if text["bf16"] else "float32",
        "compile": text["torch_compile"],
        "recompute": "full" if text["gradient_checkpointing"] else "none",
    }
    return said | zero_beside(files, text)


SHARDED = {"SHARD_GRAD_OP": 2, "_HYBRID_SHARD_ZERO2": 2, "FULL_SHARD": 3, "HYBRID_SHARD": 3}
"""Composer's kinds of FSDP."""


def fsdp_of_composer(section: Said | None) -> Said:
    """What Composer's section of FSDP says; without one there are replicas alone."""
    if section is None:
        return {"zero": 0, "dp_shard": 1}
    hybrid = "data_parallel_shard_degree" in section
    assert hybrid == ("HYBRID" in section["sharding_strategy"])
    degrees = {"dp_shard": section["data_parallel_shard_degree"]} if hybrid else {"dp_replicate": 1}
    return {"zero": SHARDED[section["sharding_strategy"]], **degrees}


def from_composer(files: Files) -> Said:
    """The arguments that the script hands to Composer's Trainer."""
    text = json.loads(files[PurePosixPath("composer.json")])
    return fsdp_of_composer(text.get("parallelism_config", {}).get("fsdp")) | {
        "backend": {"gpu": "nccl", "cpu": "gloo"}[text["device"]],
        "compute": LONG[text["precision"].removeprefix("amp_")],
        "micro_batch": text["device_train_microbatch_size"],
    }


def from_llm_foundry(files: Files) -> Said:
    """llm-foundry's YAML; its precision alone decides the format of compute, its section of FSDP that of reduction."""
    text = yaml.safe_load(files[PurePosixPath("llm_foundry.yaml")])
    section = text.get("fsdp_config")
    compute = LONG[text["precision"].removeprefix("amp_")]
    lengths = {text["max_seq_len"], text["tokenizer"]["kwargs"]["model_max_length"]}
    assert lengths == {text["train_loader"]["dataset"]["max_seq_len"]}
    return fsdp_of_composer(section) | {
        "compute": compute,
        "reduce": compute if section and section["mixed_precision"] == "PURE" else "float32",
        "recompute": "full" if section and section["activation_checkpointing"] else "none",
        "micro_batch": text["device_train_microbatch_size"],
        "batch": text["global_train_batch_size"],
        "seq_len": text["max_seq_len"],
        "optimizer": {"decoupled_adamw": "adamw"}[text["optimizer"]["name"]],
    }


def zero_beside(files: Files, text: Said) -> Said:
    """What DeepSpeed's file says where a front end names it; without it there are replicas alone."""
    named = text.get("deepspeed") == "deepspeed.json"
    assert named == (PurePosixPath("deepspeed.json") in files)
    return from_deepspeed(files) if named else {"zero": 0, "offload": "none", "dp_shard": 1}


READERS: dict[str, Callable[[Files], Said]] = {
    "accelerate": from_accelerate,
    "deepspeed": from_deepspeed,
    "transformers": from_transformers,
    "trl": from_trl,
    "llama-factory": from_llama_factory,
    "axolotl": from_axolotl,
    "composer": from_composer,
    "llm-foundry": from_llm_foundry,
}
"""Targets with a file in their framework's own language."""

WITHOUT_OFFLOAD = ("llama-factory", "axolotl", "composer", "llm-foundry")


def from_kubernetes(files: Files) -> Said:
    """Nodes and ranks of each by the three manifests, which must agree."""
    texts = {name.stem: yaml.safe_load(text) for name, text in files.items() if name.suffix == ".yaml"}
    (job,) = texts["jobset"]["spec"]["replicatedJobs"]
    replicas = texts["pytorchjob"]["spec"]["pytorchReplicaSpecs"]
    trainer = texts["trainjob"]["spec"]["trainer"]
    assert job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"]
    inside = [job["template"]["spec"]["template"], *(role["template"] for role in replicas.values())]
    limits = [pod["spec"]["containers"][0]["resources"]["limits"] for pod in inside]
    assert limits == [trainer["resourcesPerNode"]["limits"]] * len(limits)
    nodes = {job["template"]["spec"]["completions"], trainer["numNodes"], sum(r["replicas"] for r in replicas.values())}
    ((kind, count),) = limits[0].items()
    assert trainer["numProcPerNode"] == int(count)
    (number,) = nodes
    return {"nodes": number, "ranks": int(count), "backend": {"nvidia.com/gpu": "nccl", "cpu": "gloo"}[kind]}


def from_skypilot(files: Files) -> Said:
    """Nodes and what each has, by the task."""
    text = yaml.safe_load(files[PurePosixPath("task.yaml")])
    has = text["resources"]
    ranks = int(has["cpus"].removesuffix("+")) if "cpus" in has else has["accelerators"]["H100"]
    return {"nodes": text["num_nodes"], "ranks": ranks, "backend": "gloo" if "cpus" in has else "nccl"}


LAUNCHERS: dict[str, Callable[[Files], Said]] = {"kubernetes": from_kubernetes, "skypilot": from_skypilot}
"""Targets with a file in the language of what brings nodes."""


def facts(plan: Plan) -> Said:
    """What a plan says, under the names that the readers use."""
    parts = (plan.mesh, plan.strategy, plan.strategy.formats)
    said = {field.name: getattr(part, field.name) for part in parts for field in fields(part)}
    batch, length, nodes = plan.workload.global_batch, plan.workload.seq_len, plan.cluster.nodes
    more = {"nodes": nodes, "ranks": plan.mesh.world // nodes, "batch": batch, "seq_len": length}
    if plan.strategy.recompute_layers:
        more["recompute"] = str(plan.strategy.recompute_layers)
    if plan.strategy.recompute_every:
        more["recompute"] = f"every-{plan.strategy.recompute_every}"
    return said | more | {"data_parallel": plan.mesh.data_parallel}


@pytest.mark.parametrize("target", LAUNCHERS)
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_nodes_are_those_of_the_plan(target: str, nodes: int) -> None:
    """Whoever brings the nodes is asked for as many as the plan has, each with its ranks' devices."""
    for backend in ("nccl", "gloo"):
        plan = plan_on(nodes, 4, **COMMON | {"backend": backend})
        said, meant = LAUNCHERS[target](emit(plan, target)), facts(plan)
        assert {name: meant[name] for name in said} == said


@pytest.mark.parametrize("target", targets(READERS))
def test_files_say_what_the_plan_says(target: str) -> None:
    """Every number and every choice that a framework's own file holds is the plan's, for every plan of the grid."""
    seen = set()
    for plan, files in written(target):
        said, meant = READERS[target](files), facts(plan)
        assert {name: meant[name] for name in said} == said
        seen |= {(name, str(value)) for name, value in said.items()}
    offloads = set() if target in WITHOUT_OFFLOAD else {("offload", "parameters")}
    assert {("zero", "0"), ("zero", "2"), ("zero", "3"), ("compute", "bfloat16"), *offloads} <= seen


ON_DRIVE: Said = {"dp_shard": 2, "zero": 3, "offload": "nvme"}


@pytest.mark.parametrize("target", ["deepspeed", "accelerate", "fabric", "trainer"])
def test_the_folder_on_a_drive_stands_in_deepspeeds_file(target: str) -> None:
    """With offload = nvme the file says what lies on the drive and where; without a folder nothing is written, and a folder that no
    part of a plan needs is refused."""
    plan = plan_for(**COMMON | ON_DRIVE)
    said = from_deepspeed(emit(plan, target, Options(nvme_path=FOLDER)))
    assert {name: facts(plan)[name] for name in said} == said
    with pytest.raises(StrategistError, match="--nvme-path") as refused:
        emit(plan, target)
    assert refused.value.code == "MISSING"
    with pytest.raises(StrategistError, match="nothing on a drive"):
        emit(plan_for(**COMMON | {"dp_shard": 2, "zero": 3}), target, Options(nvme_path=FOLDER))


@pytest.mark.parametrize("target", ["torchrun", "slurm", "mp-spawn", "mpirun", "kubernetes", "ray", "skypilot"])
def test_our_executor_gets_the_folder_on_a_drive_as_a_variable(target: str) -> None:
    """The same option sets TMPDIR for jobs on our executor, which has a folder of its own without it; told twice it is refused."""
    plan = plan_for(**COMMON | ON_DRIVE)
    assert FOLDER in "".join(emit(plan, target, Options(nvme_path=FOLDER)).values())
    assert FOLDER not in "".join(emit(plan, target).values())
    with pytest.raises(StrategistError) as refused:
        emit(plan, target, Options(nvme_path=FOLDER, env=(("TMPDIR", "/x"),)))
    assert refused.value.code == "CONFLICT"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["fabric", "trainer"])
def test_lightning_gives_to_deepspeed_what_fsdp2_cannot_say(target: str) -> None:
    """DeepSpeed's file lies there for ZeRO-1, offloading and masters, and says the plan; for all other plans there is none."""
    kinds = set()
    for plan, files in written(target):
        strategy = plan.strategy
        needed = strategy.zero == 1 or strategy.offload != "none" or strategy.formats.master != "none"
        assert (PurePosixPath("deepspeed.json") in files) == needed
        if needed:
            said, meant = from_deepspeed(files), facts(plan)
            assert {name: meant[name] for name in said} == said
            kinds.add((strategy.zero, strategy.offload))
    assert {(1, "none"), (1, "optimizer"), (2, "optimizer"), (3, "parameters")} <= kinds


@pytest.mark.parametrize("target", ["accelerate", "deepspeed", "transformers", "trl", "fabric", "trainer"])
def test_the_script_reads_what_the_file_has_no_key_for(target: str) -> None:
    """Batch, recompute, formats and optimizer that stand in no file of the framework are read from plan.json by train.py."""
    ((_, files), *_) = written(target)
    said = READERS[target](files) if target in READERS else {}
    script = files[PurePosixPath("train.py")]
    for name in {"micro_batch", "accumulation", "recompute", "optimizer", "zero"} - set(said):
        assert f'strategy["{name}"]' in script, name


def test_every_field_of_a_layout_is_judged() -> None:
    """A field that is added to Mesh or Strategy is refused by frameworks' targets until one of them maps it."""
    named = {place.partition(".")[2] for place in plain_values()}
    assert {field.name for record in (Mesh, Strategy) for field in fields(record)} - named == {
        "order",
        "stages",
        "profile",
    }


@pytest.mark.parametrize("target", targets(emitter.name for emitter in EMITTERS))
def test_axes_are_those_that_are_written(target: str) -> None:
    """The axes that `emit --list` shows are those which some plan of the grid is written with."""
    used = set()
    for _, plan in grid():
        larger = {
            axis for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp") if plan.mesh.size(axis) > 1
        }
        if not larger <= used:
            try:
                emit(plan, target)
            except StrategistError:
                continue
            used |= larger
    assert used == set(find_emitter(target).axes)


@pytest.mark.parametrize(
    ("target", "choices", "words"),
    [
        ("accelerate", {"tp": 2, "sequence_parallel": True}, "number of tokens from hidden states"),
        ("accelerate", {"tp": 2, "dp_shard": 2, "zero": 1}, "without DeepSpeed"),
        ("accelerate", {"tp": 2, "dp_shard": 2, "zero": 3, "offload": "parameters"}, "cuts itself"),
        (
            "accelerate",
            {"tp": 2, "dp_replicate": 2, "compression": "powersgd", "compression_rank": 1},
            "leaves to FSDP2",
        ),
        ("accelerate", {"dp_shard": 2, "zero": 2, "backend": "gloo"}, "one process"),
        ("accelerate", {"dp_shard": 2, "zero": 2, "offload": "nvme"}, "nvme needs strategy.zero = 3"),
        ("fabric", {"dp_shard": 2, "zero": 3, "offload": "nvme", "optimizer": "sgd"}, "needs strategy.optimizer"),
        ("transformers", {"dp_shard": 2, "zero": 3, "offload": "nvme"}, "strategy.offload = nvme"),
        ("accelerate", {"dp_replicate": 2, "dp_shard": 2, "zero": 1}, "hpZ"),
        ("deepspeed", {"dp_replicate": 2, "dp_shard": 2, "zero": 3}, "hpZ"),
        ("deepspeed", {"dp_shard": 2, "zero": 2, "offload": "parameters"}, "needs strategy.zero = 3"),
        ("deepspeed", {"tp": 2, "sequence_parallel": True}, "number of tokens from hidden states"),
        ("deepspeed", {"tp": 2, "cp": 2, "context_parallel": "all-to-all"}, "groups of their own"),
        ("deepspeed", {"tp": 2, "dp_shard": 2, "zero": 2, "offload": "optimizer"}, "not tried with AutoTP"),
        ("deepspeed", {"tp": 2, "formats": LOW_THROUGHOUT}, "1 to 3 alone"),
        (
            "deepspeed",
            {"dp_shard": 2, "zero": 2, "offload": "optimizer", "formats": LOW_REDUCE},
            "reduced in float32 alone",
        ),
        (
            "deepspeed",
            {"dp_replicate": 2, "formats": replace(LOW_THROUGHOUT, gradient="float32")},
            "stops at the mixture",
        ),
        ("transformers", {"dp_shard": 2, "zero": 1}, "ZeRO-1 is DeepSpeed's"),
        ("transformers", {"tp": 2, "sequence_parallel": True}, "number of tokens from hidden states"),
        ("transformers", {"tp": 2, "backend": "gloo"}, "tensor parallelism on CPUs"),
        ("transformers", {"tp": 2, "optimizer": "adamw8bit"}, "do not cut"),
        ("transformers", {"tp": 2, "compile": True}, "cuts itself"),
        ("transformers", {"tp": 2, "formats": FLOAT16}, "gradients that are cut"),
        ("transformers", {"dp_replicate": 2, "dp_shard": 2, "zero": 3, "formats": LOW_REDUCE}, "has no other"),
        ("fabric", {"tp": 2, "sequence_parallel": True}, "number of tokens from hidden states"),
        ("fabric", {"tp": 2, "formats": FLOAT16}, "gradients that are cut"),
        ("fabric", {"tp": 2, "dp_replicate": 2, "compression": "bf16"}, "leaves to FSDP2"),
        ("fabric", {"dp_shard": 2, "zero": 1, "backend": "gloo"}, "no CUDA device"),
        ("fabric", {"tp": 2, "dp_shard": 2, "zero": 1}, "without DeepSpeed"),
        ("fabric", {"dp_replicate": 2, "dp_shard": 2, "zero": 1}, "hpZ"),
        ("trainer", {"dp_shard": 2, "zero": 2, "offload": "optimizer", "optimizer": "sgd"}, "needs strategy.optimizer"),
        ("trainer", {"dp_shard": 2, "zero": 2, "offload": "parameters"}, "needs strategy.zero = 3"),
        ("trainer", {"pp": 2, "schedule": "1f1b", "accumulation": 2}, "mesh.pp = 2"),
        ("trainer", {"recompute": "selective"}, "whole layers"),
        ("trl", {"pp": 2, "accumulation": 2}, "TRL 1.16 cannot say mesh.pp = 2"),
        ("llama-factory", {"dp_shard": 2, "zero": 2, "offload": "optimizer"}, "DeepSpeed offloads its own only"),
        ("llama-factory", {"dp_shard": 2, "zero": 2, "formats": BFLOAT16}, "autocast are DDP's"),
        ("llama-factory", {"dp_shard": 2, "zero": 2, "optimizer": "sgd"}, "none that DeepSpeed shards"),
        ("llama-factory", {"dp_shard": 2, "zero": 2, "backend": "gloo"}, "on devices"),
        ("llama-factory", {"dp_shard": 2, "zero": 2, "compile": True}, "not mapped for DeepSpeed"),
        (
            "axolotl",
            {"dp_replicate": 2, "formats": replace(BFLOAT16, parameter="bfloat16", master="float32")},
            "masters",
        ),
        ("axolotl", {"dp_replicate": 2, "formats": BFLOAT16}, "fp32 throughout"),
        ("axolotl", {"dp_replicate": 2, "backend": "gloo"}, "where no accelerator is"),
        ("torchtitan", {"cp": 2, "context_parallel": "ring"}, "mesh.cp = 2"),
        ("torchtitan", {"dp_shard": 2, "zero": 1}, "ZeRO-1 is not in it"),
        ("torchtitan", {"recompute": "selective"}, "every second matrix product"),
        ("torchtitan", {"dp_shard": 2, "zero": 2, "offload": "parameters"}, "needs strategy.zero = 3"),
        ("torchtitan", {"optimizer": "sgd"}, "AdamW"),
        ("torchtitan", {"backend": "gloo"}, "no option for CPUs"),
        ("megatron", {"recompute": "selective"}, "runs attention again"),
        ("nanotron", {"pp": 2, "accumulation": 2}, "costs of its own"),
        ("nanotron", {"dp_shard": 2, "zero": 2}, "ends at the optimizer"),
        ("nanotron", {"dp_replicate": 2, "dp_shard": 2, "zero": 1}, "over all data-parallel ranks"),
        ("nanotron", {"optimizer": "sgd"}, "no momentum"),
        ("nanotron", {"cp": 2, "context_parallel": "ring"}, "mesh.cp = 2"),
        ("nanotron", {"tp": 8}, "key-value heads"),
        ("composer", {"tp": 2}, "by their names"),
        ("composer", {"dp_shard": 2, "zero": 2, "formats": FLOAT16}, "were not tried together"),
        ("composer", {"dp_shard": 2, "zero": 2, "backend": "gloo"}, "on GPUs"),
        ("composer", {"dp_replicate": 2, "formats": FLOAT16, "backend": "gloo"}, "on GPUs"),
        ("composer", {"dp_shard": 2, "zero": 1}, "ZeRO-1 is not in it"),
        ("llm-foundry", {"dp_replicate": 2, "recompute": "full"}, "key of its FSDP"),
        ("llm-foundry", {"dp_replicate": 2, "optimizer": "sgd"}, "registers no SGD"),
        ("llm-foundry", {"dp_replicate": 2, "backend": "gloo"}, "for GPUs only"),
        ("llm-foundry", {"dp_shard": 2, "zero": 3, "offload": "parameters"}, "shards on the host"),
        ("byteps", {"dp_shard": 2, "zero": 3}, "keep everything"),
        ("byteps", {"tp": 2}, "data parallelism alone"),
        ("byteps", {"backend": "gloo"}, "workers are GPUs"),
        ("epl", {"dp_shard": 2, "zero": 1}, "a process for each device"),
        ("epl", {"pp": 2, "virtual_stages": 2, "schedule": "interleaved", "accumulation": 2}, "prefer backward"),
        ("epl", {"formats": BFLOAT16}, "fp32 or float16"),
        ("epl", {"recompute": "full"}, "by itself"),
        ("megatron-bridge", {"recompute": "selective"}, "runs attention again"),
        ("megatron-bridge", {"compile": True}, "Megatron-Bridge 0.3 cannot say strategy.compile"),
        ("megatron", {"dp_shard": 2, "zero": 0}, "goes with mesh.dp_shard"),
        ("megatron", {"dp_shard": 2, "zero": 1, "offload": "optimizer"}, "of other formats"),
        ("megatron", {"dp_replicate": 2, "dp_shard": 2, "zero": 3}, "beside mesh.dp_replicate"),
        ("megatron", {"pp": 2, "dp_shard": 2, "zero": 2, "accumulation": 2}, "beside mesh.pp"),
        ("megatron", {"pp": 2, "schedule": "gpipe", "accumulation": 2}, "1F1B, plain or interleaved"),
        ("megatron", {"compile": True}, "does not compile"),
        ("megatron", {"backend": "gloo"}, "trains on GPUs"),
    ],
)
def test_refusals_say_why(target: str, choices: Said, words: str) -> None:
    """What a framework cannot express is refused with the field and the reason."""
    with pytest.raises(StrategistError, match=words) as refused:
        emit(plan_for(**COMMON | choices), target)
    assert (refused.value.code, refused.value.exit_code) == ("UNSUPPORTED", 3)


@pytest.mark.parametrize(
    ("target", "shape", "choices", "words"),
    [
        ("fabric", tiny_mixtral(layers=4), {"tp": 2}, "one feed-forward part a layer"),
        ("transformers", tiny_llama(layers=4, kv_heads=1), {"tp": 2}, "key-value heads that it divides"),
        ("torchtitan", tiny_mixtral(layers=4), {"tp": 2, "etp": 2}, "mesh.etp = 2"),
        ("torchtitan", tiny_mixtral(layers=4), {"tp": 2}, "beside experts"),
        ("torchtitan", tiny_llama(layers=9), {"pp": 2, "virtual_stages": 2, "accumulation": 2}, "number of stages"),
        ("torchtitan", tiny_llama(layers=4, kind="encoder"), {}, "model.kind"),
        ("megatron-bridge", tiny_llama(layers=4, pos="learned", max_seq=4096), {}, "of learned positions"),
        ("megatron-bridge", tiny_llama(layers=4, pos="none"), {}, "position_embedding_type"),
        ("composer", tiny_llama(layers=4, kind="encoder"), {}, "model.kind"),
        ("megatron", tiny_mixtral(layers=4), {"tp": 2, "etp": 2}, "needs strategy.sequence_parallel"),
        ("megatron", tiny_llama(layers=5), {"pp": 2, "accumulation": 2}, "must divide the layers"),
        ("megatron", tiny_llama(layers=4), {"pp": 2, "virtual_stages": 2, "accumulation": 3}, "mesh.pp divides"),
        ("megatron", tiny_llama(layers=4, attn_sinks=True), {}, "model.family is another"),
        ("nanotron", tiny_mixtral(layers=4), {}, "model.family is another"),
        ("megatron", tiny_llama(layers=4, window=8), {}, "model.family is another"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_models_are_refused_too(target: str, shape: ModelShape, choices: Said, words: str) -> None:
    """What a framework cannot say of a model beside a layout is refused with the field."""
    with pytest.raises(StrategistError, match=words):
        emit_files(plan_for(shape, **COMMON | choices), target)


@pytest.mark.parametrize(
    "target", [*READERS, "fabric", "trainer", "torchtitan", "megatron", "nanotron", "megatron-bridge", "byteps", "epl"]
)
def test_fp8_is_not_taken_for_bf16(target: str) -> None:
    """A plan in fp8 keeps the formats of bf16, and is refused all the same."""
    plan = plan_for(dp_replicate=2, **COMMON)
    with pytest.raises(StrategistError, match=r"workload\.precision = fp8"):
        emit(replace(plan, workload=replace(plan.workload, precision="fp8")), target)
