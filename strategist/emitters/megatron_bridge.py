"""Megatron-Bridge, NeMo's library of recipes: a recipe that fills its ConfigContainer, the choices as JSON, and torchrun.

The plan is said to Megatron-LM first (`megatron_arguments`): each argument has its place in the container here, and one
without a place stops the emitter. Names as in Megatron-Bridge 0.3.1, src/megatron/bridge/training/config.py,
training/mixed_precision.py and models/gpt_provider.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from strategist.document.plan import Plan
from strategist.emitters.coverage import Clash
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.megatron import COVERAGE as MEGATRON_COVERAGE
from strategist.emitters.megatron import Argument, connections, constants, copies, megatron_arguments
from strategist.emitters.serial import json_text
from strategist.emitters.torchrun import job_files, torchrun_launcher
from strategist.records import replace

CONFIG = PurePosixPath("megatron_bridge.json")

SAME_NAME: Mapping[str, tuple[str, ...]] = {
    "model": (
        "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size", "--cp-comm-type",
        "--expert-model-parallel-size", "--expert-tensor-parallel-size", "--sequence-parallel", "--seq-length",
        "--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--num-layers", "--hidden-size",
        "--ffn-hidden-size", "--num-attention-heads", "--kv-channels", "--num-query-groups", "--normalization",
        "--position-embedding-type", "--vocab-size", "--add-qkv-bias", "--qk-layernorm", "--moe-router-topk",
        "--moe-ffn-hidden-size", "--moe-token-dispatcher-type", "--moe-shared-expert-intermediate-size",
        "--moe-router-num-groups", "--moe-router-group-topk", "--attention-dropout", "--hidden-dropout",
    ),
    "train": ("--micro-batch-size", "--global-batch-size"),
    "optimizer": ("--optimizer", "--clip-grad", "--adam-beta1", "--adam-beta2", "--sgd-momentum", "--weight-decay"),
    "ddp": (
        "--use-distributed-optimizer", "--num-distributed-optimizer-instances", "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy",
    ),
    "checkpoint": ("--ckpt-format",),
    "mixed_precision": ("--bf16", "--fp16"),
}  # fmt: skip
"""Arguments whose fields have their name, by section of the container."""

OTHER_NAME: Mapping[str, tuple[tuple[str, str, Any], ...]] = {
    "--num-virtual-stages-per-pipeline-rank": (("model", "virtual_pipeline_model_parallel_size", None),),
    "--num-experts": (("model", "num_moe_experts", None),),
    "--swiglu": (("model", "gated_linear_unit", True),),
    "--untie-embeddings-and-output-weights": (("model", "share_embeddings_and_output_weights", False),),
    "--disable-bias-linear": (("model", "add_bias_linear", False),),
    "--accumulate-allreduce-grads-in-fp32": (("mixed_precision", "grad_reduce_in_fp32", True),),
    "--grad-reduce-in-bf16": (("mixed_precision", "grad_reduce_in_fp32", False),),
    "--group-query-attention": (),  # num_query_groups says it
    "--max-position-embeddings": (),  # the sequence length is the number of learned positions
}
"""Section, field and value (None: the argument's own) of the other arguments."""

COVERAGE = replace(
    MEGATRON_COVERAGE,
    framework="Megatron-Bridge 0.3",
    values={
        **MEGATRON_COVERAGE.values,
        "strategy.context_parallel": ("none", "ring", "all-to-all"),
        "strategy.cp_inner": (1,),
    },
    why={
        **MEGATRON_COVERAGE.why,
        **dict.fromkeys(
            ("strategy.context_parallel", "strategy.cp_inner"),
            "Groups inside context parallelism were not tried with its container.",
        ),
    },
    clashes=(
        *MEGATRON_COVERAGE.clashes,
        Clash(
            holds=lambda plan: plan.model.pos == "learned" and plan.model.max_seq > plan.workload.seq_len,
            sentence="model.max_seq of learned positions above workload.seq_len has no place: it makes as many as the latter.",
        ),
        Clash(
            holds=lambda plan: plan.model.pos == "none",
            sentence="model.pos = none is none of its position_embedding_type.",
        ),
    ),
    hint="Emit it to megatron or torchrun, or pin another layout.",
)

TRAIN = '''"""A recipe of Megatron-Bridge: its ConfigContainer under megatron_bridge.json. Yours to edit."""

import argparse
import json
from pathlib import Path

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    GPTDatasetConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig

here = Path(__file__).parent


def dataset(seq_length, options):
    """Data that Megatron's tools have prepared, or made-up ones while none are named."""
    common = {
        "seq_length": seq_length,
        "random_seed": options.seed,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
    }
    if options.data is None:
        return MockGPTDatasetConfig(**common)
    return GPTDatasetConfig(blend=([options.data], None), split="99,1,0", **common)


def tokenizer(vocabulary, options):
    """A tokenizer of Hugging Face, or one that only counts while none is named."""
    if options.tokenizer is None:
        return TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=vocabulary)
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=options.tokenizer)


def mixed_precision(choices):
    """Formats of weights and of what travels between stages follow from the format of compute."""
    low = torch.bfloat16 if choices.get("bf16") else torch.float16 if choices.get("fp16") else torch.float32
    return MixedPrecisionConfig(fp32=low is torch.float32, params_dtype=low, pipeline_dtype=low, **choices)


def recipe(options):
    """The whole configuration; what the plan decides stands in megatron_bridge.json."""
    choices = json.loads((here / "megatron_bridge.json").read_text(encoding="utf-8"))
    model = GPTModelProvider(**choices["model"])
    decay = choices["optimizer"]["weight_decay"]
    model.activation_func = torch.nn.functional.silu if model.gated_linear_unit else torch.nn.functional.gelu
    return ConfigContainer(
        model=model,
        train=TrainingConfig(train_iters=options.steps, eval_iters=0, **choices["train"]),
        optimizer=OptimizerConfig(
            lr=options.learning_rate,
            min_lr=options.learning_rate,
            use_distributed_optimizer=choices["ddp"].get("use_distributed_optimizer", False),
            **choices["optimizer"],
        ),
        scheduler=SchedulerConfig(lr_decay_style="constant", start_weight_decay=decay, end_weight_decay=decay),
        ddp=DistributedDataParallelConfig(**choices["ddp"]),
        dataset=dataset(choices["model"]["seq_length"], options),
        tokenizer=tokenizer(choices["model"]["vocab_size"], options),
        logger=LoggerConfig(log_interval=1),
        checkpoint=CheckpointConfig(**choices["checkpoint"]),
        mixed_precision=mixed_precision(choices["mixed_precision"]),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="prefix of files that Megatron's tools have prepared")
    parser.add_argument("--tokenizer", help="folder or hub name of a tokenizer")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the order of data")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of the optimizer, constant")
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    pretrain(config=recipe(parser.parse_args()), forward_step_func=forward_step)


if __name__ == "__main__":
    main()
'''


def bridge_config(plan: Plan) -> dict[str, dict[str, Any]]:
    """The plan's choices by section of ConfigContainer. Gradients are fp32 in fp32 and bf16 unless said otherwise."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in SAME_NAME}
    sections["mixed_precision"]["grad_reduce_in_fp32"] = plan.strategy.formats.compute != "float16"
    for argument in megatron_arguments(plan):
        for section, field, value in places_of(argument):
            sections[section][field] = value
    return sections


def places_of(argument: Argument) -> tuple[tuple[str, str, Any], ...]:
    """Section, field and value that say an argument. Raises KeyError for one that has no place."""
    name, *words = argument
    own = _value(words[0]) if words else True
    for section, names in SAME_NAME.items():
        if name in names:
            return ((section, name.removeprefix("--").replace("-", "_"), own),)
    return tuple((section, field, own if value is None else value) for section, field, value in OTHER_NAME[name])


def _value(word: str) -> int | float | str:
    """A number where the word is one."""
    if word.isdecimal():
        return int(word)
    return float(word) if word.replace(".", "", 1).isdecimal() else word


def write(plan: Plan, options: Options) -> Files:
    """plan.json, megatron_bridge.json, train.py and launch.sh."""
    told = constants(
        plan, "Megatron-Bridge", f"rotary_base, rope_scaling and layernorm_epsilon to the model in {CONFIG}"
    )
    settings = copies(plan, "Megatron-Bridge") + told + connections(plan)
    launcher = replace(torchrun_launcher(plan), settings=settings)
    return job_files(plan, options, TRAIN, launcher) | {CONFIG: json_text(bridge_config(plan))}


MEGATRON_BRIDGE = Emitter(
    name="megatron-bridge",
    title="NeMo's Megatron-Bridge: a recipe that fills its ConfigContainer",
    engine="megatron",
    versions="Megatron-Bridge 0.3.1, Megatron-Core 0.16.1",
    write=write,
    axes=COVERAGE.axes,
    coverage=COVERAGE,
    executables=("launch.sh",),
)
