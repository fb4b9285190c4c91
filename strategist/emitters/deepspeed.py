"""DeepSpeed: its JSON for ZeRO 0 to 3, Ulysses and AutoTP, a training script on the engine, and torchrun as launcher.

AutoTP cuts a model by the plan that Transformers has for it, embedding and head by vocabulary where it is told so, and takes the loss on the
parts. torchrun, because DeepSpeed's own launcher appends `--local_rank=N` to the words of the script. Keys as in DeepSpeed 0.19.8,
runtime/config.py, runtime/zero/config.py, runtime/precision_config.py and runtime/torch_autocast.py.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from strategist.document.plan import Dtype, NumberFormats, Plan, Strategy
from strategist.emitters import zero_plus_plus
from strategist.emitters.coverage import (
    AUTOCAST,
    CUT_TENSORS,
    DATA_PARALLEL,
    EVERY,
    FLOAT32,
    LOW,
    NATIVE,
    WHOLE_TOKENS,
    Clash,
    Coverage,
    language_models,
)
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.hugging_face_script import (
    ENGINE_OPTIMIZER,
    ENGINE_OPTIMIZER_IMPORTS,
    KEEP_MIXTURES_WHOLE,
    LEAVE,
    OPTIMIZER,
    script,
    script_of,
)
from strategist.emitters.serial import json_text
from strategist.emitters.torchrun import job_files
from strategist.facts.model import ModelShape

CONFIG = PurePosixPath("deepspeed.json")
CLIP_NORM = 1.0
"""As strategist's executor clips: Llama 2 (Touvron et al. 2023, arXiv 2307.09288, section 2.2)."""

SHORT: dict[Dtype, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""DeepSpeed's names of number formats."""

MASTERED = tuple(
    NumberFormats(parameter=low, compute=low, gradient=gradient, reduce=reduce, master="float32")
    for low in LOW
    for gradient in ("float32", low)
    for reduce in ("float32", low)
)
FORMATS = (*NATIVE, *MASTERED)
"""fp32 throughout; fp32 weights under torch_autocast; low weights beside fp32 masters."""

SHARDS_OVER_ALL_RANKS = Clash(
    holds=lambda plan: plan.mesh.dp_replicate > 1 and plan.strategy.zero > 0,
    sentence="DeepSpeed 0.19 shards over all ranks, so mesh.dp_replicate stays 1 with strategy.zero above 0: its hpZ "
    "shards a second copy of the weights, not the optimizer, and MiCS was removed.",
)
SHARDS_NEED_ZERO = Clash(
    holds=lambda plan: plan.mesh.dp_shard > 1 and plan.strategy.zero == 0,
    sentence="mesh.dp_shard above 1 needs strategy.zero of 1 to 3.",
)
DRIVE_NEEDS_ZERO_3 = Clash(
    holds=lambda plan: plan.strategy.offload == "nvme" and plan.strategy.zero != 3,
    sentence="strategy.offload = nvme needs strategy.zero = 3: DeepSpeed swaps an optimizer's state below it nowhere.",
)
NEEDS_ZERO_3 = Clash(
    holds=lambda plan: plan.strategy.offload == "parameters" and plan.strategy.zero != 3,
    sentence="strategy.offload = parameters needs strategy.zero = 3: whole parameters stay on the device below it.",
)


def has_plain_attention(model: ModelShape) -> bool:
    """Whether every layer has rotary attention over all tokens before: Ulysses drops masks and hands over positions."""
    special = (
        model.mla or model.ssm or model.mix or model.window or model.full_heads or model.pattern or model.attn_sinks
    )
    return model.kind == "decoder" and model.pos == "rope" and not special


COVERAGE = Coverage(
    framework="DeepSpeed 0.19",
    values={
        **DATA_PARALLEL,
        "strategy.zero": EVERY,
        "strategy.offload": EVERY,
        "strategy.formats": FORMATS,
        "mesh.cp": EVERY,
        "mesh.tp": EVERY,
        "strategy.context_parallel": ("none", "all-to-all"),
        "workload.target_len": EVERY,
    },
    why={
        "mesh.pp": "Its pipelines need the model written as a PipelineModule.",
        "mesh.ep": "Its AutoEP replaces a model's experts by its own kernels for GPUs, which were not tried.",
        "strategy.sequence_parallel": WHOLE_TOKENS,
        "strategy.context_parallel": "Its Ulysses exchanges heads for parts of the sequence; it has no ring.",
        "strategy.recompute": "Transformers recomputes whole layers.",
        "strategy.compile": "Its compilation passes are not mapped.",
        "strategy.formats": "It keeps fp32 throughout, fp32 under autocast, or low weights beside fp32 masters.",
        "workload.precision": "It has no section for fp8 or fp4.",
    },
    clashes=(
        SHARDS_OVER_ALL_RANKS,
        Clash(
            holds=lambda plan: plan.strategy.offload == "optimizer" and plan.strategy.zero == 0,
            sentence="strategy.offload = optimizer needs strategy.zero of 1 to 3.",
        ),
        SHARDS_NEED_ZERO,
        Clash(
            holds=lambda plan: plan.strategy.offload != "none" and plan.strategy.optimizer != "adamw",
            sentence="strategy.offload needs strategy.optimizer = adamw: DeepSpeed's own optimizer for the host is Adam.",
        ),
        Clash(
            holds=lambda plan: plan.strategy.offload != "none" and plan.strategy.formats in AUTOCAST[1:],
            sentence="strategy.offload was tried under torch_autocast with strategy.formats of bfloat16 that are reduced in float32 alone.",
        ),
        NEEDS_ZERO_3,
        DRIVE_NEEDS_ZERO_3,
        Clash(
            holds=lambda plan: (plan.mesh.cp > 1) != (plan.strategy.context_parallel != "none"),
            sentence="mesh.cp above 1 goes with strategy.context_parallel = all-to-all, and 1 goes without.",
        ),
        Clash(
            holds=lambda plan: plan.mesh.cp > 1 and not has_plain_attention(plan.model),
            sentence="mesh.cp: Ulysses was tried with rotary attention over all tokens alone; the attention of model.family is another.",
        ),
        Clash(
            holds=lambda plan: plan.mesh.cp > 1 and plan.strategy.offload != "none",
            sentence="strategy.offload beside mesh.cp was not tried with Ulysses.",
        ),
        Clash(
            holds=lambda plan: plan.mesh.cp > 1 and plan.strategy.formats not in (FLOAT32, *AUTOCAST),
            sentence="strategy.formats with masters beside mesh.cp were not tried with Ulysses.",
        ),
        *CUT_TENSORS,
        Clash(
            holds=lambda plan: plan.mesh.tp > 1 and plan.mesh.cp > 1,
            sentence="mesh.tp beside mesh.cp was not tried: AutoTP and Ulysses each give DeepSpeed groups of their own.",
        ),
        Clash(
            holds=lambda plan: plan.mesh.tp > 1 and plan.strategy.offload != "none",
            sentence="strategy.offload beside mesh.tp was not tried with AutoTP.",
        ),
        Clash(
            holds=lambda plan: plan.mesh.tp > 1 and plan.strategy.zero == 0 and plan.strategy.formats in MASTERED,
            sentence="strategy.formats with masters beside mesh.tp were tried with strategy.zero of 1 to 3 alone.",
        ),
        Clash(
            holds=lambda plan: (
                plan.strategy.zero == 0
                and plan.strategy.formats in MASTERED
                and plan.strategy.formats.gradient == "float32"
            ),
            sentence="strategy.formats of low weights beside float32 gradients need strategy.zero of 1 to 3: without it DeepSpeed stops "
            "at the mixture.",
        ),
        language_models("DeepSpeed"),
    ),
)

TRAIN = script(
    "DeepSpeed",
    "import deepspeed\n"
    "import torch.distributed as dist\n"
    + ENGINE_OPTIMIZER_IMPORTS
    + "from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF\n"
    "from torch.utils.data import DataLoader, Dataset, DistributedSampler\n"
    "from transformers import AutoConfig, AutoModelForCausalLM\n",
    OPTIMIZER
    + ENGINE_OPTIMIZER
    + KEEP_MIXTURES_WHOLE
    + '''

def cut_sequences(model):
    """Ulysses around the model's attention, and its groups; nothing where sequences stay whole."""
    return UlyssesSPAttentionHF.register_with_transformers(
        model,
        core_attn_implementation=model.config._attn_implementation,
        sequence_parallel_size=mesh["cp"],
        micro_batch_size=strategy["micro_batch"],
        seq_length=workload["seq_len"],
        seq_length_is_variable=False,
    )


class Replicas:
    """How many ranks have samples of their own: DeepSpeed asks before AutoTP has groups."""

    @staticmethod
    def get_data_parallel_world_size():
        return dist.get_world_size() // mesh["tp"]


def loss_of(engine, batch):
    """The loss of a micro-batch, or this rank's part of it: DeepSpeed adds gradients up over the ranks of a sequence."""
    if mesh["cp"] == 1:
        return engine(**batch).loss
    length = workload["seq_len"] // mesh["cp"]
    part = slice(dist.get_rank() % mesh["cp"] * length, (dist.get_rank() % mesh["cp"] + 1) * length)
    following = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)[:, part]
    places = torch.arange(workload["seq_len"], device=engine.device).expand_as(batch["input_ids"])[:, part]
    logits = engine(input_ids=batch["input_ids"][:, part].contiguous(), position_ids=places.contiguous()).logits
    total = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), following.flatten(), reduction="sum")
    return total / (len(following) * (workload["seq_len"] - 1))


def main():
    backend = strategy["backend"]
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(dist_backend=backend)
    model = make_model()
    keep_mixtures_whole(model)
    optimizer = make_engine_optimizer(model.parameters())
    groups = Replicas() if mesh["tp"] > 1 else cut_sequences(model)
    config = str(here / "deepspeed.json")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=groups)
    data = SyntheticTokens(model.config.vocab_size)
    share = mesh["cp"] * mesh["tp"]
    replicas = dist.get_world_size() // share
    sampler = DistributedSampler(data, replicas, dist.get_rank() // share, shuffle=False)
    batches = iter(DataLoader(data, batch_size=strategy["micro_batch"], sampler=sampler))
    for number in range(options.steps):
        losses = []
        for _ in range(strategy["accumulation"]):
            batch = {name: tensor.to(engine.device) for name, tensor in next(batches).items()}
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().float())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {number}  loss {mean.item() / (replicas * mesh['tp']):.6f}", flush=True)
'''
    + LEAVE,
)


AIO = {
    "block_size": 1048576,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}
"""How a drive is read and written: DeepSpeed's own choices, written down because they are what one tunes for a drive."""


def deepspeed_config(plan: Plan, options: Options) -> dict[str, Any]:
    """DeepSpeed's document: the batch in all three of its keys, ZeRO with what is offloaded or asked for besides, and number formats."""
    strategy = plan.strategy
    batch = {
        "train_batch_size": strategy.micro_batch * strategy.accumulation * plan.mesh.data_parallel,
        "train_micro_batch_size_per_gpu": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.accumulation,
    }
    cut: dict[str, Any] = {"sequence_parallel_size": plan.mesh.cp} if plan.mesh.cp > 1 else {}
    if plan.mesh.tp > 1:
        cut["tensor_parallel"] = {"autotp_size": plan.mesh.tp, "vocab_parallel_lm_head": True}
    zero = {"stage": strategy.zero} | _offload(plan, options.nvme_path) | zero_plus_plus.keys(plan, options.zeropp)
    cut |= {"aio": AIO} if strategy.offload == "nvme" else {}
    if strategy.zero and strategy.optimizer == "sgd":  # torch's own, which works element by element; it stops without
        batch["zero_allow_untested_optimizer"] = True
    return batch | {"gradient_clipping": CLIP_NORM, "zero_optimization": zero} | cut | _formats(strategy.formats)


def _offload(plan: Plan, nvme_path: str | None) -> dict[str, Any]:
    """What lies in host memory, and what on a drive. DeepSpeed keeps the optimizer on the host too when it keeps parameters there."""
    on_host = {"device": "cpu", "pin_memory": plan.strategy.backend == "nccl"}
    on_drive = on_host | {"device": "nvme", "nvme_path": nvme_path}
    return {
        "none": {},
        "optimizer": {"offload_optimizer": on_host},
        "parameters": {"offload_optimizer": on_host, "offload_param": on_host},
        "nvme": {"offload_optimizer": on_drive, "offload_param": on_host},
    }[plan.strategy.offload]


def _formats(formats: NumberFormats) -> dict[str, Any]:
    """Sections of number formats; none for fp32 throughout."""
    if formats == FLOAT32:
        return {}
    if formats.parameter == "float32":
        # Gradients of the modules in this list are reduced in the low format; all others in their own.
        safe: dict[str, Any] = {"lower_precision_safe_modules": []} if formats.reduce == "float32" else {}
        return {"torch_autocast": {"enabled": True, "dtype": formats.compute} | safe}
    return {
        SHORT[formats.parameter]: {"enabled": True},
        "data_types": {"grad_accum_dtype": SHORT[formats.gradient]},
        "communication_data_type": SHORT[formats.reduce],
    }


def write(plan: Plan, options: Options) -> Files:
    """plan.json, deepspeed.json, train.py and launch.sh."""
    return job_files(plan, options, script_of(plan, TRAIN)) | own_file(plan, options)


def own_file(plan: Plan, options: Options) -> dict[PurePosixPath, str]:
    """DeepSpeed's file, which is the same whoever starts its engine."""
    return {CONFIG: json_text(deepspeed_config(plan, options))}


def named(plan: Plan) -> dict[str, str]:
    """The key by which front ends of DeepSpeed find its file, where ZeRO needs it."""
    return {"deepspeed": str(CONFIG)} if plan.strategy.zero else {}


def has_zero(strategy: Strategy) -> bool:
    """Whether front ends that leave all of ZeRO to DeepSpeed need it."""
    return strategy.zero > 0


def file_for_zero(plan: Plan, options: Options) -> dict[PurePosixPath, str]:
    """DeepSpeed's file, where ZeRO needs it."""
    return own_file(plan, options) if plan.strategy.zero else {}


DEEPSPEED = Emitter(
    name="deepspeed",
    title="DeepSpeed engine, ZeRO 0 to 3, Ulysses and AutoTP, a Hugging Face model",
    engine="deepspeed",
    versions="DeepSpeed 0.19.8, transformers 5.23, torch 2.13",
    write=write,
    axes=COVERAGE.axes,
    coverage=COVERAGE,
    executables=("launch.sh",),
    names_drive=True,
    by_deepspeed=lambda strategy: True,
)
