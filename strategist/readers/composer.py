"""Arguments of MosaicML's Composer. Keys as in Composer 0.32.1: Trainer, which refuses others, and its sections, which do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from strategist.document.judgement import Finding
from strategist.readers.foreign import (
    FSDP_STAGES,
    Foreign,
    Reader,
    Says,
    Source,
    Tables,
    finding,
    section_of,
    switched,
    told,
    unknown_word,
    whole,
)

UNSEEN = "Composer never looks at it"
TABLES = Tables(
    framework="composer",
    title="Composer 0.32",
    swallows={
        "": "its Trainer stops",
        "parallelism_config": UNSEEN,
        "parallelism_config.fsdp": UNSEEN,
        "parallelism_config.tp": "its class stops",
    },
)
COMPUTE = {"fp32": "float32", "amp_bf16": "bfloat16", "amp_fp16": "float16", "amp_fp8": "float8"}
CASTS = ("FULL", "DEFAULT", "PURE")


def read(source: Source, ranks: int | None) -> Foreign:
    """What a file of arguments says, and its faults. The batch of a step is that of the data, which stands elsewhere."""
    table = source.table
    section = section_of(section_of(table, "parallelism_config"), "fsdp")
    place = "parallelism_config.fsdp"
    found = (*TABLES.unknown(table), *precision_faults(table), *fsdp_faults(section, place), *_device(table, section))
    return Foreign(says=_says(table, section, ranks), findings=found)


def _says(table: Mapping[str, Any], section: Mapping[str, Any], ranks: int | None) -> Says:
    tp = whole(section_of(section_of(table, "parallelism_config"), "tp").get("tensor_parallel_degree"))
    return told(
        micro_batch=whole(table.get("device_train_microbatch_size")),
        tp=tp,
        backend={"gpu": "nccl", "cpu": "gloo"}.get(str(table.get("device"))),
        **layout(section, ranks // tp if ranks and tp else ranks),
        **formats(str(table.get("precision")), section),
    )


def layout(section: Mapping[str, Any], ranks: int | None) -> dict[str, int | None]:
    """Degrees and the stage of ZeRO of so many data-parallel ranks; without a section of FSDP, and where it shards nothing, there are
    replicas alone."""
    zero = FSDP_STAGES.get(str(section.get("sharding_strategy", "FULL_SHARD")).upper()) if section else 0
    if zero == 0:
        return {"zero": 0, "dp_replicate": ranks}
    shard, replicas = (whole(section.get(f"data_parallel_{name}_degree")) for name in ("shard", "replicate"))
    if ranks and not shard:
        shard = ranks // (replicas or 1)
    if ranks and shard and not replicas:
        replicas = max(1, ranks // shard)
    return {"zero": zero, "dp_shard": shard, "dp_replicate": replicas}


def formats(precision: str, section: Mapping[str, Any]) -> dict[str, str | None]:
    """Formats: weights and gradients are kept in fp32, and PURE reduces in the format of compute."""
    compute = COMPUTE.get(precision)
    pure = bool(section) and str(section.get("mixed_precision", "DEFAULT")).upper() == "PURE"
    return {
        "compute": compute,
        "parameter": "float32",
        "gradient": "float32",
        "reduce": compute if pure else "float32",
    }


def precision_faults(table: Mapping[str, Any]) -> Iterator[Finding]:
    """A precision that is none of Composer's."""
    yield from unknown_word("precision", "Composer", table.get("precision"), COMPUTE)


def fsdp_faults(section: Mapping[str, Any], place: str) -> Iterator[Finding]:
    """Words that FSDP's section does not know, and what it refuses."""
    kind, cast = section.get("sharding_strategy"), section.get("mixed_precision")
    yield from unknown_word(f"{place}.sharding_strategy", "Composer", kind and str(kind).upper(), FSDP_STAGES)
    if isinstance(cast, str):
        yield from unknown_word(f"{place}.mixed_precision", "Composer", cast.upper(), CASTS)
    if switched(section, "cpu_offload"):
        yield finding("composer-offload", f"{place}.cpu_offload")


def _device(table: Mapping[str, Any], section: Mapping[str, Any]) -> Iterator[Finding]:
    if section and str(table.get("device")) == "cpu":
        yield finding("composer-cpu-shards", "device")


def recognises(source: Source) -> bool:
    """A table with a Trainer's micro-batch, or with its section of parallelism in which FSDP or TP stands."""
    parallel = set(section_of(source.table, "parallelism_config"))
    return "device_train_microbatch_size" in source.table or bool(parallel & {"fsdp", "fsdp2", "tp"})


COMPOSER = Reader(
    name="composer", title="Composer 0.32", recognises=recognises, read=read, profile="fsdp1", says_gradients=True
)
