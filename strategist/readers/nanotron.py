"""nanotron's YAML. Keys as in nanotron 2411b02 (2026-04-07), config; its loader refuses unknown ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from strategist.document.judgement import Finding
from strategist.errors import InputError
from strategist.facts.model import MAX_LAYERS, ModelShape
from strategist.facts.models import load_model
from strategist.readers.foreign import Foreign, Reader, Source, Tables, finding, section_of, switched, told, whole

SECTIONS = (
    "", "general", "parallelism", "model", "tokens", "optimizer", "optimizer.learning_rate_scheduler", "tokenizer",
    "checkpoints", "logging", "profiler",
)  # fmt: skip
TABLES = Tables(framework="nanotron", title="nanotron", swallows=dict.fromkeys(SECTIONS, "its loader refuses the file"))
NEEDED = {"parallelism": ("dp", "pp", "tp"), "tokens": ("micro_batch_size", "batch_accumulation_per_replica")}
SCHEDULES = {"1f1b": "1f1b", "afab": "gpipe"}
SHAPE = "model.model_config"
OTHERS = ("is_llamoe_config", "is_starcoder2_config", "moe_num_experts", "num_experts_per_tok")
"""Keys of models that are none of Llama's kind: experts without gates (examples/moe/moe.py), and StarCoder 2."""
EXPERTS = {"num_experts": 8, "top_k": 2, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
"""What MoEConfig takes for keys that are absent (config/models_config.py)."""


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


def _model(source: Source, flag: str) -> ModelShape | None:
    """The model of the file. LlamaConfig's keys are transformers', and Qwen2Config, where biases beside queries, keys and values are a
    choice, is a model of Llama's kind without them (config/models_config.py, models/qwen.py).

    Raises InputError CHOICE for a model that no family here is, and what `load_model` raises.
    """
    table = section_of(section_of(source.table, "model"), "model_config")
    if not table:
        return None
    other = next((key for key in OTHERS if key in table), None)
    if other is not None:
        raise _unread(flag, other)
    plain = {key: value for key, value in table.items() if key != "attention_bias"}
    is_biased = "is_qwen2_config" in table and switched(table, "attention_bias")
    moe = section_of(table, "moe_config")
    if moe:
        return load_model(_mixture(plain, {**EXPERTS, **moe}, flag, is_biased=is_biased), f"{flag}: {SHAPE}")
    return load_model({**plain, "model_type": "qwen2" if is_biased else "llama"}, f"{flag}: {SHAPE}")


def _mixture(table: Mapping[str, Any], moe: Mapping[str, Any], flag: str, *, is_biased: bool) -> dict[str, Any]:
    """Experts in the words of families that have the same (nn/moe.py): Qwen 2's beside a shared one with a gate, else Mixtral's."""
    layers, placed = min(whole(table.get("num_hidden_layers")) or 0, MAX_LAYERS), moe.get("layers", [-1])
    if not isinstance(placed, list):
        raise _unread(flag, "moe_config.layers")
    everywhere = placed == [-1] or placed == list(range(layers))
    common = {**table, "num_experts": moe["num_experts"], "num_experts_per_tok": moe["top_k"]}
    if switched(moe, "enable_shared_expert"):
        widths = {key: moe[key] for key in ("moe_intermediate_size", "shared_expert_intermediate_size")}
        dense = [] if everywhere else [layer for layer in range(layers) if layer not in placed]
        return {**common, **widths, "model_type": "qwen2_moe", "qkv_bias": is_biased, "mlp_only_layers": dense}
    if is_biased or not everywhere:
        raise _unread(flag, "moe_config")
    return {**common, "model_type": "mixtral", "intermediate_size": moe["moe_intermediate_size"]}


def _unread(flag: str, key: str) -> InputError:
    return InputError(
        "CHOICE",
        f"{flag}: {SHAPE}.{key} makes layers that are not read from nanotron's files.",
        flag=f"{SHAPE}.{key}",
        value=key,
        hint="Name a model close to it with --model.",
    )


def recognises(source: Source) -> bool:
    """A table with nanotron's sections."""
    return {"parallelism", "tokens", "model"} <= set(source.table) and "dp" in section_of(source.table, "parallelism")


NANOTRON = Reader(
    name="nanotron",
    title="nanotron",
    recognises=recognises,
    read=read,
    profile="nanotron",
    says_gradients=True,
    model=_model,
)
