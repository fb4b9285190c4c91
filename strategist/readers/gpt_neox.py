"""GPT-NeoX's YAML. Keys as in EleutherAI/gpt-neox ea7aefd (2026-05-19), megatron/neox_arguments; dashes and underscores are one to it, and
it refuses unknown keys. DeepSpeed gets those of its own, and keeps states as they say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from strategist.document.judgement import Finding
from strategist.facts.model import ModelShape
from strategist.readers.deepspeed import said_by
from strategist.readers.foreign import (
    OPTIMIZERS,
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
    uncounted_optimizer,
    whole,
)

TABLES = Tables(framework="gpt-neox", title="GPT-NeoX", swallows={"": "its loader refuses the file"})
DEGREES = ("pipe_parallel_size", "model_parallel_size")
SHAPE = ("num_layers", "hidden_size")
LOW = {"fp16": "fp16", "bfloat16": "bf16"}
"""DeepSpeed's sections for its words of a precision."""
WORDS = {"True": True, "False": False}
"""What PyYAML, by which it reads, takes for more than words."""

Table = Mapping[str, Any]


def read(source: Source, ranks: int | None) -> Foreign:
    """What a file says, and its faults."""
    table = arguments(source)
    pp, tp = _degrees(table)
    dp = ranks // (pp * tp) if ranks else None
    says = _says(table, dp, pp, tp)
    found = (
        *TABLES.unknown(table),
        *_world(ranks, pp * tp),
        *batch_faults(says, dp),
        *_pairs(table, tp),
        *uncounted_optimizer("optimizer.type", _optimizer(table)),
    )
    return Foreign(says=says, findings=found)


def arguments(source: Source) -> dict[str, Any]:
    """The arguments under their names with underscores."""
    return {
        key.replace("-", "_"): WORDS.get(value, value) if isinstance(value, str) else value
        for key, value in source.table.items()
    }


def _degrees(table: Table) -> tuple[int, int]:
    """Stages and ranks of a layer; 0 stages stand for a model that is not made of stages."""
    pp, tp = (whole(table.get(name)) or 1 for name in DEGREES)
    return pp, tp


def _says(table: Table, dp: int | None, pp: int, tp: int) -> Says:
    """DeepSpeed's words, with the micro-batch that the batch leaves where none is said (calculate_batch_parameters), and the degrees."""
    batch, steps = whole(table.get("train_batch_size")), whole(table.get("gradient_accumulation_steps")) or 1
    left = batch // (dp * steps) if batch and dp else None
    low = LOW.get(str(table.get("precision")))
    engine = {
        **table,
        **({low: {**section_of(table, low), "enabled": True}} if low else {}),
        **told(train_micro_batch_size_per_gpu=whole(table.get("train_micro_batch_size_per_gpu")) or left),
        "gradient_accumulation_steps": steps,
    }
    recompute = "full" if switched(table, "checkpoint_activations") else "none"
    return {
        **said_by(engine, dp),
        **told(
            pp=pp,
            tp=tp,
            sequence_parallel=tp > 1 and switched(table, "sequence_parallel"),
            schedule="none" if pp == 1 else "1f1b",
            recompute=recompute,
            seq_len=whole(table.get("seq_length")),
            optimizer=OPTIMIZERS.get(_optimizer(table)),
            attention="flash" if "flash" in str(table.get("attention_config")) else None,
        ),
    }


def _optimizer(table: Table) -> str:
    """Adam, of eight bits where it is bitsandbytes' (megatron/training.py, get_optimizer)."""
    word = str(section_of(table, "optimizer").get("type", "Adam")).lower()
    return "adamw_8bit" if word == "adam" and switched(table, "use_bnb_optimizer") else word


def _world(ranks: int | None, product: int) -> Iterator[Finding]:
    if ranks and ranks % product:
        yield finding("ranks-divide", "model_parallel_size", ranks=ranks, product=product)


def _pairs(table: Table, tp: int) -> Iterator[Finding]:
    heads = whole(table.get("num_attention_heads"))
    if heads and heads % tp:
        yield finding("heads-divide", "num_attention_heads", tp=tp, heads=heads)


def recognises(source: Source) -> bool:
    """A table with a model's depth and width and one of its degrees, which DeepSpeed's own files do not have."""
    keys = {str(key).replace("-", "_") for key in source.table}
    return set(SHAPE) <= keys and bool(set(DEGREES) & keys)


def _model(source: Source, flag: str) -> ModelShape | None:
    # loaded only when such a file is read
    from strategist.facts.gpt_neox_arguments import shape_from_neox

    return shape_from_neox(arguments(source), flag)


GPT_NEOX = Reader(
    name="gpt-neox",
    title="GPT-NeoX",
    recognises=recognises,
    read=read,
    profile="megatron-deepspeed",
    keeping="gpt-neox",
    model=_model,
)
