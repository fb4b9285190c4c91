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
from strategist.readers.beside import engine_faults, engine_says, over_engine
from strategist.readers.foreign import (
    FSDP_STAGES,
    IN_BF16,
    OPTIMIZERS,
    Foreign,
    Reader,
    Source,
    Tables,
    finding,
    fsdp_stage,
    hybrid_shards,
    keys_of,
    section_of,
    switched,
    told,
    uncounted_optimizer,
    update_of,
    whole,
)
from strategist.readers.models import named_at
from strategist.reading import parse_json, read_text
from strategist.records import replace

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
OPTION = "per_device_train_batch_size"
USUAL_BATCH = 8
"""Trainer's own (Transformers 5.23.0, training_args.py, per_device_train_batch_size)."""
LENGTHS = ("max_length", "max_seq_length", "block_size", "model_max_length", "cutoff_len")
"""What programs call the length of their sequences: TRL, transformers' examples, FastChat, LLaMA-Factory."""
SFT_KEYS = (
    "packing", "packing_strategy", "eval_packing", "padding_free", "dataset_text_field", "dataset_kwargs", "assistant_only_loss",
    "completion_only_loss", "chat_template_path",
)  # fmt: skip
"""Keys of SFTConfig that no other program around Trainer has."""
OF_LENGTH = ("sft", "dpo", "kto", "reward")
TRL_LENGTH = 1024
"""TRL's trainers that cut sequences at max_length, and where they do unasked (TRL 1.16.0, trainer/*_config.py)."""
OWN = ("stage", "finetuning_type", "dataset", "template", "cutoff_len", "dataset_dir")
"""Keys of LLaMA-Factory that TrainingArguments do not have."""


def read(source: Source, ranks: int | None) -> Foreign:
    """What a file says, and its faults."""
    return _arguments(source, TABLES, ranks)


def read_sft(source: Source, ranks: int | None) -> Foreign:
    """What a file of TRL's SFTConfig says, and its faults."""
    usual = replace(source, value=with_trl_defaults(source.table, "sft"))
    found = _arguments(usual, SFT, ranks)
    own = _arguments(source, SFT, ranks)
    return Foreign(says={**found.says, **told(seq_len=whole(usual.table.get("max_length")))}, findings=own.findings)


def with_trl_defaults(table: Mapping[str, Any], trainer: str) -> dict[str, Any]:
    """What one of TRL's trainers is given, with what TRL sets unasked and Trainer does not (TRL 1.16.0, trainer/base_config.py and sft_config.py;
    a parser of switches that are on knows them with no_ in front)."""
    usual: dict[str, Any] = {
        "gradient_checkpointing": not switched(table, "no_gradient_checkpointing"),
        "bf16": not switched(table, "fp16"),
    }
    if trainer in OF_LENGTH and not set(LENGTHS) & set(table):
        usual["max_length"] = TRL_LENGTH
    return usual | {name: word for name, word in table.items() if word is not None}


def _arguments(source: Source, known: Tables, ranks: int | None) -> Foreign:
    table = source.table
    found = (*known.unknown(table), *fsdp_keys(table), *choices(table), *engine_faults(source, table.get("deepspeed")))
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
        *engine_faults(source, table.get("deepspeed")),
        *_factory_needs(table),
        *_factory_uncounted(table),
    )
    recompute = "none" if switched(table, "disable_gradient_checkpointing") else "full"  # on unless it is switched off
    own = told(seq_len=whole(table.get("cutoff_len", FACTORY_LENGTH)), recompute=recompute)
    return Foreign(says=trainer_says(source, ranks) | own | _pure(table) | _adapters(table), findings=found)


def _pure(table: Mapping[str, Any]) -> dict[str, Said]:
    """Formats of LLaMA-Factory's pure_bf16, which loads weights in bf16 and leaves autocast out; DeepSpeed keeps its copies in fp32."""
    if not switched(table, "pure_bf16"):
        return {}
    computes: dict[str, Said] = {"compute": "bfloat16"}
    return computes if "deepspeed" in table else computes | IN_BF16


FACTORY_LENGTH = 2048
"""LLaMA-Factory's own (src/llamafactory/hparams/data_args.py, cutoff_len)."""
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


def _fsdp_words(table: Mapping[str, Any]) -> list[str]:
    """Words of `fsdp`, a switch today and a text or a list in older files, which say in them what fsdp_config says now."""
    said = table.get("fsdp", "")
    return [str(word).lower() for word in (said if isinstance(said, list) else str(said).split())]


def _sharded(table: Mapping[str, Any]) -> bool:
    return bool(set(_fsdp_words(table)) - {"false", "none"})


def trainer_says(source: Source, ranks: int | None, cut: Mapping[str, Said] = MappingProxyType({})) -> dict[str, Said]:
    """What arguments of Trainer say at a number of ranks; `cut` are degrees that somebody else cut the model by."""
    table = source.table
    section = {key.removeprefix("fsdp_"): value for key, value in section_of(table, "fsdp_config").items()}
    sharded, words = _sharded(table), _fsdp_words(table)
    checkpoints = "activation_checkpointing" if "activation_checkpointing" in table else "gradient_checkpointing"
    recompute = switched(section, "activation_checkpointing") or switched(table, checkpoints)
    low = "bfloat16" if switched(table, "bf16") else "float16" if switched(table, "fp16") else "float32"
    says = told(
        micro_batch=whole(table.get(OPTION, USUAL_BATCH)),
        accumulation=whole(table.get("gradient_accumulation_steps")) or 1,
        optimizer=OPTIMIZERS.get(str(table.get("optim", "adamw_torch_fused"))),
        update=update_of(str(table.get("optim", "adamw_torch_fused"))),
        backend="gloo" if switched(table, "use_cpu") else "nccl",
        recompute="full" if recompute else "none",
        compute=low,
    )
    says["compile"] = switched(table, "torch_compile")
    if "deepspeed" in table:
        return over_engine(engine_says(source, table["deepspeed"]), says)
    if cut:
        return says | dict(cut)
    stage = _stage(section, words) if sharded else 0
    layout = told(zero=stage, offload=_offload(section, sharded, "offload" in words))
    return says | layout | told(**{"dp_shard" if stage else "dp_replicate": ranks})


def _stage(section: Mapping[str, Any], words: list[str]) -> int:
    """The stage of ZeRO that fsdp_config says, or else a word of `fsdp`."""
    usual = next((word for word in words if word.upper() in FSDP_STAGES), "full_shard")
    found = fsdp_stage(section.get("reshard_after_forward", usual))
    return 2 if found is None else found


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
    yield from hybrid_shards("fsdp", (*_fsdp_words(table), section.get("reshard_after_forward")))
    if switched(table, "load_in_8bit"):
        yield finding("weights-of-eight-bits", "load_in_8bit", bits=8)


def _factory_needs(table: Mapping[str, Any]) -> Iterator[Finding]:
    """A model is often named behind the file, on the command line."""
    if "output_dir" not in table:
        why = "it names the folder of checkpoints"
        yield finding("missing-key", "output_dir", title="LLaMA-Factory", key="output_dir", why=why)


FACTORY_OPTIMIZERS = ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon")
"""Switches of LLaMA-Factory that take another optimizer (src/llamafactory/hparams/finetuning_args.py)."""


def _factory_uncounted(table: Mapping[str, Any]) -> Iterator[Finding]:
    """What a run holds or trains that predictions do not count."""
    kind, stage, bits = (table.get(name) for name in ("finetuning_type", "stage", "quantization_bit"))
    if kind in ("freeze", "oft"):
        yield finding("uncounted-method", "finetuning_type", word=kind)
    if stage in ("rm", "ppo", "dpo", "kto"):
        yield finding("preferences", "stage", word=stage)
    if whole(bits) not in (None, 4):
        yield finding("weights-of-eight-bits", "quantization_bit", bits=whole(bits))
    for name in FACTORY_OPTIMIZERS:
        if switched(table, name):
            yield from uncounted_optimizer(name, name.removeprefix("use_"))


def recognises(source: Source) -> bool:
    """A table with a key that only TrainingArguments have."""
    return OPTION in source.table and not recognises_factory(source)


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
