"""Accelerate's YAML for `accelerate launch`. Keys, and what becomes of unknown ones, as in Accelerate 1.15.0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from strategist.document.judgement import Finding
from strategist.readers.beside import engine_faults, engine_says
from strategist.readers.foreign import (
    FORMATS,
    FSDP_STAGES,
    Foreign,
    Reader,
    Says,
    Source,
    Tables,
    finding,
    near,
    section_of,
    switched,
    told,
    whole,
)

SECTIONS = (
    "fsdp_config",
    "parallelism_config",
    "deepspeed_config",
    "megatron_lm_config",
    "dynamo_config",
    "fp8_config",
    "mpirun_config",
)
TABLES = Tables(
    framework="accelerate",
    title="Accelerate 1.15",
    swallows={"": "it refuses the file"} | dict.fromkeys(SECTIONS, "it drops this one without a word"),
)
AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
PRECISIONS = ("no", "fp16", "bf16", "fp8")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP1's, in the order of their numbers, from 1 (accelerate 1.15: utils/constants.py, FSDP_SHARDING_STRATEGY)."""
SWITCH = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}
ON_CPU = {
    "FSDP": "accelerate-cpu-fsdp",
    "DEEPSPEED": "accelerate-cpu-deepspeed",
    "MULTI_CPU": "accelerate-cpu-one-process",
    "MULTI_GPU": "accelerate-cpu-one-process",
}
"""What goes wrong with use_cpu, by distributed_type."""


def read(source: Source, ranks: int | None) -> Foreign:
    """What a file says, and its faults."""
    table = source.table
    processes = whole(table.get("num_processes"))
    found = (
        *TABLES.unknown(table),
        *_missing(table),
        *_on_cpu(table, processes),
        *_mesh(table, processes),
        *_precision(table),
        *_ranks(processes, ranks),
        *engine_faults(source, section_of(table, "deepspeed_config").get("deepspeed_config_file")),
    )
    return Foreign(says=_says(source, processes), findings=found)


def sizes(table: Mapping[str, Any]) -> dict[str, int]:
    """Degrees of the section parallelism_config; 1 where it is silent."""
    section = section_of(table, "parallelism_config")
    return {axis: whole(section.get(f"parallelism_config_{axis}_size")) or 1 for axis in AXES}


def _kind(table: Mapping[str, Any]) -> str:
    return str(table.get("distributed_type", "NO")).upper()


def _says(source: Source, processes: int | None) -> Says:
    """Mesh, ZeRO stage and formats. DeepSpeed's own file, where one is named and found, says the rest."""
    table = source.table
    compute = FORMATS.get(str(table.get("mixed_precision")))
    says = told(nodes=whole(table.get("num_machines")), compute=compute, ranks=processes)
    says["compile"] = str(section_of(table, "dynamo_config").get("dynamo_backend", "no")).lower() not in ("no", "none")
    kind = _kind(table)
    if kind == "FSDP":
        return says | _fsdp(table, processes)
    if kind == "DEEPSPEED":
        section = section_of(table, "deepspeed_config")
        engine = engine_says(source, section.get("deepspeed_config_file"), "compute")
        return {**engine, **says, **_deepspeed(section), **_ulysses(sizes(table)["sp"])}
    if sizes(table)["tp"] > 1:  # whoever cut the model knows how its shards and replicas are
        return says | told(tp=sizes(table)["tp"])
    return says | told(zero=0, offload="none", dp_replicate=processes)


def _fsdp(table: Mapping[str, Any], processes: int | None) -> dict[str, Any]:
    section, degrees = section_of(table, "fsdp_config"), sizes(table)
    strategy = _strategy(section)
    if not section_of(table, "parallelism_config") and processes:
        degrees |= _split(strategy, processes, whole(table.get("num_machines")) or 1)
    return {
        "zero": FSDP_STAGES.get(strategy, 2),
        "offload": "parameters" if switched(section, "fsdp_offload_params") else "none",
        "recompute": "full" if switched(section, "fsdp_activation_checkpointing") else "none",
        **{axis: degrees[axis] for axis in ("dp_replicate", "dp_shard", "tp", "cp")},
    }


def _strategy(section: Mapping[str, Any]) -> str:
    """The name of FSDP1's strategy, which may be said by its number, or what FSDP2's switch comes to."""
    version, named = str(section.get("fsdp_version", 1)), section.get("fsdp_sharding_strategy")
    word = section.get("fsdp_reshard_after_forward", True) if version != "1" or named is None else named
    number = whole(word)
    if number and number <= len(STRATEGIES):
        return STRATEGIES[number - 1]
    return SWITCH.get(str(word).upper(), str(word).upper())


def _split(strategy: str, processes: int, machines: int) -> dict[str, int]:
    """How many replicas there are, and ranks that share each: of hybrid strategies a machine's."""
    replicas = machines if strategy.startswith("HYBRID") and processes % machines == 0 else 1
    replicas = processes if strategy == "NO_SHARD" else replicas
    return {"dp_replicate": replicas, "dp_shard": processes // replicas}


def _deepspeed(section: Mapping[str, Any]) -> dict[str, Any]:
    stage = section.get("zero_stage")
    if "deepspeed_config_file" in section or not isinstance(stage, int):
        return {}
    devices = {name: section.get(f"offload_{name}_device", "none") for name in ("optimizer", "param")}
    offload = "parameters" if devices["param"] == "cpu" else "optimizer" if devices["optimizer"] == "cpu" else "none"
    return told(
        zero=stage,
        offload="nvme" if "nvme" in devices.values() else offload,
        accumulation=whole(section.get("gradient_accumulation_steps")),
    )


def _ulysses(size: int) -> dict[str, Any]:
    """DeepSpeed's split of sequences, which Accelerate sets up (accelerate 1.15, accelerator.py, sp_backend)."""
    return {"cp": size, "context_parallel": "all-to-all"} if size > 1 else {}


def _missing(table: Mapping[str, Any]) -> Iterator[Finding]:
    if "distributed_type" not in table:
        why = "without it the launcher guesses from the section names"
        yield finding("missing-key", "distributed_type", title="Accelerate", key="distributed_type", why=why)


def _on_cpu(table: Mapping[str, Any], processes: int | None) -> Iterator[Finding]:
    kind = _kind(table)
    if switched(table, "use_cpu") and kind in ON_CPU and (processes or 1) > 1:
        yield finding(ON_CPU[kind], "use_cpu", kind=kind, processes=processes or 1)


def _mesh(table: Mapping[str, Any], processes: int | None) -> Iterator[Finding]:
    """Pairs of degrees that its ParallelismConfig refuses when the job starts."""
    if not section_of(table, "parallelism_config"):
        return
    degrees, place = sizes(table), "parallelism_config"
    fsdp = section_of(table, "fsdp_config")
    if _kind(table) == "FSDP" and str(fsdp.get("fsdp_version", 1)) != "2":
        yield finding("accelerate-mesh-needs-fsdp2", "fsdp_config.fsdp_version", version=fsdp.get("fsdp_version", 1))
    if degrees["cp"] > 1 and degrees["sp"] > 1:
        yield finding("accelerate-cp-and-sp", place, cp=degrees["cp"], sp=degrees["sp"])
    if max(degrees["tp"], degrees["cp"]) > 1 and degrees["dp_replicate"] > 1 and degrees["dp_shard"] == 1:
        yield finding("accelerate-replicas-beside-model", place, replicate=degrees["dp_replicate"])
    if _kind(table) == "FSDP" and degrees["dp_shard"] == degrees["cp"] == 1:
        yield finding("accelerate-nothing-to-shard", place)
    product = prod(degrees.values())
    if processes and product != processes and degrees["sp"] == 1:
        yield finding("ranks-product", place, product=product, ranks=processes)


def _precision(table: Mapping[str, Any]) -> Iterator[Finding]:
    word = table.get("mixed_precision", "no")
    if str(word) not in PRECISIONS:
        yield finding("accelerate-precision", "mixed_precision", word=word, near=near(str(word), PRECISIONS))


def _ranks(processes: int | None, ranks: int | None) -> Iterator[Finding]:
    if processes and ranks and processes != ranks:
        yield finding("ranks-product", "num_processes", product=processes, ranks=ranks)


def recognises(source: Source) -> bool:
    """A table with a key that only Accelerate has."""
    return bool({"distributed_type", "compute_environment", "main_training_function"} & set(source.table))


ACCELERATE = Reader(name="accelerate", title="Accelerate 1.15", recognises=recognises, read=read, profile="hf-trainer")
