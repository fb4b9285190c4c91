"""axolotl: its YAML for full training on text, a script that gives it to the framework, and torchrun as launcher.

Replicas are DDP; ZeRO is DeepSpeed's, whose own JSON lies beside the YAML. Its FSDP2 and its mesh are not mapped: there
axolotl keeps embeddings in another format than the other weights, which no plan can say. Keys as in axolotl 0.19.0,
src/axolotl/utils/schemas.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from strategist.document.plan import Plan
from strategist.emitters import deepspeed
from strategist.emitters.coverage import FLOAT32, Clash, Coverage
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.fine_tuning_script import fine_tuning_script
from strategist.emitters.llama_factory import COVERAGE as LLAMA_FACTORY_COVERAGE
from strategist.emitters.llama_factory import SGD_IS_NOT_SHARDED, with_deepspeed
from strategist.emitters.serial import yaml_text
from strategist.emitters.torchrun import job_files, layout_comment

CONFIG = PurePosixPath("axolotl.yaml")

COVERAGE = Coverage(
    framework="axolotl 0.19",
    values=dict(LLAMA_FACTORY_COVERAGE.values)
    | {
        "strategy.formats": (FLOAT32, *deepspeed.MASTERED),
        "model.method": ("full",),
        "strategy.backend": ("nccl",),
    },
    why={
        "mesh.tp": "Its tensor_parallel_size goes with its FSDP2, which is not mapped.",
        "mesh.pp": "It has no pipeline.",
        "mesh.cp": "Its context_parallel_size needs ring-flash-attn and its FSDP2, which is not mapped.",
        "mesh.ep": "Its experts need an integration of their own.",
        "strategy.backend": "It stops where no accelerator is.",
        "strategy.recompute": "It recomputes whole layers.",
        "strategy.offload": "Its Trainer makes torch's optimizer, and DeepSpeed offloads its own only.",
        "strategy.formats": "It keeps fp32 throughout, or with DeepSpeed low weights beside fp32 masters.",
        "workload.precision": "Its fp8 and fp4 need a recipe, which no plan holds.",
        "model.method": "Its keys for adapters are not mapped: it keeps norms and embeddings beside them in formats that no plan says.",
    },
    clashes=(
        *with_deepspeed("axolotl"),
        SGD_IS_NOT_SHARDED,
        Clash(
            holds=lambda plan: plan.strategy.formats.compute == "float16",
            sentence="strategy.formats of float16 and axolotl were not tried together.",
        ),
    ),
    hint=LLAMA_FACTORY_COVERAGE.hint,
)

TRAIN = fine_tuning_script(
    "axolotl",
    CONFIG,
    imports="from axolotl.cli.train import do_cli\n",
    data={"--dataset": "folder, file or hub name of a data set with texts"},
    body="""data = [{"path": options.dataset, "type": "completion"}]
do_cli(config=str(here / "axolotl.yaml"), base_model=options.model, datasets=data, **words)
""",
)


def axolotl_config(plan: Plan) -> dict[str, Any]:
    """Keys of axolotl: text cut into sequences, each parameter trained."""
    strategy = plan.strategy
    full = strategy.recompute == "full"
    recompute = {"gradient_checkpointing_kwargs": {"use_reentrant": False}} if full else {}
    document = {
        "sequence_len": plan.workload.seq_len,
        "sample_packing": False,
        "micro_batch_size": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.accumulation,
        "optimizer": {"adamw": "adamw_torch", "sgd": "sgd"}[strategy.optimizer],
        "lr_scheduler": "constant",
        "weight_decay": 0.0 if strategy.optimizer == "sgd" else 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "max_grad_norm": deepspeed.CLIP_NORM,
        "bf16": strategy.formats.compute == "bfloat16",
        "fp16": False,
        "tf32": False,
        "gradient_checkpointing": full,
        **recompute,
        "torch_compile": strategy.compile,
        "logging_steps": 1,
        "save_strategy": "no",
        "output_dir": "checkpoints",
    }
    if strategy.optimizer == "sgd":
        document["optim_args"] = {"momentum": 0.9}
    return document | deepspeed.named(plan)


def write(plan: Plan, options: Options) -> Files:
    """plan.json, axolotl.yaml, train.py, launch.sh, and deepspeed.json for ZeRO."""
    comment = layout_comment(plan).removeprefix("# ")
    files = job_files(plan, options, TRAIN) | {CONFIG: yaml_text(axolotl_config(plan), (comment,))}
    return files | deepspeed.file_for_zero(plan, options)


AXOLOTL = Emitter(
    name="axolotl",
    title="axolotl with DDP or DeepSpeed, full training on text",
    engine="transformers",
    versions="axolotl 0.19, transformers 5.16, torch 2.13",
    write=write,
    axes=COVERAGE.axes,
    coverage=COVERAGE,
    executables=("launch.sh",),
    by_deepspeed=deepspeed.has_zero,
)
