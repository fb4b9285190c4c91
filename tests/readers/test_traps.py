"""Each fault that a reader can find is found where it stands, with a sentence, and not where it does not stand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from strategist.document.judgement import Finding
from strategist.judging import judge
from strategist.readers.foreign import traps
from tests.cli.harness import call

MEGATRON = (
    "export CUDA_DEVICE_MAX_CONNECTIONS=1\ntorchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 8 --num-attention-heads 8 "
    "--micro-batch-size 1 --global-batch-size 16"
)
TITAN = (
    "torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b --training.disable_cuda_graphs "
    "--parallelism.data_parallel_shard_degree 2 --parallelism.pipeline_parallel_degree 4 --training.local_batch_size 8 "
    "--training.global_batch_size 32"
)
SBATCH = (
    "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n"
    "export HF_HUB_OFFLINE=1\nsrun torchrun --nnodes 2 --nproc-per-node 8 train.py"
)
ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_machines": 1, "num_processes": 8,
    "mixed_precision": "bf16", "use_cpu": False,
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
    "parallelism_config": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4},
}  # fmt: skip
DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2}, "bf16": {"enabled": True},
}  # fmt: skip
HPZ = "zero_hpz_partition_size"
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": True, "fsdp": True,
    "fsdp_config": {"version": 2, "reshard_after_forward": True},
}  # fmt: skip
FACTORY: dict[str, Any] = {
    "model_name_or_path": "m", "stage": "sft", "finetuning_type": "full", "dataset": "d", "template": "llama3", "output_dir": "o",
    "per_device_train_batch_size": 1,
}  # fmt: skip
NANOTRON: dict[str, Any] = {
    "parallelism": {"dp": 4, "pp": 1, "tp": 2}, "tokens": {"micro_batch_size": 1, "batch_accumulation_per_replica": 2},
    "model": {"dtype": "bfloat16", "model_config": {"num_attention_heads": 8, "num_key_value_heads": 4}},
    "general": {"project": "p"},
}  # fmt: skip
AXOLOTL: dict[str, Any] = {"base_model": "m", "micro_batch_size": 1, "sequence_len": 2048, "datasets": [], "bf16": True}
TUNE: dict[str, Any] = {
    "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}, "optimizer": {"_component_": "torch.optim.AdamW"},
    "batch_size": 2, "gradient_accumulation_steps": 4, "dtype": "bf16", "enable_activation_checkpointing": True,
}  # fmt: skip
COMPOSER: dict[str, Any] = {
    "device": "gpu", "precision": "amp_bf16", "device_train_microbatch_size": 2,
    "parallelism_config": {"fsdp": {"sharding_strategy": "FULL_SHARD", "mixed_precision": "PURE"}},
}  # fmt: skip
FOUNDRY: dict[str, Any] = {
    "device_train_microbatch_size": 2, "global_train_batch_size": 16, "train_loader": {}, "model": {}, "tokenizer": {},
    "optimizer": {}, "scheduler": {}, "max_duration": "4ba", "max_seq_len": 128,
}  # fmt: skip
BRIDGE: dict[str, Any] = {
    "model": {"tensor_model_parallel_size": 2, "num_attention_heads": 8, "seq_length": 128},
    "train": {"micro_batch_size": 1, "global_batch_size": 8}, "ddp": {"use_distributed_optimizer": True},
    "checkpoint": {"ckpt_format": "torch_dist"}, "mixed_precision": {"bf16": True},
}  # fmt: skip
EPL: dict[str, Any] = {"pipeline.num_micro_batch": 4, "pipeline.num_stages": 2, "pipeline.strategy": "PreferBackward"}
GPUS = {"limits": {"nvidia.com/gpu": 8}}
POD: dict[str, Any] = {
    "restartPolicy": "Never",
    "containers": [{
        "name": "pytorch", "image": "i", "resources": GPUS,
        "command": ["bash", "-c", "torchrun --nnodes 2 --nproc-per-node 8 train.py"],
    }],
}  # fmt: skip


def job_set(pod: Mapping[str, Any] = POD, **job: Any) -> dict[str, Any]:
    """A JobSet of two nodes."""
    spec = {"completions": 2, "parallelism": 2, "template": {"spec": pod}} | job
    replicated = {"name": "node", "replicas": 1, "template": {"spec": spec}}
    return manifest("jobset.x-k8s.io/v1alpha2", "JobSet", {"replicatedJobs": [replicated]})


def manifest(version: str, kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": "x"}, "spec": spec}


def train_job(**trainer: Any) -> dict[str, Any]:
    """A TrainJob of two nodes."""
    said = {"numNodes": 2, "numProcPerNode": 8, "resourcesPerNode": GPUS} | trainer
    return manifest("trainer.kubeflow.org/v1alpha1", "TrainJob", {"runtimeRef": {"name": "t"}, "trainer": said})


def pytorch_job(pod: Mapping[str, Any] = POD, **master: Any) -> dict[str, Any]:
    """A PyTorchJob of two nodes."""
    worker = {"replicas": 1, "template": {"spec": pod}}
    return manifest(
        "kubeflow.org/v1", "PyTorchJob", {"pytorchReplicaSpecs": {"Master": worker | master, "Worker": worker}}
    )


def pod(**container: Any) -> dict[str, Any]:
    """The pod with another container."""
    return POD | {"containers": [POD["containers"][0] | container]}


SKY: dict[str, Any] = {
    "num_nodes": 2, "resources": {"accelerators": "H100:8", "cpus": "4+"},
    "run": "torchrun --nnodes 2 --nproc-per-node 8 train.py\n",
}  # fmt: skip
RAY = (
    "from ray.train import ScalingConfig\nfrom ray.train.torch import TorchConfig\n"
    "scaling = ScalingConfig(num_workers=8, use_gpu=True, resources_per_worker={'GPU': 1})\n"
)

SOUND: Mapping[str, str] = {
    "job.sbatch": SBATCH,
    "megatron.sh": MEGATRON,
    "titan.sh": TITAN,
    "accelerate.yaml": yaml.safe_dump(ACCELERATE),
    "deepspeed.json": json.dumps(DEEPSPEED),
    "training.json": json.dumps(ARGUMENTS),
    "factory.yaml": yaml.safe_dump(FACTORY),
    "axolotl.yaml": yaml.safe_dump(AXOLOTL),
    "nanotron.yaml": yaml.safe_dump(NANOTRON),
    "tune.yaml": yaml.safe_dump(TUNE),
    "tune.sh": "tune run --nproc_per_node 4 full_finetune_distributed --config llama3_2/1B_full batch_size=2\n",
    "requirements.txt": "torch==2.13.0\ntransformers==5.23.0\n",
    "train.py": "import ray\n",
    "ray_train.py": RAY,
    "composer.json": json.dumps(COMPOSER),
    "foundry.yaml": json.dumps(FOUNDRY),
    "bridge.json": json.dumps(BRIDGE),
    "epl.json": json.dumps(EPL),
    "jobset.yaml": json.dumps(job_set()),
    "trainjob.yaml": json.dumps(train_job()),
    "pytorchjob.yaml": json.dumps(pytorch_job()),
    "kustomization.yaml": "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [jobset.yaml]\n",
    "task.yaml": yaml.safe_dump(SKY),
}
"""Files without a fault, one for every reader."""


@dataclass(frozen=True)
class Case:
    """A file with one fault: its rule, the file, and the place and a word that the finding names."""

    rule: str
    name: str
    text: str
    place: str
    word: str = ""


def changed(base: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A table with some keys changed; None takes one out, a table changes the table that is there."""
    table = dict(base)
    for key, value in changes.items():
        inner = table.get(key)
        table[key] = changed(inner, **value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return {key: value for key, value in table.items() if value is not None}


def accelerate(rule: str, place: str, word: str = "", **changes: Any) -> Case:
    return Case(rule, "accelerate.yaml", yaml.safe_dump(changed(ACCELERATE, **changes)), place, word)


def deepspeed(rule: str, place: str, word: str = "", **changes: Any) -> Case:
    return Case(rule, "deepspeed.json", json.dumps(changed(DEEPSPEED, **changes)), place, word)


def arguments(rule: str, place: str, word: str = "", **changes: Any) -> Case:
    return Case(rule, "training.json", json.dumps(changed(ARGUMENTS, **changes)), place, word)


def nanotron(rule: str, place: str, word: str = "", **changes: Any) -> Case:
    return Case(rule, "nanotron.yaml", yaml.safe_dump(changed(NANOTRON, **changes)), place, word)


def megatron(rule: str, place: str, word: str, old: str, new: str) -> Case:
    return Case(rule, "megatron.sh", MEGATRON.replace(old, new), place, word)


def titan(rule: str, place: str, word: str, old: str, new: str) -> Case:
    return Case(rule, "titan.sh", TITAN.replace(old, new), place, word)


def slurm(rule: str, place: str, word: str, old: str, new: str) -> Case:
    return Case(rule, "job.sbatch", SBATCH.replace(old, new), place, word)


def table(name: str, rule: str, place: str, word: str, said: Mapping[str, Any]) -> Case:
    """A file that holds a table."""
    return Case(rule, name, json.dumps(said), place, word)  # JSON is YAML too


MESH = "parallelism_config"
SIZE = "parallelism_config_{}_size"
FSDP_WORDS = "--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
CASES = (
    accelerate("accelerate-cpu-one-process", "use_cpu", "one process", use_cpu=True, distributed_type="MULTI_CPU"),
    accelerate("accelerate-cpu-fsdp", "use_cpu", "alone", use_cpu=True),
    accelerate("unknown-key", "fsdp_config.fsdp_verison", "fsdp_version", fsdp_config={"fsdp_verison": 2}),
    accelerate("unknown-key", f"{MESH}.dp_shard_size", "dp_shard_size", parallelism_config={"dp_shard_size": 4}),
    accelerate("unknown-key", "num_proceses", "num_processes", num_proceses=8),
    accelerate("accelerate-cpu-deepspeed", "use_cpu", "misleads", use_cpu=True, distributed_type="DEEPSPEED"),
    accelerate("accelerate-cp-and-sp", MESH, "exclude", parallelism_config={SIZE.format("cp"): 2, SIZE.format("sp"): 2}),
    accelerate(
        "accelerate-replicas-beside-model", MESH, "dp_shard_size above 1",
        parallelism_config={SIZE.format("tp"): 4, SIZE.format("dp_shard"): 1},
    ),
    accelerate("ranks-product", MESH, "16 ranks", parallelism_config={SIZE.format("tp"): 2}),
    accelerate("ranks-product", MESH, "8 ranks", num_processes=4),
    accelerate(
        "accelerate-nothing-to-shard", MESH, "nothing to shard",
        parallelism_config={SIZE.format("dp_shard"): 1, SIZE.format("dp_replicate"): 8},
    ),
    accelerate("accelerate-mesh-needs-fsdp2", "fsdp_config.fsdp_version", "it is 1", fsdp_config={"fsdp_version": 1}),
    accelerate("accelerate-precision", "mixed_precision", "bf17", mixed_precision="bf17"),
    accelerate("missing-key", "distributed_type", "guesses", distributed_type=None),
    deepspeed("unknown-key", "train_batch_sise", "ignores", train_batch_sise=8),
    deepspeed("unknown-key", "pipeline.stagess", "stages", pipeline={"stagess": 2}),
    deepspeed("unknown-key", "expert_parallel.autoep_sise", "autoep_size", expert_parallel={"autoep_sise": 2}),
    deepspeed("unknown-key", "aio.thread_count", "ignores", aio={"thread_count": 1}),
    deepspeed("unknown-key", "zero_optimization.stge", "refuses", zero_optimization={"stge": 1}),
    deepspeed("deepspeed-auto", "train_micro_batch_size_per_gpu", "stops", train_micro_batch_size_per_gpu="auto"),
    deepspeed("deepspeed-auto", "zero_optimization.reduce_bucket_size", "drops", zero_optimization={"reduce_bucket_size": "auto"}),
    deepspeed("deepspeed-removed-key", "amp", "removed", amp={"enabled": True}),
    deepspeed("deepspeed-removed-key", "zero_optimization.mics_shard_size", "removed", zero_optimization={"mics_shard_size": 8}),
    deepspeed("deepspeed-no-batch", "train_batch_size", "batch keys", train_batch_size=None, train_micro_batch_size_per_gpu=None),
    deepspeed("batch-divides", "global batch", "60", train_batch_size=60),
    deepspeed("deepspeed-stage", "zero_optimization.stage", "stage 4", zero_optimization={"stage": 4}),
    deepspeed("deepspeed-two-formats", "bf16", "both", fp16={"enabled": True}),
    deepspeed(
        "deepspeed-offload-stage", "zero_optimization.offload_param", "stage is 2",
        zero_optimization={"offload_param": {"device": "cpu"}},
    ),
    deepspeed(
        "deepspeed-nvme-path", "zero_optimization.offload_optimizer", "nvme_path",
        zero_optimization={"offload_optimizer": {"device": "nvme"}},
    ),
    deepspeed("deepspeed-hpz-copy", f"zero_optimization.{HPZ}", "4-th of the weights", zero_optimization={"stage": 3, HPZ: 4}),
    deepspeed("deepspeed-hpz-divides", f"zero_optimization.{HPZ}", "8 ranks", zero_optimization={"stage": 3, HPZ: 3}),
    deepspeed("deepspeed-zeropp-stage", f"zero_optimization.{HPZ}", "stage is 2", zero_optimization={HPZ: 4}),
    deepspeed(
        "deepspeed-quantized-weights", "zero_optimization.zero_quantized_weights", "8 bits",
        zero_optimization={"stage": 3, "zero_quantized_weights": True},
    ),
    deepspeed(
        "deepspeed-quantized-gradients", "zero_optimization.zero_quantized_gradients", "4 bits",
        zero_optimization={"stage": 3, "zero_quantized_gradients": True},
    ),
    deepspeed(
        "deepspeed-quantized-format", "zero_optimization.zero_quantized_gradients", "sent as bfloat16",
        zero_optimization={"stage": 3, "zero_quantized_gradients": True},
    ),
    deepspeed(
        "deepspeed-quantized-format", "zero_optimization.zero_quantized_gradients", "sent as float32",
        bf16={"enabled": False}, fp16={"enabled": True}, communication_data_type="fp32",
        zero_optimization={"stage": 3, "zero_quantized_gradients": True},
    ),
    Case("deepspeed-local-rank", "run.sh", "deepspeed train.py --steps 3\n", "deepspeed", "--local_rank"),
    arguments("old-key", "evaluation_strategy", "transformers 4.50 was the last to know it", evaluation_strategy="steps"),
    arguments("fsdp1-deprecated", "fsdp_config.version", "FSDP1", fsdp_config={"version": 1}),
    arguments("fsdp-prefix", "fsdp_config.fsdp_cpu_offload", "cpu_offload", fsdp_config={"fsdp_cpu_offload": True}),
    arguments("checkpointing-under-fsdp", "gradient_checkpointing", "once more", gradient_checkpointing=True),
    arguments("unknown-key", "fsdp_config.reshard_after_foward", "reshard_after_forward", fsdp_config={"reshard_after_foward": 1}),
    arguments("two-low-formats", "bf16", "both", fp16=True),
    Case("unknown-key", "factory.yaml", yaml.safe_dump(changed(FACTORY, finetunning_type="full")), "finetunning_type", "finetuning_type"),
    Case("missing-key", "factory.yaml", yaml.safe_dump(changed(FACTORY, output_dir=None)), "output_dir", "checkpoints"),
    Case("torch-companions", "requirements.txt", "torch==2.13.0\ntorchvision==0.28.0\n", "torchvision", "0.28.0"),
    Case("torch-companions", "requirements.txt", "torch==2.13.0\ntorchaudio == 2.11.0\n", "torchaudio", "2.11.0"),
    megatron("megatron-connections", "CUDA_DEVICE_MAX_CONNECTIONS", "TP 2", "export CUDA_DEVICE_MAX_CONNECTIONS=1", ""),
    megatron("megatron-fsdp-checkpoint", "--ckpt-format", "torch_dist", "--pipeline-model-parallel-size 2", FSDP_WORDS),
    megatron(
        "megatron-fsdp-connections", "CUDA_DEVICE_MAX_CONNECTIONS", "refuses",
        "--pipeline-model-parallel-size 2", f"{FSDP_WORDS} --ckpt-format fsdp_dtensor",
    ),
    megatron("unknown-key", "--pipeline-model-paralel-size", "--pipeline-model-parallel-size", "pipeline-model-parallel", "pipeline-model-paralel"),
    megatron("foreign-arguments", "--vision-model-type", "--vision-model-type", "--num-layers 8", "--num-layers 8 --vision-model-type x"),
    megatron("ranks-divide", "--tensor-model-parallel-size", "multiple", "--nproc-per-node 8", "--nproc-per-node 6"),
    megatron("batch-product", "global batch", "15", "--global-batch-size 16", "--global-batch-size 15"),
    megatron("heads-divide", "--num-attention-heads", "TP 2", "--num-attention-heads 8", "--num-attention-heads 7"),
    megatron("missing-key", "--micro-batch-size", "no default", "--micro-batch-size 1", ""),
    megatron("megatron-recompute-method", "--recompute-granularity", "uniform", "--num-layers 8", "--num-layers 8 --recompute-granularity full"),
    megatron("megatron-experts", "--expert-model-parallel-size", "--num-experts", "--num-layers 8", "--num-layers 8 --expert-model-parallel-size 2"),
    megatron("megatron-hierarchical-sizes", "--cp-comm-type", "absent", "--num-layers 8", "--num-layers 8 --cp-comm-type a2a+p2p"),
    megatron("megatron-precision-aware", "--use-precision-aware-optimizer", "--use-distributed-optimizer", "--num-layers 8", "--num-layers 8 --use-precision-aware-optimizer"),
    megatron("megatron-precision-aware", "--use-precision-aware-optimizer", "--optimizer adam", "--num-layers 8", "--num-layers 8 --use-precision-aware-optimizer --optimizer sgd"),
    megatron("megatron-precision-aware", "--exp-avg-dtype", "--use-precision-aware-optimizer", "--num-layers 8", "--num-layers 8 --exp-avg-dtype bf16"),
    megatron("uncounted-optimizer", "--optimizer", "muon", "--num-layers 8", "--num-layers 8 --optimizer muon"),
    megatron("unknown-value", "--pipeline-model-parallel-size", "$2", "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size $2"),
    megatron("unknown-value", "--num-layers", "--model", "--num-layers 8", "--num-layers $LAYERS"),
    megatron("unknown-value", "--global-batch-size", "--global-batch", "--global-batch-size 16", "--global-batch-size $(expr 4 + 4)"),
    megatron("unknown-value", "--recompute-granularity", "recompute", "--num-layers 8", "--num-layers 8 --recompute-granularity $AC"),
    Case("unknown-value", "run.sh", "torchrun train.py --per_device_train_batch_size 1 --gradient_accumulation_steps $1\n", "--gradient_accumulation_steps", "--grad-accum"),
    megatron("sequence-parallel-alone", "--sequence-parallel", "without TP", "--tensor-model-parallel-size 2", "--sequence-parallel"),
    nanotron("unknown-key", "tokens.micro_batch_sise", "micro_batch_size", tokens={"micro_batch_sise": 2}),
    nanotron("missing-key", "parallelism.pp", "no default", parallelism={"dp": 4, "tp": 2, "pp": None}),
    nanotron("heads-divide", "parallelism.tp", "TP 3", parallelism={"tp": 3}),
    nanotron("nanotron-heads", "parallelism.tp", "TP 8", parallelism={"tp": 8}),
    table("tune.yaml", "unknown-key", "batchsize", "batch_size", TUNE | {"batchsize": 4}),
    table("tune.yaml", "torchtune-fp16", "dtype", "fp16", TUNE | {"dtype": "fp16"}),
    table("tune.yaml", "torchtune-in-backward", "gradient_accumulation_steps", "optimizer_in_bwd", TUNE | {"optimizer_in_bwd": True}),
    table("tune.yaml", "torchtune-in-backward", "clip_grad_norm", "optimizer_in_bwd", TUNE | {"optimizer_in_bwd": True, "clip_grad_norm": 1.0}),
    table("tune.yaml", "torchtune-offload", "enable_activation_offloading", "enable_activation_checkpointing", TUNE | {"enable_activation_offloading": True, "enable_activation_checkpointing": False}),
    table("tune.yaml", "activations-on-host", "enable_activation_offloading", "upper bound", TUNE | {"enable_activation_offloading": True}),
    table("tune.yaml", "torchtune-tp-plan", "tensor_parallel_plan", "tensor_parallel_dim", TUNE | {"tensor_parallel_dim": 2}),
    table("tune.yaml", "uncounted-optimizer", "optimizer", "SOAP", TUNE | {"optimizer": {"_component_": "pytorch_optimizer.SOAP"}}),
    table("training.json", "uncounted-optimizer", "optim", "galore_adamw", ARGUMENTS | {"optim": "galore_adamw"}),
    table("axolotl.yaml", "uncounted-optimizer", "optimizer", "lion_8bit", AXOLOTL | {"optimizer": "lion_8bit"}),
    table("axolotl.yaml", "activations-on-host", "activation_offloading", "upper bound", AXOLOTL | {"activation_offloading": True}),
    table("deepspeed.json", "uncounted-optimizer", "optimizer.type", "OneBitAdam", DEEPSPEED | {"optimizer": {"type": "OneBitAdam"}}),
    table("training.json", "uncounted-optimizer", "deepspeed: optimizer.type", "Lamb", changed(ARGUMENTS, fsdp=None) | {"deepspeed": {"optimizer": {"type": "Lamb"}}}),
    table("factory.yaml", "uncounted-optimizer", "use_galore", "galore", FACTORY | {"use_galore": True}),
    table("factory.yaml", "uncounted-method", "finetuning_type", "freeze", FACTORY | {"finetuning_type": "freeze"}),
    table("factory.yaml", "preferences", "stage", "dpo", FACTORY | {"stage": "dpo"}),
    table("axolotl.yaml", "preferences", "rl", "orpo", AXOLOTL | {"rl": "orpo"}),
    table("recipe.yaml", "preferences", "beta", "lower bound", {"model_name_or_path": "m", "per_device_train_batch_size": 1, "beta": 0.1}),
    Case("preferences", "run.sh", "trl kto --model_name_or_path m --per_device_train_batch_size 1\n", "kto", "further models"),
    table("factory.yaml", "weights-of-eight-bits", "quantization_bit", "8 bits", FACTORY | {"finetuning_type": "lora", "quantization_bit": 8}),
    table("axolotl.yaml", "weights-of-eight-bits", "load_in_8bit", "8 bits", AXOLOTL | {"adapter": "lora", "load_in_8bit": True}),
    table("recipe.yaml", "weights-of-eight-bits", "load_in_8bit", "8 bits", {"model_name_or_path": "m", "per_device_train_batch_size": 1, "use_peft": True, "load_in_8bit": True}),
    Case("weights-of-eight-bits", "run.sh", "torchrun train.py --model_name_or_path m --per_device_train_batch_size 1 --lora_enable True --bits 8\n", "bits", "8 bits"),
    table("axolotl.yaml", "hybrid-shard", "fsdp_config", "HYBRID_SHARD", AXOLOTL | {"fsdp_config": {"sharding_strategy": "HYBRID_SHARD"}}),
    table("training.json", "hybrid-shard", "fsdp", "two nodes", ARGUMENTS | {"fsdp": ["hybrid_shard", "auto_wrap"]}),
    table("foundry.yaml", "uncounted-optimizer", "optimizer.name", "decoupled_lionw", FOUNDRY | {"optimizer": {"name": "decoupled_lionw"}}),
    Case("ranks-product", "one_single_device.sh", "tune run --nproc_per_node 2 full_finetune_single_device --config llama3_2/1B_full\n", "the launcher", "2 are started"),
    Case("two-engines", "axolotl.yaml", yaml.safe_dump(changed(AXOLOTL, deepspeed="z.json", fsdp_version=2)), "deepspeed", "fsdp_version"),
    Case("unknown-key", "axolotl.yaml", yaml.safe_dump(changed(AXOLOTL, micro_batch_sise=2)), "micro_batch_sise", "all the same"),
    Case("shadowed-package", "train.py", "from ray.train import ScalingConfig\n", "ray/", "virtual environment"),
    Case("hub-retries", "run.sh", "export HF_HUB_ETAG_TIMEOUT=3\ntorchrun train.py --model org/name\n", "HF_HUB_ETAG_TIMEOUT", "23 s"),
    slurm("torchrun-per-task", "#SBATCH --ntasks-per-node", "64 ranks", "ntasks-per-node=1", "ntasks-per-node=8"),
    slurm("nodes-differ", "--nnodes", "2 nodes", "--nnodes 2", "--nnodes 3"),
    slurm("devices-differ", "--nproc-per-node", "8 GPUs", "--nproc-per-node 8", "--nproc-per-node 4"),
    slurm("old-launcher", "torch.distributed.launch", "alias", "torchrun", "python -m torch.distributed.launch"),
    Case("titan-toml", "job.toml", "[parallelism]\ntensor_parallel_degree = 2\n[training]\nsteps = 3\n", "job.toml", "no TOML"),
    titan("titan-graphs-in-a-pipeline", "training.disable_cuda_graphs", "pipelines", "--training.disable_cuda_graphs ", ""),
    titan("titan-micro-batches", "training.local_batch_size", "multiple of", "--training.local_batch_size 8", "--training.local_batch_size 8 --parallelism.pipeline_parallel_microbatch_size 3"),
    Case("unknown-key", "neox.yml", "{pipe-parallel-size: 2, num-layers: 4, hidden_size: 64, seq_lenght: 8}", "seq_lenght", "seq_length"),
    Case("heads-divide", "neox.yml", "{model-parallel-size: 3, num-layers: 4, hidden_size: 64, num_attention_heads: 8}", "num_attention_heads", "8"),
    titan("titan-config", "--config", "my_own", "llama3_8b", "my_own"),
    Case("titan-converter", "job.toml", "[model]\nconverters = ['quantize.grouped_mm.mx']\n[parallelism]\n[training]\nsteps = 3\n", "model.converters", "quantize.grouped_mm.mx"),
    titan("unknown-value", "--parallelism.pipeline_parallel_degree", "zero", "--parallelism.pipeline_parallel_degree 4", "--parallelism.pipeline_parallel_degree $PP"),
    titan("unknown-key", "training.local_batch_sise", "local_batch_size", "local_batch_size", "local_batch_sise"),
    titan("ranks-product", "parallelism", "8 ranks", "--nproc-per-node 8", "--nproc-per-node 4"),
    titan("batch-product", "global batch", "33", "global_batch_size 32", "global_batch_size 33"),
    slurm("unknown-key", "--gpu-per-node", "--gpus-per-node", "--gpus-per-node", "--gpu-per-node"),
    slurm("sbatch-beginning", "--ntasks-per-nod", "--ntasks-per-node", "--ntasks-per-node", "--ntasks-per-nod"),
    slurm("foreign-arguments", "-y", "-y", "--nodes=2", "-y 2"),
    slurm("nodes-alone", "torchrun", "trains alone", "--nnodes 2 ", ""),
    table("composer.json", "unknown-key", "max_durration", "max_duration", COMPOSER | {"max_durration": "4ba"}),
    table("composer.json", "unknown-key", "parallelism_config.fsdp2", "never looks", changed(COMPOSER, parallelism_config={"fsdp2": {}})),
    table("composer.json", "unknown-key", "parallelism_config.fsdp.sharding_stategy", "sharding_strategy", changed(COMPOSER, parallelism_config={"fsdp": {"sharding_stategy": "FULL_SHARD"}})),
    table("composer.json", "unknown-word", "precision", "amp_bf16", COMPOSER | {"precision": "bf16"}),
    table("composer.json", "unknown-word", "parallelism_config.fsdp.sharding_strategy", "FULL_SHARD", changed(COMPOSER, parallelism_config={"fsdp": {"sharding_strategy": "FULL"}})),
    table("composer.json", "composer-cpu-shards", "device", "GPUs only", COMPOSER | {"device": "cpu"}),
    table("composer.json", "composer-offload", "parallelism_config.fsdp.cpu_offload", "cpu_offload", changed(COMPOSER, parallelism_config={"fsdp": {"cpu_offload": True}})),
    table("foundry.yaml", "unknown-key", "fsdp_config.sharding_stategy", "never looks", FOUNDRY | {"fsdp_config": {"sharding_stategy": "FULL_SHARD"}}),
    table("foundry.yaml", "unknown-word", "precision", "amp_bf16", FOUNDRY | {"precision": "bf16"}),
    table("foundry.yaml", "composer-offload", "fsdp_config.cpu_offload", "cpu_offload", FOUNDRY | {"fsdp_config": {"cpu_offload": True}}),
    table("bridge.json", "unknown-key", "model.tensor_model_parallel_sise", "tensor_model_parallel_size", changed(BRIDGE, model={"tensor_model_parallel_sise": 2})),
    table("bridge.json", "heads-divide", "num_attention_heads", "TP 3", changed(BRIDGE, model={"tensor_model_parallel_size": 3})),
    table("bridge.json", "megatron-recompute-method", "recompute_granularity", "recompute_method uniform", changed(BRIDGE, model={"recompute_granularity": "full"})),
    table("bridge.json", "megatron-fsdp-checkpoint", "ckpt_format", "fsdp_dtensor", changed(BRIDGE, ddp={"use_megatron_fsdp": True})),
    table("epl.json", "unknown-key", "pipeline.num_micro_bach", "all the same", EPL | {"pipeline.num_micro_bach": 2}),
    table("epl.json", "unknown-word", "amp.level", "o1", EPL | {"amp.level": "O2"}),
    table("epl.json", "epl-zero", "zero.level", "switches ZeRO off", EPL | {"zero.level": "v1"}),
    table("jobset.yaml", "unknown-key", "spec.replicatedJobs.*.template.spec.completion", "completions", job_set(completion=2)),
    table("jobset.yaml", "unknown-key", "containers.*.imagePullPolcy", "imagePullPolicy", job_set(pod(imagePullPolcy="Always"))),
    table("jobset.yaml", "pods-not-at-once", "parallelism", "1 of", job_set(parallelism=1)),
    table("jobset.yaml", "restarted-pods", "restartPolicy", "Never", job_set(POD | {"restartPolicy": "Always"})),
    table("jobset.yaml", "device-requests", "requests.nvidia.com/gpu", "name 4", job_set(pod(resources=GPUS | {"requests": {"nvidia.com/gpu": 4}}))),
    table("jobset.yaml", "devices-differ", "--nproc-per-node", "8 GPUs", job_set(pod(command=["torchrun", "--nnodes", "2", "--nproc-per-node", "4"]))),
    table("jobset.yaml", "nodes-differ", "--nnodes", "4", job_set(pod(command=["torchrun", "--nnodes=4"]))),
    table("jobset.yaml", "nodes-alone", "torchrun", "trains alone", job_set(pod(command=["torchrun", "train.py"]))),
    table("trainjob.yaml", "unknown-key", "spec.trainer.numNode", "numNodes", train_job(numNode=2)),
    table("trainjob.yaml", "devices-differ", "numProcPerNode", "8 GPUs", train_job(numProcPerNode=4)),
    table("pytorchjob.yaml", "unknown-key", "spec.pytorchReplicaSpecs.*.replica", "replicas", pytorch_job(replica=1)),
    table("pytorchjob.yaml", "devices-differ", "nprocPerNode", "8 GPUs", changed(pytorch_job(), spec={"nprocPerNode": "4"})),
    table("pytorchjob.yaml", "pytorchjob-master", "Master.replicas", "has 2", pytorch_job(replicas=2)),
    table("pytorchjob.yaml", "pytorchjob-container", "Master.containers", "called pytorch", pytorch_job(template={"spec": pod(name="node")})),
    table("kustomization.yaml", "unknown-key", "resource", "resources", {"apiVersion": "v1", "kind": "Kustomization", "resource": []}),
    table("task.yaml", "unknown-key", "num_node", "num_nodes", SKY | {"num_node": 2}),
    table("task.yaml", "unknown-key", "resources.accelerator", "accelerators", changed(SKY, resources={"accelerator": "H100"})),
    table("task.yaml", "devices-differ", "--nproc-per-node", "8 GPUs", SKY | {"run": "torchrun --nnodes 2 --nproc-per-node 4 train.py"}),
    table("task.yaml", "nodes-alone", "torchrun", "2 nodes", SKY | {"run": "torchrun train.py"}),
    Case("unknown-key", "ray_train.py", RAY.replace("num_workers", "num_worker"), "ScalingConfig.num_worker", "num_workers"),
    Case("ray-devices", "ray_train.py", RAY.replace("use_gpu=True", "use_gpu=False"), "ScalingConfig.resources_per_worker", "use_gpu=True"),
)  # fmt: skip
"""One file for every fault, and for every place where a framework swallows a misspelt key."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a virtual environment called like a package, as people make them."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/pyvenv.cfg").write_text("home = /usr\n", encoding="utf-8")
    yield tmp_path


def found_in(folder: Path, name: str, text: str) -> tuple[Finding, ...]:
    """The faults of a file of this name."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return judge(str(path)).findings


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule} {case.place}")
def test_the_fault_is_found(case: Case, folder: Path) -> None:
    """The rule fires once at that place, says the word that matters, and offers a change."""
    found = [
        fault
        for fault in found_in(folder, case.name, case.text)
        if (fault.rule, fault.place) == (case.rule, case.place)
    ]
    assert len(found) == 1
    assert case.word in f"{found[0].sentence} {found[0].fix}"
    assert found[0].fix.endswith(".")


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_file_passes(name: str, tmp_path: Path) -> None:
    """A file without a fault has no finding at all."""
    assert found_in(tmp_path, name, SOUND[name]) == ()


def test_every_fault_has_a_file() -> None:
    """No rule is without a test here; those of layouts are tested with model and machines."""
    assert {case.rule for case in CASES} | {
        "illegal-layout",
        "does-not-fit",
        "deepspeed-hpz-node",
        "experts-in-sixteen-bits",
    } == set(traps())


@pytest.mark.parametrize(
    ("adapter", "packs", "model", "is_said"),
    [
        ("qlora", False, "mixtral-8x7b", True),
        ("qlora", True, "mixtral-8x7b", False),
        ("lora", False, "mixtral-8x7b", False),
        ("qlora", False, "llama-3.1-8b", False),
    ],
)
def test_experts_that_nothing_packs_are_named(
    adapter: str, packs: bool, model: str, is_said: bool, tmp_path: Path
) -> None:
    """Under QLoRA of a mixture alone, and not where the file asks for packed experts; `predict` counts it too."""
    path = tmp_path / "axolotl.yaml"
    said = AXOLOTL | {"adapter": adapter, "lora_r": 8, "lora_target_linear": True, "quantize_moe_experts": packs}
    path.write_text(yaml.safe_dump(said), encoding="utf-8")
    beside = ("--model", model, "--hardware", "dgx-h100")
    (judged,) = json.loads(call("validate", str(path), *beside, "--json").out)
    assert ("experts-in-sixteen-bits" in {fault["rule"] for fault in judged["findings"]}) == is_said
    assert ("faults" in call("predict", str(path), *beside).out) == is_said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "accelerate.yaml",
            yaml.safe_dump(changed(ACCELERATE, main_process_port=29500)) + "main_process_ip: 192.168.0.1\n",
        ),
        ("deepspeed.json", json.dumps(changed(DEEPSPEED, _comment="x"))),
        ("factory.yaml", yaml.safe_dump(changed(FACTORY, warmup_ratio=0.1, tensor_model_parallel_size=2))),
        ("axolotl.yaml", yaml.safe_dump(changed(AXOLOTL, fsdp_config={"fsdp_offload_params": True}, model_type="x"))),
        ("megatron.sh", MEGATRON.replace("--num-layers 8", '"--num-layers 8"')),
        (
            "megatron.sh",
            MEGATRON.replace("--tensor-model-parallel-size 2", "--sequence-parallel --tensor-model-parallel-size $TP"),
        ),
        ("megatron.sh", MEGATRON.replace("export CUDA_DEVICE_MAX_CONNECTIONS=1", "source settings.sh")),
        ("run.sh", "TP=2\ntorchrun --nproc-per-node ${GPUS:-8} train.py\n"),
    ],
)
def test_what_people_write_is_no_fault(name: str, text: str, tmp_path: Path) -> None:
    """Addresses, comments, keys of a framework's other half, prefixes, variables and sourced files raise no false alarm."""
    assert [fault for fault in found_in(tmp_path, name, text) if fault.kind == "failure"] == []


@pytest.mark.parametrize("row", traps().values(), ids=lambda row: row["name"])
def test_faults_name_their_source(row: Mapping[str, str]) -> None:
    """Each rule says failure or warning, a sentence, a change, and where that is known from."""
    assert row["kind"] in ("failure", "warning")
    assert all(row[part].strip() for part in ("sentence", "fix", "source"))


def test_exit_codes(tmp_path: Path) -> None:
    """0 for files that pass, with warnings too; 5 when one of several has a failure; 2 for what is no configuration."""
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(changed(DEEPSPEED, train_batch_size=60)), encoding="utf-8")
    good, warned, other = tmp_path / "good.json", tmp_path / "run.sh", tmp_path / "x.json"
    good.write_text(json.dumps(DEEPSPEED), encoding="utf-8")
    warned.write_text("deepspeed train.py\n", encoding="utf-8")
    other.write_text("{}", encoding="utf-8")
    assert call("validate", str(good), str(warned)).code == 0
    assert call("validate", str(good), str(bad)).code == 5
    refused = call("validate", str(other), "--json")
    assert (refused.code, json.loads(refused.out)["error"]["code"]) == (2, "E_KIND")


WEIGH = ("--model", "llama-3.2-1b", "--hardware", "dgx-h100")


def test_what_does_not_fit_is_said_with_a_change_that_fits(tmp_path: Path) -> None:
    """A file that runs out of memory on the named machines gets the ledger and a change; with that change it passes."""
    table = changed(DEEPSPEED, train_batch_size=1024, train_micro_batch_size_per_gpu=64, zero_optimization={"stage": 3})
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    done = call("validate", str(path), *WEIGH, "--seq-len", "4096", "--json")
    (judgement,) = json.loads(done.out)
    (fault,) = [fault for fault in judgement["findings"] if fault["rule"] == "does-not-fit"]
    assert (done.code, judgement["prediction"]["fits"]) == (5, False)
    change = dict(part.split("=") for part in fault["fix"].removeprefix("It fits with ").rstrip(".").split(", "))
    assert set(change) == {"micro_batch", "accumulation"}
    micro, steps = int(change["micro_batch"]), int(change["accumulation"])
    path.write_text(
        json.dumps(changed(table, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=steps)),
        encoding="utf-8",
    )
    assert call("validate", str(path), *WEIGH, "--seq-len", "4096").code == 0


@pytest.mark.parametrize(
    "formats",
    [
        {"fp16": {"enabled": True}},
        {"fp16": {"enabled": True}, "communication_data_type": "fp16"},
        {"communication_data_type": "fp16"},
    ],
)
def test_gradients_in_fp16_may_be_quantised(formats: dict[str, Any], tmp_path: Path) -> None:
    """The kernel of DeepSpeed reads fp16; such gradients are a warning and no failure."""
    table = changed(
        DEEPSPEED, bf16={"enabled": False}, zero_optimization={"stage": 3, "zero_quantized_gradients": True}, **formats
    )
    found = found_in(tmp_path, "deepspeed.json", json.dumps(table))
    assert {one.rule for one in found} == {"deepspeed-quantized-gradients"}


@pytest.mark.parametrize(("size", "found"), [(4, set()), (8, set()), (16, {"deepspeed-hpz-node"})])
def test_the_second_copy_of_weights_stays_inside_a_node(size: int, found: set[str], tmp_path: Path) -> None:
    """On nodes of 8 devices hpZ over more than 8 ranks is a warning, and that it keeps a copy is said for each size."""
    path = tmp_path / "deepspeed.json"
    table = changed(DEEPSPEED, train_batch_size=256, zero_optimization={"stage": 3, HPZ: size})
    path.write_text(json.dumps(table), encoding="utf-8")
    done = call("validate", str(path), "--model", "llama-3.2-1b", "--hardware", "dgx-h100:4", "--json")
    rules = {fault["rule"] for fault in json.loads(done.out)[0]["findings"]}
    assert rules & {"deepspeed-hpz-node", "deepspeed-hpz-divides", "deepspeed-hpz-copy"} == found | {
        "deepspeed-hpz-copy"
    }


def test_an_illegal_layout_is_a_failure(tmp_path: Path) -> None:
    """Degrees that the machines cannot be filled with are a failure once the machines are named."""
    path = tmp_path / "megatron.sh"
    text = MEGATRON.replace("--nproc-per-node 8", "").replace(
        "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 3"
    )
    path.write_text(text, encoding="utf-8")
    assert {
        fault["rule"] for fault in json.loads(call("validate", str(path), *WEIGH, "--json").out)[0]["findings"]
    } >= {
        "ranks-divide",
        "illegal-layout",
    }


@pytest.mark.parametrize(("stage", "framework"), [(1, "deepspeed"), (3, "deepspeed-zero3")])
def test_predict_reads_the_same_files(stage: int, framework: str, tmp_path: Path) -> None:
    """`predict FILE` prices the layout of another framework's file as `--strategy` prices it written by hand; ZeRO-3 has a host of its own."""
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps(changed(DEEPSPEED, zero_optimization={"stage": stage})), encoding="utf-8")
    read = json.loads(call("predict", str(path), *WEIGH, "--json").out)
    words = (
        "--strategy",
        f"dp_shard=8,zero={stage},micro_batch=4,accumulation=2",
        "--global-batch",
        "64",
        "--framework",
        framework,
    )
    written = json.loads(call("predict", *WEIGH, *words, "--json").out)
    assert (read["layout"], read["memory"], read["time"]) == (written["layout"], written["memory"], written["time"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "beside", "words"),
    [
        (COMPOSER, ("--micro-batch", "2"), "dp_shard=8,zero=3,micro_batch=2"),
        (BRIDGE, (), "dp_shard=4,tp=2,zero=1,micro_batch=1,accumulation=2"),
        (
            EPL | {"pipeline.num_stages": 8},
            ("--micro-batch", "2", "--global-batch", "8"),
            "pp=8,schedule=1f1b,zero=0,micro_batch=2,accumulation=4",
        ),
    ],
    ids=["composer", "megatron-bridge", "epl"],
)
def test_predict_reads_what_they_say(
    said: Mapping[str, Any], beside: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    """The layout of a file is the one that --strategy says by hand, with the batch that stands beside the file."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(said), encoding="utf-8")
    read = json.loads(call("predict", str(path), *WEIGH, *beside, "--seq-len", "128", "--json").out)
    framework = ("--framework", read["framework"])
    batch = ("--global-batch", str(read["workload"]["global_batch"]), "--precision", read["workload"]["precision"])
    written = json.loads(
        call("predict", *WEIGH, "--strategy", words, *framework, *batch, "--seq-len", "128", "--json").out
    )
    assert (read["layout"], read["memory"], read["time"]) == (written["layout"], written["memory"], written["time"])


def test_a_job_says_no_layout(tmp_path: Path) -> None:
    """A task of SkyPilot says machines alone: `predict` refuses it and asks for the layout."""
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump(SKY), encoding="utf-8")
    refused = call("predict", str(path), *WEIGH, "--json")
    assert (refused.code, json.loads(refused.out)["error"]["code"]) == (2, "E_MISSING")


def test_model_without_machines_is_refused(tmp_path: Path) -> None:
    """One of the two is not enough to weigh a file, and saying it is no silent no-op."""
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps(DEEPSPEED), encoding="utf-8")
    done = call("validate", str(path), "--model", "llama-3.1-8b", "--json")
    assert (done.code, json.loads(done.out)["error"]["flag"]) == (2, "--hardware")
