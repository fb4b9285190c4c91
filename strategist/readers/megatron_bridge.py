"""Megatron-Bridge's ConfigContainer as a table of sections: what it says is what Megatron-LM's arguments of those names say.

Keys as in Megatron-Bridge 0.3.1 and megatron-core 0.16.1, whose classes refuse others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from strategist.document.judgement import Finding
from strategist.readers.foreign import Foreign, Reader, Source, Tables, keys_of, section_of
from strategist.readers.megatron import Arguments, fsdp_checkpoint, mesh_faults, needs, said_alone, says_of, unsaid_of
from strategist.readers.models import named_at
from strategist.records import replace

SECTIONS = ("model", "train", "optimizer", "ddp", "scheduler", "checkpoint", "mixed_precision", "dist", "rng")
OVERLAP = "comm_overlap"
"""The section whose choice of overlap between experts wins over the model's (Megatron-Bridge 0.3.1: training/comm_overlap.py)."""
TABLES = Tables(
    framework="megatron-bridge",
    title="Megatron-Bridge 0.3",
    swallows=dict.fromkeys(("", *SECTIONS), "its classes refuse it"),
)
OTHER_NAMES = {
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "num_moe_experts": "--num-experts",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
}
"""Arguments whose fields are called differently."""

_ARGUMENT = re.compile(r"--([a-z][a-z0-9-]*)")


def read(source: Source, ranks: int | None) -> Foreign:
    """What a table says, and its faults. What is absent has the default of the container's classes."""
    said = arguments_of(source.table)
    says, open_ones = says_of(said, ranks), unsaid_of(said)
    faults = (*mesh_faults(said, says, ranks), *needs(said), *fsdp_checkpoint(said))
    return Foreign(
        says=said_alone(says, open_ones),
        findings=(*TABLES.unknown(source.table), *map(_in_its_words, faults)),
        unsaid=tuple(replace(one, argument=_field(one.argument)) for one in open_ones if one.choice != "model"),
    )


def arguments_of(table: Mapping[str, Any]) -> Arguments:
    """The fields of all sections as arguments of Megatron-LM; switches that are off are not among them."""
    found = {"--optimizer-offload-fraction": "0.0"}  # of the container's classes; that of the arguments is 1
    for section in SECTIONS:
        for name, value in section_of(table, section).items():
            argument = OTHER_NAMES.get(name, f"--{name.replace('_', '-')}")
            if value is not None and value is not False:
                first = value[0] if isinstance(value, list) and value else value  # as of a list of words
                found[argument] = "" if first is True else str(first)
    overlap = section_of(table, OVERLAP).get("overlap_moe_expert_parallel_comm")
    found |= {"--overlap-moe-expert-parallel-comm": ""} if overlap is True else {}
    return found | _formats(table.get("mixed_precision"))


def _formats(precision: Any) -> dict[str, str]:
    """Switches of formats, from the section or from the name of one of its recipes, such as bf16_mixed."""
    if isinstance(precision, str):
        narrow = {f"--{name}-format": "" for name in ("fp8", "fp4") if name in precision}
        return {f"--{low}": "" for low in ("bf16", "fp16") if precision.startswith(low)} | narrow
    fine = precision.get("grad_reduce_in_fp32", True) if isinstance(precision, dict) else True
    return {"--accumulate-allreduce-grads-in-fp32" if fine else "--grad-reduce-in-bf16": ""}


def _in_its_words(fault: Finding) -> Finding:
    """A fault of arguments with the names of fields."""
    return replace(fault, place=_field(fault.place), sentence=_field(fault.sentence), fix=_field(fault.fix))


def _field(text: str) -> str:
    return _ARGUMENT.sub(lambda match: match[1].replace("-", "_"), text)


def recognises(source: Source) -> bool:
    """A table of the container's sections, with a field of its own in the model's."""
    sections = set(keys_of("megatron-bridge")) & set(source.table)
    return len(sections) >= 2 and any("parallel_size" in name for name in section_of(source.table, "model"))


MEGATRON_BRIDGE = Reader(
    name="megatron-bridge",
    title="Megatron-Bridge 0.3",
    recognises=recognises,
    read=read,
    profile="megatron-core",
    says_gradients=True,
    model=named_at("hf_model_id", "model"),
)
