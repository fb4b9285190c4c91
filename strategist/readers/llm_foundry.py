"""llm-foundry's YAML. Keys as in llm-foundry 0.22.0, TrainConfig, whose loader refuses others, and Composer 0.32.1, FSDPConfig."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from strategist.document.judgement import Finding
from strategist.readers.foreign import (
    Foreign,
    Reader,
    Says,
    Source,
    Tables,
    batch_faults,
    finding,
    section_of,
    switched,
    told,
    whole,
)

TABLES = Tables(
    framework="llm-foundry",
    title="llm-foundry 0.22",
    swallows={"": "its loader refuses the file", "fsdp_config": "Composer takes it and never looks at it"},
)
NEEDED = ("model", "tokenizer", "optimizer", "scheduler", "train_loader", "max_duration", "max_seq_len")
OWN = ("device_train_microbatch_size", "global_train_batch_size", "train_loader", "device_eval_batch_size")
"""Keys that together only llm-foundry has."""

COMPUTE = {"fp32": "float32", "amp_bf16": "bfloat16", "amp_fp16": "float16"}
KINDS = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "_HYBRID_SHARD_ZERO2": 2, "FULL_SHARD": 3, "HYBRID_SHARD": 3}
"""Stages of ZeRO by the name of FSDP's strategy."""


def read(source: Source, ranks: int | None) -> Foreign:
    """What a file says, and its faults."""
    table = source.table
    says = _says(table, ranks)
    found = (*TABLES.unknown(table), *_missing(table), *batch_faults({"accumulation": 1, **says}, ranks))
    return Foreign(says=says, findings=found)


def _says(table: Mapping[str, Any], ranks: int | None) -> Says:
    section = section_of(table, "fsdp_config")
    micro, batch = whole(table.get("device_train_microbatch_size")), whole(table.get("global_train_batch_size"))
    each = micro * ranks if micro and ranks else None
    recompute = "full" if switched(section, "activation_checkpointing") else "none"
    return told(
        micro_batch=micro,
        global_batch=batch,
        accumulation=max(1, batch // each) if each and batch else None,
        seq_len=whole(table.get("max_seq_len")),
        recompute=recompute,
        optimizer="adamw" if "adamw" in str(section_of(table, "optimizer").get("name")) else None,
        **_layout(section, ranks),
        **_numbers(str(table.get("precision", "amp_bf16")), section),
    )


def _layout(section: Mapping[str, Any], ranks: int | None) -> dict[str, int | None]:
    """Degrees and the stage of ZeRO; without a section of FSDP there are replicas alone."""
    if not section:
        return {"zero": 0, "dp_replicate": ranks}
    zero = KINDS.get(str(section.get("sharding_strategy", "FULL_SHARD")).upper())
    shard, replicas = (whole(section.get(f"data_parallel_{name}_degree")) for name in ("shard", "replicate"))
    if ranks and not shard:
        shard = ranks // (replicas or 1)
    if ranks and shard and not replicas:
        replicas = max(1, ranks // shard)
    return {"zero": zero, "dp_shard": shard, "dp_replicate": replicas}


def _numbers(precision: str, section: Mapping[str, Any]) -> dict[str, str | None]:
    """Formats: weights and gradients are kept in fp32, and PURE reduces in the format of compute."""
    compute = COMPUTE.get(precision)
    pure = bool(section) and str(section.get("mixed_precision", "DEFAULT")).upper() == "PURE"
    return {
        "compute": compute,
        "parameter": "float32",
        "gradient": "float32",
        "reduce": compute if pure else "float32",
    }


def _missing(table: Mapping[str, Any]) -> Iterator[Finding]:
    for key in NEEDED:
        if key not in table:
            yield finding("missing-key", key, title="llm-foundry", key=key, why="it has no default")


def recognises(source: Source) -> bool:
    """A table with three keys of llm-foundry's own."""
    return len(set(OWN) & set(source.table)) >= 3


LLM_FOUNDRY = Reader(name="llm-foundry", title="llm-foundry 0.22", recognises=recognises, read=read, profile="fsdp1")
