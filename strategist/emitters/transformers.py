"""Transformers: TrainingArguments as JSON, a script around Trainer, and torchrun as launcher.

Replicas are DDP; ZeRO 2 and 3 are FSDP2, in which ZeRO 2 keeps gathered weights after the forward pass. Trainer takes a model whose
tensors, or whose shards in replicated groups, Transformers itself cut: its DistributedConfig is a file of its own. Keys as in Transformers
5.23.0, training_args.py and distributed/configuration_utils.py.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from strategist.document.plan import Plan
from strategist.emitters.coverage import (
    CUT_TENSORS,
    DATA_PARALLEL,
    EVERY,
    LOW,
    NO_SHARDED_SCALER,
    PAIRS_NOT_IN_UNITS,
    REDUCED_AS_KEPT,
    SHARDS_GO_WITH_ZERO,
    WHOLE_TOKENS,
    Clash,
    Coverage,
    language_models,
)
from strategist.emitters.deepspeed import CLIP_NORM
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.hugging_face_script import CUT, CUT_IMPORTS, LEAVE, REPORT, script, script_of
from strategist.emitters.serial import json_text
from strategist.emitters.torchrun import job_files

CONFIG = PurePosixPath("training.json")
CUT_CONFIG = PurePosixPath("distributed.json")
"""Transformers' DistributedConfig."""
OPTIMIZERS = {"adamw": "adamw_torch", "adamw8bit": "adamw_bnb_8bit", "sgd": "sgd"}
"""Transformers' names of optimizers."""


def is_sharded(plan: Plan) -> bool:
    """Whether FSDP2 does the work."""
    return plan.mesh.dp_shard > 1 and not is_cut(plan)


def is_cut(plan: Plan) -> bool:
    """Whether Transformers itself cuts the model: tensors, or shards that are replicated, which Trainer's arguments do not say."""
    return plan.mesh.tp > 1 or (plan.mesh.dp_shard > 1 and plan.mesh.dp_replicate > 1)


CUT_CLASHES = (
    *CUT_TENSORS,
    Clash(
        holds=lambda plan: is_cut(plan) and plan.strategy.offload != "none",
        sentence="strategy.offload was not tried beside mesh.tp and replicas of shards, which Transformers cuts itself.",
    ),
    Clash(
        holds=lambda plan: is_cut(plan) and plan.strategy.compile,
        sentence="strategy.compile was not tried beside mesh.tp and replicas of shards, which Transformers cuts itself.",
    ),
    Clash(
        holds=lambda plan: is_cut(plan) and plan.strategy.formats.reduce in LOW,
        sentence="strategy.formats.reduce is float32 beside mesh.tp and replicas of shards: Transformers' DistributedConfig has "
        "no other.",
    ),
)
"""What Transformers cannot say together when it cuts a model itself."""

CLASHES = (
    Clash(
        holds=lambda plan: plan.strategy.offload != "none" and plan.strategy.zero != 3,
        sentence="strategy.offload = parameters needs strategy.zero = 3: it is an option of FSDP2.",
    ),
    Clash(
        holds=lambda plan: (is_sharded(plan) or is_cut(plan)) and plan.strategy.backend == "gloo",
        sentence="strategy.backend = gloo is DDP only: Transformers refuses FSDP and tensor parallelism on CPUs.",
    ),
    Clash(
        holds=lambda plan: (is_sharded(plan) or is_cut(plan)) and plan.strategy.optimizer == "adamw8bit",
        sentence="strategy.optimizer = adamw8bit keeps states in blocks, which FSDP2 and mesh.tp do not cut.",
    ),
    SHARDS_GO_WITH_ZERO,
    REDUCED_AS_KEPT,
    NO_SHARDED_SCALER,
    *CUT_CLASHES,
)
"""What Trainer, and what is made from it, cannot say together."""

COVERAGE = Coverage(
    framework="Transformers 5.23",
    values={
        **DATA_PARALLEL,
        "mesh.tp": EVERY,
        "strategy.zero": (0, 2, 3),
        "strategy.offload": ("none", "parameters"),
        "strategy.optimizer": tuple(OPTIMIZERS),
        "strategy.compile": EVERY,
        "workload.target_len": EVERY,
    },
    why={
        "mesh.pp": "Its Trainer has no pipeline.",
        "mesh.cp": "Its context parallelism is an object, not a key of a file.",
        "mesh.ep": "Its Trainer takes models that are cut already.",
        "strategy.sequence_parallel": WHOLE_TOKENS,
        "strategy.zero": "ZeRO-1 is DeepSpeed's.",
        "strategy.recompute": "It recomputes whole layers.",
        "strategy.offload": "Offloading the optimizer alone is DeepSpeed's.",
        "strategy.formats": "It keeps weights and gradients in fp32.",
        "workload.precision": "Its fp8 and fp4 need a recipe, which no plan holds.",
    },
    clashes=(
        *CLASHES,
        language_models("Transformers"),
        PAIRS_NOT_IN_UNITS,
    ),
    hint="Emit it to accelerate, deepspeed or torchrun, or pin another layout.",
)

_TRAIN = (
    CUT
    + REPORT
    + '''

class DecaysAll(TRAINER):
    """Weight decay on every parameter, as strategist's executor has it; Trainer spares norms and biases."""

    def get_decay_parameter_names(self, model):
        return [name for name, _ in model.named_parameters()]


def main():
    (arguments,) = HfArgumentParser(ARGUMENTS).parse_json_file(str(here / "CONFIG"))
    if arguments.world_size != mesh["dp_replicate"] * mesh["dp_shard"] * mesh["tp"]:
        raise SystemExit(f"{arguments.world_size} processes were started; the plan has another number.")
    arguments.max_steps, arguments.learning_rate = options.steps, options.learning_rate
    model = make_model()
    if mesh["tp"] > 1 or (mesh["dp_replicate"] > 1 and mesh["dp_shard"] > 1):
        model = cut(model, arguments.device)
    data = SyntheticTokens(model.config.vocab_size)
MORE    trainer = DecaysAll(model=model, args=arguments, train_dataset=data, callbacks=[Report()]WORDS)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and formats["compute"] != "float32":
        # No argument names the format of reduction: it would be that of compute.
        compute, reduce = (getattr(torch, formats[name]) for name in ("compute", "reduce"))
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=reduce, output_dtype=compute
        )
    trainer.train()
'''
    + LEAVE
)


def trainer_script(
    title: str,
    imports: str,
    *,
    arguments: str,
    trainer: str,
    config: PurePosixPath,
    more: str = "",
    words: str = "",
) -> str:
    """A script around Trainer or a class made from it; `more` are lines before it is made, `words` what it is told besides."""
    names = {"ARGUMENTS": arguments, "TRAINER": trainer, "CONFIG": str(config), "MORE": more, "WORDS": words}
    body = _TRAIN
    for stands, name in names.items():
        body = body.replace(stands, name)
    shared = "from torch.distributed.fsdp import MixedPrecisionPolicy\nfrom torch.utils.data import Dataset\n"
    return script(title, shared + imports + CUT_IMPORTS, body, recompute="")


TRAIN = trainer_script(
    "Transformers' Trainer",
    "from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments\n",
    arguments="TrainingArguments",
    trainer="Trainer",
    config=CONFIG,
)


def training_arguments(plan: Plan) -> dict[str, Any]:
    """Fields of TrainingArguments; steps and learning rate come from the command."""
    document = trainer_arguments(plan) | {"train_sampling_strategy": "sequential"}
    return document | (_fsdp(plan) if is_sharded(plan) else _checkpointing(plan))


def trainer_arguments(plan: Plan) -> dict[str, Any]:
    """Fields of TrainingArguments that say no more than batch, optimizer, formats and what is reported."""
    strategy = plan.strategy
    document: dict[str, Any] = {
        "output_dir": "checkpoints",
        "per_device_train_batch_size": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.accumulation,
        "optim": OPTIMIZERS[strategy.optimizer],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0 if strategy.optimizer == "sgd" else 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "max_grad_norm": CLIP_NORM,
        "bf16": strategy.formats.compute == "bfloat16",
        "fp16": strategy.formats.compute == "float16",
        "use_cpu": strategy.backend == "gloo",
        "torch_compile": strategy.compile,
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
    }
    if strategy.optimizer == "sgd":
        document["optim_args"] = "momentum=0.9"
    return document


def _fsdp(plan: Plan) -> dict[str, Any]:
    section = {
        "version": 2,
        "reshard_after_forward": plan.strategy.zero == 3,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_offload": plan.strategy.offload == "parameters",
        "activation_checkpointing": plan.strategy.recompute == "full",
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    return {"fsdp": True, "fsdp_config": section}


def _checkpointing(plan: Plan) -> dict[str, Any]:
    if plan.strategy.recompute == "none":
        return {}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


def distributed_config(plan: Plan) -> dict[str, Any]:
    """Fields of DistributedConfig. Its one policy of FSDP2 is bfloat16 with gradients reduced in fp32."""
    mesh, compute = plan.mesh, plan.strategy.formats.compute
    return {
        "dp_replicate_size": mesh.dp_replicate,
        "fsdp_size": mesh.dp_shard,
        "tp_size": mesh.tp,
        "fsdp_mixed_precision": mesh.data_parallel > 1 and compute == "bfloat16",
    }


def cut_file(plan: Plan) -> dict[PurePosixPath, str]:
    """The file of DistributedConfig, where Transformers itself cuts the model."""
    return {CUT_CONFIG: json_text(distributed_config(plan))} if is_cut(plan) else {}


def write(plan: Plan, options: Options) -> Files:
    """plan.json, training.json, train.py, launch.sh, and distributed.json where Transformers itself cuts the model."""
    return (
        job_files(plan, options, script_of(plan, TRAIN))
        | {CONFIG: json_text(training_arguments(plan))}
        | cut_file(plan)
    )


TRANSFORMERS = Emitter(
    name="transformers",
    title="Transformers' Trainer with DDP, FSDP2 or tensor parallelism",
    engine="transformers",
    versions="transformers 5.23, Accelerate 1.15, torch 2.13",
    write=write,
    axes=COVERAGE.axes,
    coverage=COVERAGE,
    executables=("launch.sh",),
)
