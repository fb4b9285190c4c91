"""DeepSpeed: its JSON for ZeRO 0 to 3, a training script on the engine, and torchrun as launcher.

torchrun, because DeepSpeed's own launcher appends `--local_rank=N` to the words of the script. Keys as in DeepSpeed 0.19.8,
runtime/config.py, runtime/zero/config.py, runtime/precision_config.py and runtime/torch_autocast.py.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from strategist.document.plan import Dtype, NumberFormats, Plan
from strategist.emitters.coverage import (
    AUTOCAST,
    DATA_PARALLEL,
    EVERY,
    FLOAT32,
    LOW,
    NATIVE,
    Clash,
    Coverage,
    causal_models,
)
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.hugging_face_script import OPTIMIZER, script
from strategist.emitters.serial import json_text
from strategist.emitters.torchrun import job_files

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
NEEDS_ZERO_3 = Clash(
    holds=lambda plan: plan.strategy.offload == "parameters" and plan.strategy.zero != 3,
    sentence="strategy.offload = parameters needs strategy.zero = 3: whole parameters stay on the device below it.",
)
COVERAGE = Coverage(
    framework="DeepSpeed 0.19",
    values={
        **DATA_PARALLEL,
        "strategy.zero": EVERY,
        "strategy.offload": ("none", "optimizer", "parameters"),
        "strategy.formats": FORMATS,
    },
    why={
        "mesh.tp": "Its AutoTP cuts models by their names, which no plan holds.",
        "mesh.pp": "Its pipelines need the model written as a PipelineModule.",
        "mesh.cp": "Its Ulysses needs hooks in the model's attention.",
        "mesh.ep": "Its experts need its own MoE layers.",
        "strategy.recompute": "Transformers recomputes whole layers.",
        "strategy.offload": "NVMe needs a folder, and the plan names none.",
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
            holds=lambda plan: plan.strategy.offload != "none" and plan.strategy.formats in AUTOCAST,
            sentence="strategy.offload and fp32 strategy.formats under torch_autocast were not tried together.",
        ),
        NEEDS_ZERO_3,
        causal_models("DeepSpeed"),
    ),
)

TRAIN = script(
    "DeepSpeed",
    "import deepspeed\n"
    "import torch.distributed as dist\n"
    "from deepspeed.ops.adam import DeepSpeedCPUAdam\n"
    "from torch.utils.data import DataLoader, Dataset, DistributedSampler\n"
    "from transformers import AutoConfig, AutoModelForCausalLM\n",
    OPTIMIZER
    + """

def main():
    backend = strategy["backend"]
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(dist_backend=backend)
    model = make_model()
    if strategy["offload"] == "none":
        optimizer = make_optimizer(model.parameters())
    else:
        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=str(here / "deepspeed.json"))
    data = SyntheticTokens(model.config.vocab_size)
    sampler = DistributedSampler(data, shuffle=False)
    batches = iter(DataLoader(data, batch_size=strategy["micro_batch"], sampler=sampler))
    for number in range(options.steps):
        losses = []
        for _ in range(strategy["accumulation"]):
            batch = {name: tensor.to(engine.device) for name, tensor in next(batches).items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().float())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {number}  loss {mean.item() / dist.get_world_size():.6f}", flush=True)
    dist.destroy_process_group()


main()
""",
)


def deepspeed_config(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's document: the batch in all three of its keys, ZeRO with what is offloaded, and number formats."""
    strategy = plan.strategy
    batch = {
        "train_batch_size": strategy.micro_batch * strategy.accumulation * plan.mesh.data_parallel,
        "train_micro_batch_size_per_gpu": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.accumulation,
    }
    zero = {"stage": strategy.zero} | _offload(plan)
    return batch | {"gradient_clipping": CLIP_NORM, "zero_optimization": zero} | _formats(strategy.formats)


def _offload(plan: Plan) -> dict[str, Any]:
    """What lies in host memory. DeepSpeed keeps the optimizer there too when it keeps parameters there."""
    on_host = {"device": "cpu", "pin_memory": plan.strategy.backend == "nccl"}
    kept = {"none": (), "optimizer": ("offload_optimizer",), "parameters": ("offload_optimizer", "offload_param")}
    return dict.fromkeys(kept[plan.strategy.offload], on_host)


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
    return job_files(plan, options, TRAIN) | {CONFIG: json_text(deepspeed_config(plan))}


def named(plan: Plan) -> dict[str, str]:
    """The key by which front ends of DeepSpeed find its file, where ZeRO needs it."""
    return {"deepspeed": str(CONFIG)} if plan.strategy.zero else {}


def file_for_zero(plan: Plan) -> dict[PurePosixPath, str]:
    """DeepSpeed's file, where ZeRO needs it."""
    return {CONFIG: json_text(deepspeed_config(plan))} if plan.strategy.zero else {}


DEEPSPEED = Emitter(
    name="deepspeed",
    title="DeepSpeed engine, ZeRO 0 to 3, a Hugging Face model",
    engine="deepspeed",
    versions="DeepSpeed 0.19.8, transformers 5.23, torch 2.13",
    write=write,
    axes=COVERAGE.axes,
    coverage=COVERAGE,
    executables=("launch.sh",),
)
