"""Transformers' TrainingArguments as JSON or YAML, the files of TRL and LLaMA-Factory, whose keys contain them, and DistributedConfig.

As in Transformers 5.23.0, training_args.py and distributed/configuration_utils.py, TRL 1.16.0, trainer/sft_config.py, and LLaMA-Factory 0.9.5, hparams.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

from strategist.document.judgement import Finding, Said
from strategist.readers.beside import engine_says
from strategist.readers.foreign import (
    IN_BF16,
    OPTIMIZERS,
    Foreign,
    Reader,
    Source,
    Tables,
    finding,
    keys_of,
    section_of,
    switched,
    told,
    uncounted_optimizer,
    whole,
)
from strategist.readers.models import named_at
from strategist.reading import parse_json, read_text

TABLES = Tables(
    framework="transformers",
    title="Transformers 5.23",
    swallows={"": "its parser refuses the file"},
)
CUT = Tables(
    framework="transformers-distributed",
    title="Transformers 5.23",
    swallows={"": "DistributedConfig.from_dict drops it without a word"},
)
SFT = Tables(
    framework="trl",
    title="TRL 1.16",
    swallows={"": "its parser refuses the file"},
)
FACTORY = Tables(
    framework="llama-factory",
    title="LLaMA-Factory 0.9.5",
    swallows={"": "its parser refuses the file"},
)
OWN = ("stage", "finetuning_type", "dataset", "template", "cutoff_len", "dataset_dir")
"""Keys of LLaMA-Factory that TrainingArguments do not have."""


def read(source: Source, ranks: int | None) -> Foreign:
    """What a file says, and its faults."""
    return _arguments(source, TABLES, ranks)


def read_sft(source: Source, ranks: int | None) -> Foreign:
    """What a file of TRL's SFTConfig says, and its faults."""
    found = _arguments(source, SFT, ranks)
    return Foreign(says={**found.says, **told(seq_len=whole(source.table.get("max_length")))}, findings=found.findings)


def _arguments(source: Source, known: Tables, ranks: int | None) -> Foreign:
    table = source.table
    found = (*known.unknown(table), *fsdp_keys(table), *choices(table))
    return Foreign(says=trainer_says(source, ranks, _cut_beside(source)), findings=found)


DISTRIBUTED = "distributed.json"
"""The name under which `emit` writes a DistributedConfig."""
AXES = {"dp_replicate_size": "dp_replicate", "fsdp_size": "dp_shard", "tp_size": "tp", "pp_size": "pp", "ep_size": "ep"}


def _cut_beside(source: Source) -> dict[str, Said]:
    """What a DistributedConfig beside the arguments says: arguments alone do not show that a model was cut before Trainer got it."""
    path = os.path.join(os.path.dirname(source.path), DISTRIBUTED)
    return _cut_says(parse_json(read_text(path, "FILE"), path)) if os.path.isfile(path) else {}


def _cut_says(table: Any) -> dict[str, Said]:
    """Degrees of a DistributedConfig. Which gathered weights stay, ZeRO-2's or ZeRO-3's, its plan by module names says."""
    if not isinstance(table, dict):
        return {}
    says: dict[str, Said] = {axis: whole(table.get(key)) or 1 for key, axis in AXES.items()}
    offload = "parameters" if switched(table, "fsdp_cpu_offload") else "none"
    return says | {"offload": offload} | ({"zero": 0} if says["dp_shard"] == 1 else {})


def read_distributed(source: Source, ranks: int | None) -> Foreign:
    """What a file of DistributedConfig says, and its faults."""
    product = prod(whole(source.table.get(key)) or 1 for key in AXES if key != "ep_size")
    wrong = ranks and product != ranks
    found = (finding("ranks-product", "tp_size", product=product, ranks=ranks),) if wrong else ()
    return Foreign(says=_cut_says(source.table), findings=(*CUT.unknown(source.table), *found))


def read_factory(source: Source, ranks: int | None) -> Foreign:
    """What a file of LLaMA-Factory says, and its faults."""
    table = source.table
    megatron = {name.removeprefix("--").replace("-", "_") for name in _megatron_names()}
    found = (
        *FACTORY.unknown({key: table[key] for key in table if key not in megatron}),
        *fsdp_keys(table),
        *choices(table),
        *_factory_needs(table),
    )
    recompute = "none" if switched(table, "disable_gradient_checkpointing") else "full"  # on unless it is switched off
    own = told(seq_len=whole(table.get("cutoff_len")), recompute=recompute)
    return Foreign(says=trainer_says(source, ranks) | own | _pure(table) | _adapters(table), findings=found)


def _pure(table: Mapping[str, Any]) -> dict[str, Said]:
    """Formats of LLaMA-Factory's pure_bf16, which loads weights in bf16 and leaves autocast out; DeepSpeed keeps its copies in fp32."""
    if not switched(table, "pure_bf16"):
        return {}
    computes: dict[str, Said] = {"compute": "bfloat16"}
    return computes if "deepspeed" in table else computes | IN_BF16


FACTORY_RANK = 8
"""LLaMA-Factory's own (src/llamafactory/hparams/finetuning_args.py, lora_rank); it trains adapters unless it is told otherwise."""


def _adapters(table: Mapping[str, Any]) -> dict[str, Said]:
    """What is trained; of adapters, which, beside matrices of the layers that a plan can name."""
    if str(table.get("finetuning_type", "lora")) != "lora":
        return told(method="full" if table.get("finetuning_type") == "full" else None)
    targets = str(table.get("lora_target", "all")).replace(" ", "").replace("_proj", "")
    return told(
        method="qlora" if whole(table.get("quantization_bit")) == 4 else "lora",
        lora_rank=whole(table.get("lora_rank")) or FACTORY_RANK,
        lora_targets=None if targets == "all" else targets,
    )


def _megatron_names() -> tuple[str, ...]:
    """Megatron-LM's arguments, which LLaMA-Factory takes too when it trains through Megatron."""
    return (*keys_of("megatron", "switches"), *keys_of("megatron", "values"))


def _sharded(table: Mapping[str, Any]) -> bool:
    return str(table.get("fsdp", "")).lower() not in ("", "false", "none")


def trainer_says(source: Source, ranks: int | None, cut: Mapping[str, Said] = MappingProxyType({})) -> dict[str, Said]:
    """What arguments of Trainer say at a number of ranks; `cut` are degrees that somebody else cut the model by."""
    table = source.table
    section = {key.removeprefix("fsdp_"): value for key, value in section_of(table, "fsdp_config").items()}
    sharded = _sharded(table)
    recompute = switched(section, "activation_checkpointing") or switched(table, "gradient_checkpointing")
    words = str(table.get("fsdp", "")).lower().split()  # of older files, which say in them what the section says now
    usual = "shard_grad_op" not in words
    reshard = str(section.get("reshard_after_forward", usual)).lower() in ("true", "full_shard")
    low = "bfloat16" if switched(table, "bf16") else "float16" if switched(table, "fp16") else "float32"
    says = told(
        micro_batch=whole(table.get("per_device_train_batch_size")),
        accumulation=whole(table.get("gradient_accumulation_steps")) or 1,
        optimizer=OPTIMIZERS.get(str(table.get("optim", "adamw_torch_fused"))),
        backend="gloo" if switched(table, "use_cpu") else "nccl",
        recompute="full" if recompute else "none",
        compute=low,
    )
    says["compile"] = switched(table, "torch_compile")
    if "deepspeed" in table:
        return engine_says(source, table["deepspeed"]) | says
    if cut:
        return says | dict(cut)
    layout = told(zero=(3 if reshard else 2) if sharded else 0, offload=_offload(section, sharded, "offload" in words))
    return says | layout | told(**{"dp_shard" if sharded else "dp_replicate": ranks})


def _offload(section: Mapping[str, Any], sharded: bool, said: bool) -> str:
    return "parameters" if sharded and (said or switched(section, "cpu_offload")) else "none"


def fsdp_keys(table: Mapping[str, Any]) -> Iterator[Finding]:
    """Keys of fsdp_config, where no parser looks: unknown ones vanish, and a prefix is stripped."""
    known = Tables(
        framework="transformers",
        title="Transformers 5.23",
        swallows={"fsdp_config": "it drops this one without a word"},
    )
    section = section_of(table, "fsdp_config")
    bare = {key.removeprefix("fsdp_"): value for key, value in section.items()}
    yield from known.unknown({"fsdp_config": bare})
    for key in section:
        if key.startswith("fsdp_") and key.removeprefix("fsdp_") in keys_of("transformers", "fsdp_config"):
            yield finding("fsdp-prefix", f"fsdp_config.{key}", key=key, near=key.removeprefix("fsdp_"))


def choices(table: Mapping[str, Any]) -> Iterator[Finding]:
    """Choices of Trainer's that do not go together, or are no more."""
    section = section_of(table, "fsdp_config")
    if _sharded(table) and str(section.get("version", section.get("fsdp_version", 2))) == "1":
        yield finding("fsdp1-deprecated", "fsdp_config.version")
    if _sharded(table) and switched(table, "gradient_checkpointing"):
        yield finding("checkpointing-under-fsdp", "gradient_checkpointing")
    if switched(table, "bf16") and switched(table, "fp16"):
        yield finding("two-low-formats", "bf16")
    yield from uncounted_optimizer("optim", table.get("optim"))


def _factory_needs(table: Mapping[str, Any]) -> Iterator[Finding]:
    """A model is often named behind the file, on the command line."""
    if "output_dir" not in table:
        why = "it names the folder of checkpoints"
        yield finding("missing-key", "output_dir", title="LLaMA-Factory", key="output_dir", why=why)


def recognises(source: Source) -> bool:
    """A table with a key that only TrainingArguments have."""
    return "per_device_train_batch_size" in source.table and not recognises_factory(source)


def recognises_distributed(source: Source) -> bool:
    """A table with degrees under the names that only DistributedConfig has."""
    return bool({"fsdp_size", "fsdp_plan", "fsdp_mixed_precision"} & set(source.table)) and not recognises(source)


def recognises_sft(source: Source) -> bool:
    """The same with a key that only SFTConfig has."""
    own = set(keys_of("trl")) - set(keys_of("transformers"))
    return recognises(source) and bool(own & set(source.table))


def recognises_factory(source: Source) -> bool:
    """A table with two keys of LLaMA-Factory's own."""
    return len(set(OWN) & set(source.table)) >= 2


TRANSFORMERS = Reader(
    name="transformers", title="Transformers 5.23", recognises=recognises, read=read, profile="hf-trainer"
)
DISTRIBUTED_READER = Reader(
    name="transformers-distributed",
    title="Transformers 5.23's DistributedConfig",
    recognises=recognises_distributed,
    read=read_distributed,
    profile="hf-trainer",
)
SFT_READER = Reader(name="trl", title="TRL 1.16", recognises=recognises_sft, read=read_sft, profile="hf-trainer")
FACTORY_READER = Reader(
    name="llama-factory",
    title="LLaMA-Factory 0.9.5",
    recognises=recognises_factory,
    read=read_factory,
    profile="hf-trainer",
    model=named_at("model_name_or_path"),
)
