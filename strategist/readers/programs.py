"""What programs around Transformers' Trainer are given beside its own arguments: TRL's commands, transformers' examples, FastChat.

Their arguments stand behind them on a line (`launched.py`), or in a file that holds all of them, a recipe. Names as in Transformers 5.23
and TRL 1.16, trl/trainer/model_config.py and trl/scripts/utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from strategist.catalog import rows
from strategist.document.judgement import Finding, Said
from strategist.facts.adapters import TARGETS
from strategist.facts.model import ModelShape
from strategist.facts.model_rows import rows_called
from strategist.facts.models import load_model
from strategist.readers.beside import engine_faults, table_named
from strategist.readers.foreign import (
    IN_BF16,
    Foreign,
    Reader,
    Source,
    finding,
    keys_of,
    lora_targets,
    odd_arguments,
    switched,
    told,
    whole,
)
from strategist.readers.transformers import (
    LENGTHS,
    OPTION,
    SFT_KEYS,
    choices,
    fsdp_keys,
    recognises_factory,
    trainer_says,
    with_trl_defaults,
)
from strategist.records import replace

MODELS = ("model_name_or_path", "model_id", "base_model")
"""What programs call their model."""

LOADED = ("dtype", "torch_dtype", "model_dtype")
"""What programs call the format in which they load their model: TRL and transformers' examples."""

PEFT_RANK = 16
"""TRL's own (trl/trainer/model_config.py, lora_r)."""
LLAVA_RANK, FASTCHAT_RANK = 64, 8
"""LLaVA's own (llava/train/train.py, lora_r), and FastChat's (fastchat/train/train_lora.py)."""

TRAINERS = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "distillation")
"""TRL's commands that train, each a script in trl/scripts."""
OF_ONE_MODEL = "sft"
"""The only one of them that trains on single sequences with no other model beside it."""
PREFERENCES = "beta"
"""A key of all of TRL's configurations for preferences but that of rewards, and of no other (TRL 1.16.0, trainer/*_config.py)."""
DATASETS = ("dataset_name", "dataset_mixer", "dataset_mixture", "datasets")
"""What recipes call their data, which Trainer's own arguments do not have."""
FOLDER = "output_dir"

Table = Mapping[str, Any]


def trainer_of(table: Table) -> str:
    """Which of TRL's trainers arguments are for by their keys; "" where they may be for another program."""
    return OF_ONE_MODEL if set(SFT_KEYS) & set(table) else PREFERENCES if PREFERENCES in table else ""


def arguments_read(source: Source, ranks: int | None, trainer: str) -> Foreign:
    """What the arguments say: of the layout as Trainer does, of sequences and adapters as programs around it do, with what TRL sets
    unasked where one of its trainers takes them; and their faults."""
    table = source.table
    found = (*misspelt(table), *fsdp_keys(table), *choices(table), *engine_faults(source, table.get("deepspeed")))
    if isinstance(table.get("fsdp_config"), str):
        table = {**table, "fsdp_config": table_named(source, table["fsdp_config"])}
    if trainer:
        table = with_trl_defaults(table, trainer)
    length = next((whole(table[name]) for name in LENGTHS if name in table), None)
    says = trainer_says(replace(source, value=table), ranks) | told(seq_len=length, **_adapters(table))
    return Foreign(says=says, findings=(*found, *_uncounted(table, trainer)))


def _uncounted(table: Table, trainer: str) -> Iterator[Finding]:
    if trainer not in ("", OF_ONE_MODEL):
        yield finding("preferences", trainer, word=trainer)
    if whole(table.get("bits")) == 8:
        yield finding("weights-of-eight-bits", "bits", bits=8)


def loaded(table: Table, says: Mapping[str, Said]) -> dict[str, Said]:
    """How weights rest that are loaded in a named format, where every rank has them whole: Accelerate's FSDP and DeepSpeed keep fp32."""
    word = next((str(table[name]) for name in LOADED if name in table), "")
    if word != "bfloat16" or says.get("zero") != 0:
        return {}
    return IN_BF16 | {"compute": word if says.get("compute") == "float32" else says["compute"]}


def _adapters(table: Table) -> dict[str, Said]:
    """Adapters as TRL, FastChat and LLaVA are told of them; LLaVA's stand beside all matrices, FastChat's beside two."""
    targets = lora_targets(table.get("lora_target_modules"))
    if switched(table, "use_peft"):
        usual, is_low = _usual_targets(table), switched(table, "load_in_4bit")
        named = "lora_target_modules" in table
        return _lora(table, PEFT_RANK, targets if named else usual, is_low=is_low)
    if switched(table, "lora_enable"):
        return _lora(table, LLAVA_RANK, ",".join(TARGETS), is_low=whole(table.get("bits")) == 4)
    if "q_lora" in table:
        return _lora(table, FASTCHAT_RANK, targets or "q,v", is_low=switched(table, "q_lora"))
    return {}


def _lora(table: Table, rank: int, targets: str | None, *, is_low: bool) -> dict[str, Said]:
    """Adapters of a rank that is said, or else of the program's own."""
    method = "qlora" if is_low else "lora"
    return told(method=method, lora_rank=whole(table.get("lora_r")) or rank, lora_targets=targets)


def _usual_targets(table: Table) -> str | None:
    """Matrices with adapters where none are named: PEFT's, by the kind of the model; None for kinds that are not known."""
    name = next((str(table[key]) for key in MODELS if key in table), "")
    kinds = {row["model_type"] for row in rows_called(name) if "model_type" in row}
    return next((str(row["targets"]) for row in rows("peft_targets") if row["model_type"] in kinds), None)


def model_of(table: Table, flag: str, dashes: str = "") -> ModelShape | None:
    """The model that a program is given. Raises what `load_model` raises, with the argument's name."""
    key = next((key for key in MODELS if isinstance(table.get(key), str)), None)
    return None if key is None else load_model(table[key], f"{flag}: {dashes}{key}")


def misspelt(table: Table) -> Iterator[Finding]:
    """Arguments that are almost one of Trainer's; others are the program's."""
    known = (*keys_of("transformers"), *keys_of("trl"), *MODELS, *LENGTHS, *LOADED, *DATASETS)
    odd = odd_arguments((name for name in table if name not in known), known, "Transformers 5.23")
    yield from (fault for fault in odd if fault.rule == "unknown-key")


def read(source: Source, ranks: int | None) -> Foreign:
    """What a recipe says, and its faults."""
    found = arguments_read(source, ranks, trainer_of(source.table))
    return Foreign(says={**found.says, **loaded(source.table, found.says)}, findings=found.findings)


def recognises(source: Source) -> bool:
    """A table with arguments of Trainer's and, beside them, its model or its data, which Trainer's own arguments do not have."""
    table = source.table
    names_a_model = any(isinstance(table.get(key), str) for key in MODELS)
    is_whole = OPTION in table or FOLDER in table
    is_recipe = (names_a_model and is_whole) or (OPTION in table and bool(set(DATASETS) & set(table)))
    return is_recipe and not recognises_factory(source)


RECIPE = Reader(
    name="recipe",
    title="recipe for Hugging Face's Trainer",
    recognises=recognises,
    read=read,
    profile="hf-trainer",
    model=lambda source, flag: model_of(source.table, flag),
)
