"""What programs around Transformers' Trainer are given beside its own arguments: TRL's commands, transformers' examples, FastChat.

Their arguments stand behind them on a line (`launched.py`), or in a file that holds all of them, a recipe. Names as in Transformers 5.23
and TRL 1.16, trl/trainer/model_config.py and trl/scripts/utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from strategist.document.judgement import Finding, Said
from strategist.facts.model import ModelShape
from strategist.facts.models import load_model
from strategist.readers.beside import table_named
from strategist.readers.foreign import IN_BF16, Foreign, Reader, Source, keys_of, odd_arguments, switched, told, whole
from strategist.readers.transformers import choices, fsdp_keys, recognises_factory, trainer_says

SIGN = "per_device_train_batch_size"
MODELS = ("model_name_or_path", "model_id", "base_model")
LENGTHS = ("max_length", "max_seq_length", "block_size", "model_max_length", "cutoff_len")
"""What programs call their model, and the length of their sequences: TRL, transformers' examples, FastChat, LLaMA-Factory."""

LOADED = ("dtype", "torch_dtype", "model_dtype")
"""What programs call the format in which they load their model: TRL and transformers' examples."""

PEFT_RANK = 16
"""TRL's own (trl/trainer/model_config.py, lora_r)."""

Table = Mapping[str, Any]


def arguments_say(source: Source, ranks: int | None) -> dict[str, Said]:
    """What the arguments say: of the layout as Trainer does, of sequences and adapters as programs around it do."""
    table = source.table
    if isinstance(table.get("fsdp_config"), str):
        table = {**table, "fsdp_config": table_named(source, table["fsdp_config"])}
        source = Source(path=source.path, text=source.text, value=table)
    length = next((whole(table[name]) for name in LENGTHS if name in table), None)
    return trainer_says(source, ranks) | told(seq_len=length, **_adapters(table))


def loaded(table: Table, says: Mapping[str, Said]) -> dict[str, Said]:
    """How weights rest that are loaded in a named format, where every rank has them whole: Accelerate's FSDP and DeepSpeed keep fp32."""
    word = next((str(table[name]) for name in LOADED if name in table), "")
    if word != "bfloat16" or says.get("zero") != 0:
        return {}
    return IN_BF16 | {"compute": word if says.get("compute") == "float32" else says["compute"]}


def _adapters(table: Table) -> dict[str, Said]:
    if not switched(table, "use_peft"):
        return {}
    return {
        "method": "qlora" if switched(table, "load_in_4bit") else "lora",
        "lora_rank": whole(table.get("lora_r")) or PEFT_RANK,
    }


def model_of(table: Table, flag: str, dashes: str = "") -> ModelShape | None:
    """The model that a program is given. Raises what `load_model` raises, with the argument's name."""
    key = next((key for key in MODELS if isinstance(table.get(key), str)), None)
    return None if key is None else load_model(table[key], f"{flag}: {dashes}{key}")


def misspelt(table: Table) -> Iterator[Finding]:
    """Arguments that are almost one of Trainer's; others are the program's."""
    known = (*keys_of("transformers"), *keys_of("trl"), *MODELS, *LENGTHS, *LOADED)
    odd = odd_arguments((name for name in table if name not in known), known, "Transformers 5.23")
    yield from (fault for fault in odd if fault.rule == "unknown-key")


def read(source: Source, ranks: int | None) -> Foreign:
    """What a recipe says, and its faults."""
    table = source.table
    says = arguments_say(source, ranks)
    return Foreign(
        says={**says, **loaded(table, says)},
        findings=(*misspelt(table), *fsdp_keys(table), *choices(table)),
    )


def recognises(source: Source) -> bool:
    """A table with a batch in Trainer's words and the name of a model, which Trainer's own arguments do not have."""
    names_a_model = any(isinstance(source.table.get(key), str) for key in MODELS)
    return SIGN in source.table and names_a_model and not recognises_factory(source)


RECIPE = Reader(
    name="recipe",
    title="recipe for Hugging Face's Trainer",
    recognises=recognises,
    read=read,
    profile="hf-trainer",
    model=lambda source, flag: model_of(source.table, flag),
)
