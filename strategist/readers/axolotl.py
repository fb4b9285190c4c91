"""axolotl's YAML. Keys as in axolotl 0.19.0, utils/schemas and integrations; its validator takes unknown ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from strategist.document.judgement import Finding
from strategist.errors import shown
from strategist.readers.beside import engine_faults, engine_says, over_engine
from strategist.readers.foreign import (
    IN_BF16,
    OPTIMIZERS,
    Foreign,
    Reader,
    Says,
    Source,
    Tables,
    finding,
    fsdp_stage,
    hybrid_shards,
    lora_targets,
    section_of,
    switched,
    told,
    uncounted_optimizer,
    update_of,
    whole,
)
from strategist.readers.models import named_at

TABLES = Tables(
    framework="axolotl",
    title="axolotl 0.19",
    swallows={"": "its validator takes it all the same", "fsdp_config": "its validator takes it all the same"},
)
OWN = ("base_model", "micro_batch_size", "sequence_len", "datasets", "sample_packing", "dataset_prepared_path")
"""Keys that together only axolotl has."""

USUAL_LENGTH = 512
"""axolotl's own (axolotl 0.19.0, utils/schemas/config.py, sequence_len)."""

AXES = {
    "dp_replicate": "dp_replicate_size",
    "dp_shard": "dp_shard_size",
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
}


def read(source: Source, ranks: int | None) -> Foreign:
    """What a file says, and its faults."""
    table = dict(source.table)
    if section_of(table, "fsdp_config"):  # older files have Accelerate's prefix, which axolotl takes off
        section = section_of(table, "fsdp_config")
        table["fsdp_config"] = {key.removeprefix("fsdp_") or key: value for key, value in section.items()}
    found = (*TABLES.unknown(table), *_engines(table), *_formats(table), *_uncounted(source, table))
    says = over_engine(_engine(source, table), _says(table))
    return Foreign(says={**says, **_adapters(table)}, findings=found)


def _says(table: Mapping[str, Any]) -> Says:
    section = section_of(table, "fsdp_config")
    degrees = {axis: whole(table.get(key)) for axis, key in AXES.items()}
    recompute = (
        "full" if switched(table, "gradient_checkpointing") or switched(section, "activation_checkpointing") else "none"
    )
    return told(
        micro_batch=whole(table.get("micro_batch_size")),
        accumulation=whole(table.get("gradient_accumulation_steps")) or 1,
        seq_len=whole(table.get("sequence_len", USUAL_LENGTH)),
        recompute=recompute,
        compute=_low(table),
        compile=_is_compiled(table),
        optimizer=OPTIMIZERS.get(str(table.get("optimizer", "adamw_torch_fused")).lower()),
        update=update_of(str(table.get("optimizer", "adamw_torch_fused")).lower()),
        zero=_stage(table) if _is_sharded(table) else None,
        offload="parameters" if switched(section, "offload_params") else None,
        **degrees,
    )


def _strategies(table: Mapping[str, Any]) -> tuple[Any, ...]:
    """What says whether gathered weights stay, what counts most first: today's switch, the words that go to Trainer, and the older key of
    fsdp_config (axolotl 0.19.0, docs/multi-gpu.qmd)."""
    section, words = section_of(table, "fsdp_config"), table.get("fsdp")
    listed = words if isinstance(words, list) else str(words or "").split()
    return (section.get("reshard_after_forward"), *listed, section.get("sharding_strategy"))


def _stage(table: Mapping[str, Any]) -> int:
    return next((stage for stage in map(fsdp_stage, _strategies(table)) if stage is not None), 3)


def _low(table: Mapping[str, Any]) -> str | None:
    """The format of matrix products; None where the file leaves it to the machine (axolotl 0.19.0, utils/schemas/config.py: bf16 is "auto" unless
    it is said)."""
    if any(str(table.get(key)).lower() in ("true", "auto", "full") for key in ("bf16", "bfloat16")):
        return "bfloat16"
    if switched(table, "fp16") or switched(table, "float16"):
        return "float16"
    return "float32" if table.get("bf16") is False else None


def _is_compiled(table: Mapping[str, Any]) -> bool:
    """Whether it compiles: "auto" does, with any torch of today (axolotl 0.19.0, utils/schemas/config.py, torch_compile)."""
    return str(table.get("torch_compile", False)).lower() in ("true", "auto")


def _is_sharded(table: Mapping[str, Any]) -> bool:
    return bool(section_of(table, "fsdp_config") or table.get("fsdp")) or "fsdp_version" in table


def _engine(source: Source, table: Mapping[str, Any]) -> Says:
    """How states are kept where FSDP keeps none: as the named DeepSpeed file says, or whole on every rank, as Accelerate starts ranks
    that nothing else is said about: there weights rest as they were loaded, in the format of matrix products (axolotl 0.19.0,
    utils/config, torch_dtype), and no engine keeps copies of them in fp32."""
    if table.get("deepspeed"):
        return engine_says(source, table["deepspeed"])
    if _is_sharded(table):
        return {}
    return {"zero": 0} | (IN_BF16 if _low(table) == "bfloat16" else {})


def _adapters(table: Mapping[str, Any]) -> Says:
    """What is trained; of adapters, which, where all stand beside matrices of the layers that a plan can name."""
    method = table.get("adapter") or "full"
    if method not in ("lora", "qlora"):
        return told(method="full" if method == "full" else None)
    targets = None if switched(table, "lora_target_linear") else lora_targets(table.get("lora_target_modules"))
    packs = True if switched(table, "quantize_moe_experts") else None
    return told(method=method, lora_rank=whole(table.get("lora_r")), lora_targets=targets, packs_experts=packs)


def _engines(table: Mapping[str, Any]) -> Iterator[Finding]:
    """DeepSpeed and FSDP in one file."""
    present = [key for key in ("fsdp_version", "fsdp_config", "fsdp") if table.get(key)]
    if table.get("deepspeed") and present:
        yield finding("two-engines", "deepspeed", key=present[0])


def _formats(table: Mapping[str, Any]) -> Iterator[Finding]:
    if switched(table, "bf16") and switched(table, "fp16"):
        yield finding("two-low-formats", "bf16")


def _uncounted(source: Source, table: Mapping[str, Any]) -> Iterator[Finding]:
    yield from uncounted_optimizer("optimizer", table.get("optimizer"))
    if table.get("activation_offloading"):
        yield finding("activations-on-host", "activation_offloading")
    if table.get("rl"):
        yield finding("preferences", "rl", word=shown(str(table["rl"])))
    if switched(table, "load_in_8bit"):
        yield finding("weights-of-eight-bits", "load_in_8bit", bits=8)
    yield from hybrid_shards("fsdp_config", _strategies(table))
    yield from engine_faults(source, table.get("deepspeed"))


def recognises(source: Source) -> bool:
    """A table with three keys of axolotl's own."""
    return len(set(OWN) & set(source.table)) >= 3


AXOLOTL = Reader(
    name="axolotl",
    title="axolotl 0.19",
    recognises=recognises,
    read=read,
    profile="hf-trainer",
    model=named_at("base_model"),
)
