"""LLaMA-Factory: its YAML for training on text, all weights or adapters, a script that gives it to the framework, and torchrun as launcher.

Replicas are DDP; ZeRO is DeepSpeed's, whose own JSON lies beside the YAML. `llamafactory-cli train llama_factory.yaml` takes
the file too, with model_name_or_path=... and dataset=... behind it. Keys as in LLaMA-Factory 0.9.5, src/llamafactory/hparams.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from strategist.catalog import rows
from strategist.document.plan import NumberFormats, Plan
from strategist.emitters import deepspeed
from strategist.emitters.coverage import (
    AUTOCAST,
    DATA_PARALLEL,
    EVERY,
    FLOAT32,
    REDUCED_AS_KEPT,
    Clash,
    Coverage,
    causal_models,
)
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.fine_tuning_script import fine_tuning_script
from strategist.emitters.hugging_face_script import REPORT
from strategist.emitters.serial import yaml_text
from strategist.emitters.torchrun import job_files, layout_comment
from strategist.emitters.transformers import trainer_arguments

CONFIG = PurePosixPath("llama_factory.yaml")

SGD_IS_NOT_SHARDED = Clash(
    holds=lambda plan: plan.strategy.zero > 0 and plan.strategy.optimizer == "sgd",
    sentence="strategy.optimizer = sgd is none that DeepSpeed shards: strategy.zero above 0 needs adamw.",
)


def with_deepspeed(framework: str) -> tuple[Clash, ...]:
    """What a front end around Trainer cannot say together when ZeRO is DeepSpeed's."""
    return (
        deepspeed.SHARDS_OVER_ALL_RANKS,
        deepspeed.SHARDS_NEED_ZERO,
        Clash(
            holds=lambda plan: plan.strategy.zero == 0 and plan.strategy.formats in deepspeed.MASTERED,
            sentence="strategy.formats with fp32 masters are DeepSpeed's, which strategy.zero of 1 to 3 brings.",
        ),
        Clash(
            holds=lambda plan: plan.strategy.zero > 0 and plan.strategy.compile,
            sentence="strategy.compile is not mapped for DeepSpeed, which strategy.zero above 0 needs.",
        ),
        causal_models(framework),
    )


FROZEN = NumberFormats(parameter="bfloat16", gradient="float32", reduce="float32", compute="bfloat16")
"""Frozen weights as they compute, and adapters in fp32 (src/llamafactory/model/adapter.py, cast_trainable_params_to_fp32)."""
MODULES = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
"""Matrices with adapters as Llama and its relatives call them in transformers."""


def _has_other_names(plan: Plan) -> bool:
    """Whether nobody told that the model's matrices are called as Llama's are."""
    llamas = {row["family"] for row in rows("weight_names") if row["scheme"] == "llama"}
    return plan.model.method != "full" and plan.model.family not in llamas


def _mixes_formats(plan: Plan) -> bool:
    """Whether weights rest in the format of frozen ones and are trained, or are frozen and rest in another one."""
    formats = plan.strategy.formats
    return formats == FROZEN if plan.model.method == "full" else formats not in (FROZEN, FLOAT32)


ADAPTERS = (
    Clash(
        holds=lambda plan: plan.model.method != "full" and plan.strategy.zero > 0,
        sentence="model.method beside strategy.zero above 0 is DeepSpeed's, which keeps adapters in another format than the plan's.",
    ),
    Clash(
        holds=_mixes_formats,
        sentence="strategy.formats: weights of bfloat16 without masters go with model.method = lora or qlora, and these with such weights "
        "or fp32 ones.",
    ),
    Clash(
        holds=lambda plan: plan.model.method == "qlora" and plan.model.moe is not None,
        sentence="model.method = qlora beside experts: bitsandbytes packs linear layers, and Transformers 5 keeps the experts of a layer in one "
        "parameter, which would stay in 16 bits.",
    ),
    Clash(
        holds=_has_other_names,
        sentence="model.family: adapters stand beside matrices by their names, and those of this family are not known.",
    ),
)
"""What LLaMA-Factory cannot say together with adapters, or could with more than was tried."""

COVERAGE = Coverage(
    framework="LLaMA-Factory 0.9.5",
    values={
        **DATA_PARALLEL,
        "strategy.zero": EVERY,
        "strategy.formats": (*deepspeed.FORMATS, FROZEN),
        "model.method": EVERY,
        "strategy.compile": EVERY,
    },
    why={
        "mesh.tp": "It trains on Transformers' Trainer, which takes models that are cut already.",
        "mesh.pp": "It trains on Transformers' Trainer, which has no pipeline.",
        "mesh.cp": "It trains on Transformers' Trainer, whose context parallelism is no key of a file.",
        "mesh.ep": "It trains on Transformers' Trainer, which takes models that are cut already.",
        "strategy.recompute": "It recomputes whole layers.",
        "strategy.offload": "Its Trainer makes torch's optimizer, and DeepSpeed offloads its own only.",
        "strategy.formats": "It keeps fp32 weights, or with DeepSpeed low weights beside fp32 masters.",
        "workload.precision": "Its fp8 and fp4 need a recipe, which no plan holds.",
    },
    clashes=(
        *with_deepspeed("LLaMA-Factory"),
        *ADAPTERS,
        SGD_IS_NOT_SHARDED,
        Clash(
            holds=lambda plan: plan.strategy.zero > 0 and plan.strategy.backend == "gloo",
            sentence="strategy.backend = gloo is DDP only: its Trainer runs DeepSpeed on devices.",
        ),
        Clash(
            holds=lambda plan: plan.strategy.zero > 0 and plan.strategy.formats in AUTOCAST,
            sentence="strategy.formats of fp32 weights under autocast are DDP's: with strategy.zero above 0 its DeepSpeed keeps "
            "low weights beside fp32 masters.",
        ),
        REDUCED_AS_KEPT,
    ),
    hint="Emit it to accelerate, deepspeed or torchrun, or pin another layout.",
)

TRAIN = fine_tuning_script(
    "LLaMA-Factory",
    CONFIG,
    imports="import yaml\nfrom llamafactory.train.tuner import run_exp\nfrom transformers import TrainerCallback\n",
    data={"--dataset": "name in dataset_info.json", "--dataset-dir": "folder of dataset_info.json"},
    body="""words |= {"model_name_or_path": options.model, "dataset": options.dataset, "dataset_dir": options.dataset_dir}
"""
    + REPORT
    + """

document = yaml.safe_load((here / "llama_factory.yaml").read_text(encoding="utf-8"))
run_exp(document | words, callbacks=[Report()])
""",
)


def llama_factory_config(plan: Plan) -> dict[str, Any]:
    """Arguments of LLaMA-Factory: text in whole sequences, each parameter trained, or adapters.

    Stage pt packs by itself; with `packing: true` said aloud, LLaMA-Factory takes one token off the sequence length.
    """
    strategy = plan.strategy
    own = {
        "stage": "pt",
        "do_train": True,
        "finetuning_type": "full" if plan.model.adapters is None else "lora",
        "cutoff_len": plan.workload.seq_len,
        "disable_shuffling": True,
        "disable_gradient_checkpointing": strategy.recompute == "none",
        "use_reentrant_gc": False,
    }
    return own | _adapters(plan) | trainer_arguments(plan) | deepspeed.named(plan)


def _adapters(plan: Plan) -> dict[str, Any]:
    """Arguments about adapters, which have no dropout in a plan, and about frozen weights in four bits."""
    adapters = plan.model.adapters
    if adapters is None:
        return {}
    own: dict[str, Any] = {
        "lora_rank": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "lora_target": ",".join(MODULES[name] for name in adapters.targets),
    }
    if adapters.method == "qlora":
        own |= {"quantization_bit": 4, "quantization_type": "nf4", "double_quantization": True}
    return own


def write(plan: Plan, options: Options) -> Files:
    """plan.json, llama_factory.yaml, train.py, launch.sh, and deepspeed.json for ZeRO."""
    comment = layout_comment(plan).removeprefix("# ")
    files = job_files(plan, options, TRAIN) | {CONFIG: yaml_text(llama_factory_config(plan), (comment,))}
    return files | deepspeed.file_for_zero(plan, options)


LLAMA_FACTORY = Emitter(
    name="llama-factory",
    title="LLaMA-Factory with DDP or DeepSpeed, all weights or adapters, on text",
    engine="transformers",
    versions="LLaMA-Factory 0.9.5, transformers 5.6, DeepSpeed 0.18, torch 2.13",
    write=write,
    axes=COVERAGE.axes,
    coverage=COVERAGE,
    executables=("launch.sh",),
    by_deepspeed=deepspeed.has_zero,
)
