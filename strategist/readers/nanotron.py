"""nanotron's YAML. Keys as in nanotron 2411b02 (2026-04-07), config; its loader refuses unknown ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from strategist.document.judgement import Finding
from strategist.readers.foreign import Foreign, Reader, Source, Tables, finding, section_of, switched, told, whole
from strategist.readers.models import llama_at

SECTIONS = (
    "", "general", "parallelism", "model", "tokens", "optimizer", "optimizer.learning_rate_scheduler", "tokenizer",
    "checkpoints", "logging", "profiler",
)  # fmt: skip
TABLES = Tables(framework="nanotron", title="nanotron", swallows=dict.fromkeys(SECTIONS, "its loader refuses the file"))
NEEDED = {"parallelism": ("dp", "pp", "tp"), "tokens": ("micro_batch_size", "batch_accumulation_per_replica")}
SCHEDULES = {"1f1b": "1f1b", "afab": "gpipe"}


def read(source: Source, ranks: int | None) -> Foreign:
    """What a file says, and its faults."""
    degrees = _degrees(source.table)
    found = (
        *TABLES.unknown(source.table),
        *_missing(source.table),
        *_world(degrees, ranks),
        *_heads(source.table, degrees),
    )
    return Foreign(says=_says(source.table, degrees), findings=found)


def _degrees(table: Mapping[str, Any]) -> dict[str, int]:
    section = section_of(table, "parallelism")
    names = {"dp": "dp", "pp": "pp", "tp": "tp", "cp": "context_parallel_size", "ep": "expert_parallel_size"}
    return {axis: whole(section.get(key)) or 1 for axis, key in names.items()}


def _says(table: Mapping[str, Any], degrees: Mapping[str, int]) -> dict[str, Any]:
    parallel, tokens, optimizer = (section_of(table, name) for name in ("parallelism", "tokens", "optimizer"))
    micro, steps = whole(tokens.get("micro_batch_size")), whole(tokens.get("batch_accumulation_per_replica"))
    zero = 1 if whole(optimizer.get("zero_stage")) else 0
    says: dict[str, Any] = told(
        micro_batch=micro,
        accumulation=steps,
        global_batch=micro * steps * degrees["dp"] if micro and steps else None,
        seq_len=whole(tokens.get("sequence_length")),
        recompute="full" if switched(parallel, "recompute_layer") else "none",
        schedule="none" if degrees["pp"] == 1 else SCHEDULES.get(str(parallel.get("pp_engine", "afab"))),
    )
    says |= {axis: degrees[axis] for axis in ("pp", "tp", "cp", "ep")}
    says |= {"zero": zero, "dp_shard" if zero else "dp_replicate": degrees["dp"]}
    says["sequence_parallel"] = str(parallel.get("tp_mode", "")).upper() == "REDUCE_SCATTER"
    return says | _numbers(
        str(section_of(table, "model").get("dtype")), fine=switched(optimizer, "accumulate_grad_in_fp32")
    )


def _numbers(dtype: str, *, fine: bool) -> dict[str, str]:
    """Formats: with gradients accumulated in fp32, low weights have masters there."""
    if dtype not in ("bfloat16", "float16", "float32"):
        return {}
    gradient = "float32" if fine else dtype
    master = "float32" if fine and dtype != "float32" else "none"
    return {"parameter": dtype, "gradient": gradient, "reduce": gradient, "compute": dtype, "master": master}


def _missing(table: Mapping[str, Any]) -> Iterator[Finding]:
    for section, keys in NEEDED.items():
        for key in keys:
            if key not in section_of(table, section):
                place = f"{section}.{key}"
                yield finding("missing-key", place, title="nanotron", key=place, why="it has no default")


def _world(degrees: Mapping[str, int], ranks: int | None) -> Iterator[Finding]:
    product = prod(degrees.values())
    if ranks and product != ranks:
        yield finding("ranks-product", "parallelism", product=product, ranks=ranks)


def _heads(table: Mapping[str, Any], degrees: Mapping[str, int]) -> Iterator[Finding]:
    shape = section_of(section_of(table, "model"), "model_config")
    heads, kv_heads = whole(shape.get("num_attention_heads")), whole(shape.get("num_key_value_heads"))
    if heads and heads % degrees["tp"]:
        yield finding("heads-divide", "parallelism.tp", tp=degrees["tp"], heads=heads)
    elif kv_heads and degrees["tp"] > kv_heads:
        yield finding("nanotron-heads", "parallelism.tp", tp=degrees["tp"], heads=kv_heads)


def recognises(source: Source) -> bool:
    """A table with nanotron's sections."""
    return {"parallelism", "tokens", "model"} <= set(source.table) and "dp" in section_of(source.table, "parallelism")


NANOTRON = Reader(
    name="nanotron",
    title="nanotron",
    recognises=recognises,
    read=read,
    profile="megatron-core",
    says_gradients=True,
    model=llama_at("model.model_config"),
)
