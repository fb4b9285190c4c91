"""Megatron-LM: its arguments in the launch script, around its own pretrain_gpt.py, and torchrun as launcher.

Replicas are its DDP, ZeRO-1 its distributed optimizer (in instances where shards are replicated), ZeRO 2 and 3 Megatron-FSDP.
Arguments as in Megatron-LM at commit d98e8a6 (2026-08-22), megatron/training/arguments.py, where each is parsed and validated.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from strategist.document.plan import Plan
from strategist.emitters.coverage import (
    DATA_PARALLEL,
    EVEN_STAGES,
    EVERY,
    EXPERTS_OF_A_MODEL,
    FLOAT32,
    LOW,
    Clash,
    Coverage,
)
from strategist.emitters.deepspeed import CLIP_NORM, MASTERED
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.torchrun import job_files, torchrun_launcher
from strategist.errors import shown
from strategist.facts.buildable import odd_wiring
from strategist.facts.model import ModelShape
from strategist.records import replace

Argument = tuple[str, ...]
"""A name, and the words behind it."""

AUTOCAST = tuple(replace(FLOAT32, compute=low) for low in LOW)
BESIDE_MASTERS = tuple(formats for formats in MASTERED if formats.gradient == formats.reduce)
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
"""Megatron-FSDP's names of ZeRO stages."""

CP_KINDS = {"ring": "p2p", "all-to-all": "a2a", "hierarchical": "a2a+p2p"}
NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
POSITIONS = {"rope": "rope", "learned": "learned_absolute", "none": "none"}

COVERAGE = Coverage(
    framework="Megatron-LM",
    values={
        **DATA_PARALLEL,
        "mesh.cp": EVERY,
        "mesh.tp": EVERY,
        "mesh.pp": EVERY,
        "mesh.ep": EVERY,
        "mesh.etp": EVERY,
        "strategy.zero": EVERY,
        "strategy.virtual_stages": EVERY,
        "strategy.schedule": ("none", "1f1b", "interleaved"),
        "strategy.sequence_parallel": EVERY,
        "strategy.context_parallel": ("none", *CP_KINDS),
        "strategy.cp_inner": EVERY,
        "strategy.recompute_layers": EVERY,
        "strategy.backend": ("nccl",),
        "strategy.formats": (FLOAT32, *AUTOCAST, *BESIDE_MASTERS),
    },
    why={
        "strategy.schedule": "Its pipelines run 1F1B, plain or interleaved.",
        "strategy.stage_split": "The arguments are for stages that are equally long.",
        "strategy.recompute": "Its selective policy runs attention again, the plan's does not; of "
        "the modules that it can name instead, none is the rotation or the activation of dense layers, which the plan's runs again.",
        "strategy.recompute_every": "Its block method counts the first layers of a chunk, and its uniform one runs groups of them as one.",
        "strategy.recompute_stages": "Its block method counts as many layers on every stage.",
        "strategy.offload": "Its offloading needs optimizer states of other formats than the plan's.",
        "strategy.compile": "It does not compile models.",
        "strategy.formats": "It accumulates and reduces gradients in one format, beside fp32 masters.",
        "strategy.backend": "It trains on GPUs.",
        "workload.precision": "Its fp8 and fp4 need a recipe, which no plan holds.",
    },
    clashes=(
        Clash(
            holds=lambda plan: (plan.mesh.dp_shard > 1) != (plan.strategy.zero > 0),
            sentence="strategy.zero of 1 to 3 goes with mesh.dp_shard above 1, and 0 goes without.",
        ),
        Clash(
            holds=lambda plan: plan.strategy.zero > 1 and plan.mesh.pp > 1,
            sentence="strategy.zero = 2 and 3 beside mesh.pp were not tried with Megatron-FSDP.",
        ),
        Clash(
            holds=lambda plan: plan.strategy.zero > 1 and plan.mesh.dp_replicate > 1,
            sentence="strategy.zero = 2 and 3 beside mesh.dp_replicate were not tried with Megatron-FSDP.",
        ),
        Clash(
            holds=lambda plan: plan.strategy.zero > 1 and plan.strategy.formats.gradient in LOW,
            sentence="strategy.formats: Megatron-FSDP was not tried with gradients in a low format.",
        ),
        Clash(
            holds=lambda plan: plan.strategy.virtual_stages > 1 and plan.strategy.accumulation % plan.mesh.pp > 0,
            sentence="strategy.virtual_stages need a strategy.accumulation that mesh.pp divides.",
        ),
        Clash(
            holds=lambda plan: plan.model.layers % (plan.mesh.pp * plan.strategy.virtual_stages) > 0,
            sentence="mesh.pp x strategy.virtual_stages must divide the layers: its stages are equally long.",
        ),
        Clash(
            holds=lambda plan: plan.model.moe is not None and plan.mesh.tp > 1 and not plan.strategy.sequence_parallel,
            sentence="mesh.tp beside experts needs strategy.sequence_parallel.",
        ),
        Clash(
            holds=lambda plan: (plan.mesh.cp > 1) != (plan.strategy.context_parallel != "none"),
            sentence="mesh.cp above 1 goes with a strategy.context_parallel of ring, all-to-all or hierarchical, and 1 goes without.",
        ),
        EVEN_STAGES,
        EXPERTS_OF_A_MODEL,
        Clash(
            holds=lambda plan: not is_plain_transformer(plan.model),
            sentence="The arguments are for stacks of attention and feed-forward or expert layers; model.family is another.",
        ),
    ),
)


def checkout_script(title: str, variable: str, program: str, *words: str) -> str:
    """A training script that runs a program of a checkout with words of its own, files beside it among them, and the user's."""
    own = "".join(
        f', "{word}"' if word.startswith("-") else f', str(Path(__file__).with_name("{word}"))' for word in words
    )
    arguments = f"sys.argv[1:] = [{own.removeprefix(', ')}, *sys.argv[1:]]\n" if words else ""
    return f'''"""Run {title}'s own {program} with the words that follow this script's name."""

import os
import runpy
import sys
from pathlib import Path

if "{variable}" not in os.environ:
    raise SystemExit("Set {variable} to the folder of a checkout of {title}.")
folder = Path(os.environ["{variable}"])
{arguments}sys.path.insert(0, str(folder))
runpy.run_path(str(folder / "{program}"), run_name="__main__")
'''


TRAIN = checkout_script("Megatron-LM", "MEGATRON_LM", "pretrain_gpt.py")


def is_plain_transformer(model: ModelShape) -> bool:
    """Whether every layer is attention and the same dense or expert part, of widths that the arguments can say."""
    moe, biases = model.moe, {model.mlp_bias, model.o_bias}
    return (
        model.kind == "decoder"
        and not (
            model.mla or model.ssm or model.mix or model.window or model.full_heads or model.pattern or model.extra
        )
        and not (
            model.attn_sinks or model.attn_gate or model.embed_norm or model.lm_head_bias or model.extra_parameters
        )
        and not (model.layer_extra_parameters or model.v_dim not in (0, model.head_dim) or model.other_tower_parameters)
        and model.emb_dim in (0, model.hidden)
        and model.norm in NORMS
        and model.pos in POSITIONS
        and model.norms_per_layer == 2
        and not any(odd_wiring(model))
        and model.final_norm
        and model.qk_norm in ("", "head")
        and (model.mlp_gated, model.mlp_act) in ((True, "silu"), (False, "gelu"))
        and len(biases) == 1
        and (model.qkv_bias or not model.o_bias)
        and (moe is None or (moe.layers == model.layers and not (moe.shared_gate or moe.latent or moe.router_bias)))
    )


def megatron_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Names and values of everything that the plan decides; data, tokenizer and schedule follow on the command line."""
    return tuple(
        argument for part in (_mesh, _batch, _sharding, _numbers, _recompute, _model) for argument in part(plan)
    )


def _mesh(plan: Plan) -> Iterator[Argument]:
    mesh, strategy = plan.mesh, plan.strategy
    yield "--tensor-model-parallel-size", str(mesh.tp)
    yield "--pipeline-model-parallel-size", str(mesh.pp)
    yield "--context-parallel-size", str(mesh.cp)
    if strategy.virtual_stages > 1:
        yield "--num-virtual-stages-per-pipeline-rank", str(strategy.virtual_stages)
    if strategy.sequence_parallel:
        yield ("--sequence-parallel",)
    if mesh.cp > 1:
        yield "--cp-comm-type", CP_KINDS[strategy.context_parallel]
    if strategy.cp_inner > 1:  # from the inside out
        yield "--hierarchical-context-parallel-sizes", str(strategy.cp_inner), str(mesh.cp // strategy.cp_inner)
    if plan.model.moe is not None:
        yield "--expert-model-parallel-size", str(mesh.ep)
        yield "--expert-tensor-parallel-size", str(mesh.etp)


def _batch(plan: Plan) -> Iterator[Argument]:
    yield "--micro-batch-size", str(plan.strategy.micro_batch)
    yield "--global-batch-size", str(plan.workload.global_batch)
    yield "--seq-length", str(plan.workload.seq_len)
    yield "--max-position-embeddings", str(max(plan.model.max_seq, plan.workload.seq_len))


def _sharding(plan: Plan) -> Iterator[Argument]:
    """What is cut over the ranks of data parallelism. Megatron-FSDP has a checkpoint format of its own."""
    if plan.strategy.zero == 0:
        return
    yield ("--use-distributed-optimizer",)
    if plan.mesh.dp_replicate > 1:
        yield "--num-distributed-optimizer-instances", str(plan.mesh.dp_replicate)
    if plan.strategy.zero > 1:
        yield ("--use-megatron-fsdp",)
        yield "--data-parallel-sharding-strategy", SHARDING[plan.strategy.zero]
        yield "--ckpt-format", "fsdp_dtensor"


def _numbers(plan: Plan) -> Iterator[Argument]:
    """Number formats and optimizer. bf16 gradients are fp32 unless said otherwise, fp16 ones fp16."""
    formats = plan.strategy.formats
    if formats.compute != "float32":
        yield ("--bf16" if formats.compute == "bfloat16" else "--fp16",)
    if formats.compute == "float16" and formats.gradient == "float32":
        yield ("--accumulate-allreduce-grads-in-fp32",)
    if formats.compute == "bfloat16" and formats.gradient == "bfloat16":
        yield ("--grad-reduce-in-bf16",)
    yield "--clip-grad", str(CLIP_NORM)
    if plan.strategy.optimizer == "sgd":
        yield from (("--optimizer", "sgd"), ("--sgd-momentum", "0.9"), ("--weight-decay", "0.0"))
    else:
        yield from (
            ("--optimizer", "adam"),
            ("--adam-beta1", "0.9"),
            ("--adam-beta2", "0.95"),
            ("--weight-decay", "0.1"),
        )


def _recompute(plan: Plan) -> Iterator[Argument]:
    """Every layer by itself; or the first ones of every chunk, which is what Megatron's block method counts."""
    if plan.strategy.recompute == "full":
        layers = plan.strategy.recompute_layers
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "block" if layers else "uniform"
        yield "--recompute-num-layers", str(layers or 1)


def _model(plan: Plan) -> Iterator[Argument]:
    """The model's shape, without dropout, of which Megatron has a tenth unless told (megatron/core/transformer/transformer_config.py). The
    base of rotary positions is not in a plan: a comment names its option."""
    model = plan.model
    yield "--attention-dropout", "0.0"
    yield "--hidden-dropout", "0.0"
    yield "--num-layers", str(model.layers)
    yield "--hidden-size", str(model.hidden)
    yield "--ffn-hidden-size", str(model.ffn_hidden or (model.moe.ffn if model.moe else model.hidden))
    yield "--num-attention-heads", str(model.heads)
    yield "--kv-channels", str(model.head_dim)
    if model.kv_heads != model.heads:
        yield from (("--group-query-attention",), ("--num-query-groups", str(model.kv_heads)))
    yield "--normalization", NORMS[model.norm]
    yield "--position-embedding-type", POSITIONS[model.pos]
    yield "--vocab-size", str(model.vocab)
    if model.mlp_gated:
        yield ("--swiglu",)
    if not model.tied:
        yield ("--untie-embeddings-and-output-weights",)
    if not model.mlp_bias:
        yield ("--disable-bias-linear",)
    if model.qkv_bias and not model.mlp_bias:
        yield ("--add-qkv-bias",)
    if model.qk_norm:
        yield ("--qk-layernorm",)
    yield from _experts(model)


def _experts(model: ModelShape) -> Iterator[Argument]:
    if model.moe is None:
        return
    yield "--num-experts", str(model.moe.experts)
    yield "--moe-router-topk", str(model.moe.top_k)
    yield "--moe-ffn-hidden-size", str(model.moe.ffn)
    if model.moe.groups > 1:
        yield "--moe-router-num-groups", str(model.moe.groups)
        yield "--moe-router-group-topk", str(model.moe.top_groups)
    yield "--moe-token-dispatcher-type", "alltoall"
    if model.moe.shared_ffn:
        yield "--moe-shared-expert-intermediate-size", str(model.moe.shared_ffn)


def connections(plan: Plan) -> str:
    """CUDA_DEVICE_MAX_CONNECTIONS: one for cuts of tensors and sequences before Blackwell, anything else for Megatron-FSDP."""
    if plan.strategy.zero > 1:
        return "unset CUDA_DEVICE_MAX_CONNECTIONS  # Megatron-FSDP refuses 1\n"
    if plan.mesh.tp > 1 or plan.mesh.cp > 1:
        return 'export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"\n'
    return ""


def copies(plan: Plan, framework: str) -> str:
    """What a framework with masters keeps beside the plan's weights, as a comment; nothing where the plan has it too."""
    if plan.strategy.formats not in AUTOCAST:
        return ""
    low = plan.strategy.formats.compute
    return f"# {framework} keeps {shown(low)} weights beside the plan's fp32 ones: 2 more bytes per weight.\n"


def constants(plan: Plan, framework: str, options: str) -> str:
    """What weights of others may need beside the plan, as a comment; base and epsilon are Megatron's defaults."""
    if plan.model.pos != "rope":
        return ""
    return (
        f"# {framework} trains with a base of 10000 for rotary angles, unscaled, and 1e-5 in norms. Converted weights need what rope_theta,\n"
        f"# rope_scaling and the epsilon of their config.json say: add {options}.\n"
    )


def write(plan: Plan, options: Options) -> Files:
    """plan.json, train.py and launch.sh."""
    words = tuple(" ".join(shlex.quote(word) for word in argument) for argument in megatron_arguments(plan))
    told = constants(
        plan, "Megatron-LM", "--rotary-base, --use-rope-scaling and --norm-epsilon behind this script's name"
    )
    settings = copies(plan, "Megatron-LM") + told + connections(plan)
    launcher = replace(torchrun_launcher(plan), words=words, settings=settings)
    return job_files(plan, options, TRAIN, launcher)


MEGATRON = Emitter(
    name="megatron",
    title="Megatron-LM: arguments of its pretrain_gpt.py",
    engine="megatron",
    versions="Megatron-LM d98e8a6 of 2026-08-22",
    write=write,
    axes=COVERAGE.axes,
    coverage=COVERAGE,
    executables=("launch.sh",),
)
