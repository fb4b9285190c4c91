"""llm-foundry's YAML. Keys as in llm-foundry 0.22.0, TrainConfig, whose loader refuses others, and Composer 0.32.1, FSDPConfig."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from strategist.document.judgement import Finding
from strategist.facts.model import ModelShape
from strategist.readers.composer import formats, fsdp_faults, layout, precision_faults
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
from strategist.readers.models import named_at
from strategist.readers.references import resolved

TABLES = Tables(
    framework="llm-foundry",
    title="llm-foundry 0.22",
    swallows={"": "its loader refuses the file", "fsdp_config": "Composer takes it and never looks at it"},
)
NEEDED = ("model", "tokenizer", "optimizer", "scheduler", "train_loader", "max_duration", "max_seq_len")
OWN = ("device_train_microbatch_size", "global_train_batch_size", "train_loader", "device_eval_batch_size")
"""Keys that together only llm-foundry has."""
NAMED = named_at("pretrained_model_name_or_path", "model")


def read(source: Source, ranks: int | None) -> Foreign:
    """What a file says, and its faults."""
    table = resolved(source.table)
    says = _says(table, ranks)
    found = (
        *TABLES.unknown(table),
        *_missing(table),
        *precision_faults(table),
        *fsdp_faults(section_of(table, "fsdp_config"), "fsdp_config"),
        *batch_faults({"accumulation": 1, **says}, ranks),
        *uncounted_optimizer("optimizer.name", section_of(table, "optimizer").get("name")),
    )
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
        optimizer=OPTIMIZERS.get(str(section_of(table, "optimizer").get("name"))),
        **layout(section, ranks),
        **formats(str(table.get("precision", "amp_bf16")), section),
    )


def _missing(table: Mapping[str, Any]) -> Iterator[Finding]:
    for key in NEEDED:
        if key not in table:
            yield finding("missing-key", key, title="llm-foundry", key=key, why="it has no default")


def _model(source: Source, flag: str) -> ModelShape | None:
    """The model that is named, or that llm-foundry builds itself."""
    # families are loaded only when one is read
    from strategist.facts.llm_foundry_model import NAME, shape_from_mpt

    table = resolved(source.table)
    model = section_of(table, "model")
    if model.get("name") == NAME:
        return shape_from_mpt(model, flag, "model")
    return NAMED(Source(path=source.path, text=source.text, value=table), flag)


def recognises(source: Source) -> bool:
    """A table with three keys of llm-foundry's own."""
    return len(set(OWN) & set(source.table)) >= 3


LLM_FOUNDRY = Reader(
    name="llm-foundry",
    title="llm-foundry 0.22",
    recognises=recognises,
    read=read,
    profile="fsdp1",
    says_gradients=True,
    model=_model,
)
