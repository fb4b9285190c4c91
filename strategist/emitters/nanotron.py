"""nanotron: its YAML, a script that runs its own run_train.py on it, and torchrun as launcher.

Replicas are its data parallelism and ZeRO-1 its sharded optimizer over them. Keys as in nanotron at commit 2411b02
(2026-04-07), config/config.py, config/parallelism_config.py and config/models_config.py.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from strategist.document.plan import Plan
from strategist.emitters.coverage import DATA_PARALLEL, EVERY, FLOAT32, Clash, Coverage
from strategist.emitters.deepspeed import CLIP_NORM, MASTERED
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.megatron import checkout_script, copies
from strategist.emitters.serial import yaml_text
from strategist.emitters.torchrun import job_files, layout_comment, torchrun_launcher
from strategist.facts.buildable import odd_wiring
from strategist.facts.model import ModelShape
from strategist.records import replace

CONFIG = PurePosixPath("nanotron.yaml")
AUTOCAST = replace(FLOAT32, compute="bfloat16")
BESIDE_MASTERS = tuple(f for f in MASTERED if (f.compute, f.gradient, f.reduce) == ("bfloat16", "float32", "float32"))

COVERAGE = Coverage(
    framework="nanotron",
    values={
        **DATA_PARALLEL,
        "mesh.tp": EVERY,
        "strategy.zero": (0, 1),
        "strategy.sequence_parallel": EVERY,
        "strategy.formats": (FLOAT32, AUTOCAST, *BESIDE_MASTERS),
        "strategy.optimizer": ("adamw",),
        "strategy.backend": ("nccl",),
        "workload.precision": ("fp32", "bf16"),
    },
    why={
        "mesh.pp": "It cuts pipelines by costs of its own, not by the plan's stages.",
        "mesh.cp": "Its context parallelism needs an attention of its own, which the model chooses.",
        "mesh.ep": "Its experts are another class of model.",
        "strategy.zero": "Its sharding ends at the optimizer.",
        "strategy.recompute": "It recomputes whole layers.",
        "strategy.offload": "It keeps everything on the device.",
        "strategy.optimizer": "Its SGD has no momentum, the plan's has.",
        "strategy.compile": "It does not compile models.",
        "strategy.formats": "It keeps fp32 throughout, or bf16 weights beside fp32 masters and gradients.",
        "strategy.backend": "It trains on GPUs.",
        "workload.precision": "It has neither fp8 nor fp4.",
    },
    clashes=(
        Clash(
            holds=lambda plan: (plan.mesh.dp_shard > 1) != (plan.strategy.zero > 0),
            sentence="strategy.zero = 1 goes with mesh.dp_shard above 1, and 0 goes without.",
        ),
        Clash(
            holds=lambda plan: plan.mesh.dp_shard > 1 and plan.mesh.dp_replicate > 1,
            sentence="mesh.dp_replicate beside mesh.dp_shard has no place: it shards over all data-parallel ranks.",
        ),
        Clash(
            holds=lambda plan: plan.mesh.tp > plan.model.kv_heads,
            sentence="mesh.tp above the model's key-value heads is refused by nanotron, which does not copy them.",
        ),
        Clash(
            holds=lambda plan: not is_llama(plan.model),
            sentence="The file is for models built like Llama; model.family is another.",
        ),
    ),
)

TRAIN = checkout_script("nanotron", "NANOTRON", "run_train.py", "--config-file", str(CONFIG))


def is_llama(model: ModelShape) -> bool:
    """Whether the model is nanotron's LlamaConfig: rotary positions, RMSNorm, a gated SiLU, no biases, no experts."""
    return (
        model.kind == "decoder"
        and (model.pos, model.norm, model.mlp_gated, model.mlp_act) == ("rope", "rmsnorm", True, "silu")
        and not (model.moe or model.mla or model.ssm or model.mix or model.window or model.pattern or model.qk_norm)
        and not (
            model.mlp_bias
            or model.qkv_bias
            or model.o_bias
            or model.lm_head_bias
            or model.attn_sinks
            or model.attn_gate
        )
        and not (
            model.embed_norm or model.extra_parameters or model.layer_extra_parameters or model.other_tower_parameters
        )
        and model.head_dim * model.heads == model.hidden
        and not any(odd_wiring(model))
        and (model.v_dim, model.emb_dim, model.norms_per_layer) in ((0, 0, 2), (model.head_dim, model.hidden, 2))
    )


def nanotron_config(plan: Plan, job_name: str) -> dict[str, Any]:
    """The document of run_train.py. Steps, learning rate, tokenizer and data are not in a plan: they are for editing."""
    mesh, strategy = plan.mesh, plan.strategy
    return {
        "general": {"project": job_name, "run": job_name, "seed": 0},
        "parallelism": {
            "dp": mesh.data_parallel,
            "pp": mesh.pp,
            "tp": mesh.tp,
            "pp_engine": "1f1b",
            "tp_mode": "REDUCE_SCATTER" if strategy.sequence_parallel else "ALL_REDUCE",
            "tp_linear_async_communication": False,
            "recompute_layer": strategy.recompute == "full",
            "context_parallel_size": mesh.cp,
            "expert_parallel_size": mesh.ep,
        },
        "model": {
            "dtype": strategy.formats.compute,
            "init_method": {"std": 0.02},
            "make_vocab_size_divisible_by": 1,
            "model_config": _model(plan.model, plan.workload.seq_len),
        },
        "tokens": {
            "sequence_length": plan.workload.seq_len,
            "train_steps": 20,
            "micro_batch_size": strategy.micro_batch,
            "batch_accumulation_per_replica": strategy.accumulation,
        },
        "optimizer": _optimizer(plan),
        "tokenizer": {"tokenizer_name_or_path": None},
        "data_stages": [
            {
                "name": "training",
                "start_training_step": 1,
                "data": {"dataset": None, "seed": 0, "num_loading_workers": 1},
            }
        ],
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": 1000},
    }


def _model(model: ModelShape, seq_len: int) -> dict[str, Any]:
    """The shape under nanotron's names. The base of rotary positions is not in a plan: a comment names its key."""
    return {
        "is_llama_config": True,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn_hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": max(model.max_seq, seq_len),
        "hidden_act": "silu",
        "tie_word_embeddings": model.tied,
        "vocab_size": model.vocab,
    }


def _optimizer(plan: Plan) -> dict[str, Any]:
    """AdamW as strategist's executor has it; low weights have fp32 masters in the accumulator of gradients."""
    return {
        "zero_stage": plan.strategy.zero,
        "weight_decay": 0.1,
        "clip_grad": CLIP_NORM,
        "accumulate_grad_in_fp32": plan.strategy.formats.compute != "float32",
        "optimizer_factory": {
            "name": "adamW",
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_eps": 1.0e-8,
            "torch_adam_is_fused": True,
        },
        "learning_rate_scheduler": {
            "learning_rate": 3.0e-4,
            "lr_warmup_steps": 0,
            "lr_warmup_style": "constant",
            "lr_decay_style": "linear",
            "min_decay_lr": 3.0e-4,
        },
    }


def write(plan: Plan, options: Options) -> Files:
    """plan.json, nanotron.yaml, train.py and launch.sh."""
    comments = (
        layout_comment(plan).removeprefix("# "),
        "Steps, learning rate, tokenizer and data are yours to edit.",
        "nanotron takes rope_theta 10000 and rms_norm_eps 1e-6 where model_config names none; converted weights need those of their config.json.",
    )
    launcher = replace(torchrun_launcher(plan), settings=copies(plan, "nanotron"))
    files = job_files(plan, options, TRAIN, launcher)
    return files | {CONFIG: yaml_text(nanotron_config(plan, options.job_name), comments)}


NANOTRON = Emitter(
    name="nanotron",
    title="nanotron: the file of its run_train.py",
    engine="nanotron",
    versions="nanotron 2411b02 of 2026-04-07",
    write=write,
    axes=COVERAGE.axes,
    coverage=COVERAGE,
    executables=("launch.sh",),
)
