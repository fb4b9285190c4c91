"""torchtune's YAML, and `tune run`, which gives it to a recipe. Keys as in torchtune 0.6.1, recipes of fine-tuning and their configurations;
those of meshes that only its last sources have (recipes/full_finetune_distributed.py of 2026-04-23) are read too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from strategist.catalog import rows
from strategist.document.judgement import Finding
from strategist.errors import shown
from strategist.facts.adapters import TARGETS
from strategist.facts.model import ModelShape
from strategist.facts.models import load_model
from strategist.readers.beside import source_named
from strategist.readers.foreign import (
    FORMATS,
    Foreign,
    Reader,
    Says,
    Source,
    finding,
    is_misspelt,
    keys_of,
    section_of,
    switched,
    told,
    whole,
)
from strategist.readers.launched import LAUNCHER
from strategist.readers.references import resolved
from strategist.readers.script import Script, is_script, script_faults, script_of, started
from strategist.reading import parse_yaml

Table = Mapping[str, Any]
BUILDERS = "torchtune.models."
SECOND_MODELS = ("teacher_model", "ref_checkpointer", "reward_and_value_model")
"""Keys of distillation and of preferences, whose second model, or second pass, no plan counts."""
PREFERENCES = "torchtune.rlhf."
"""Where the losses of such recipes are."""
ALONE = "single_device"
"""In the name of a recipe, or of its configuration, that trains on one device."""
OPTIMIZERS = {
    "torch.optim.AdamW": "adamw",
    "torch.optim.Adam": "adamw",
    "torch.optim.SGD": "sgd",
    "bitsandbytes.optim.PagedAdamW": "adamw",
    "bitsandbytes.optim.PagedAdamW8bit": "adamw8bit",
    "bitsandbytes.optim.AdamW8bit": "adamw8bit",
    "torchao.optim.AdamW8bit": "adamw8bit",
}
AXES = {
    "dp_replicate": "data_parallel_replicate_dim",
    "dp_shard": "data_parallel_shard_dim",
    "tp": "tensor_parallel_dim",
    "cp": "context_parallel_dim",
}
MATRICES = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "output_proj": "o"}
ADAPTER_RANK = 8
"""torchtune's own (torchtune/models/*/_model_builders.py, lora_rank)."""
_METHOD = re.compile(r"(q?lora)_")
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")


def read(source: Source, ranks: int | None) -> Foreign:
    """What a configuration says under the words of its line, and its faults."""
    script = script_of(source) if is_script(source) else None
    table = _table(source, script)
    launched = started(script) if script else None
    count, there = 1 if _is_alone(source, script) else launched, ranks or launched
    found = [*(script_faults(script) if script else ()), *_faults(table)]
    if count and there and count != there:
        found.append(finding("ranks-product", LAUNCHER, product=count, ranks=there))
    says = _says(table, sharded=(there or count) != 1)
    return Foreign(says={**says, **told(ranks=count), **_adapters(section_of(table, "model"))}, findings=tuple(found))


def _is_alone(source: Source, script: Script | None) -> bool:
    """Whether the recipe, or by its name the configuration, is one for a single device."""
    named = _recipe(script) if script else source.path.rpartition("/")[2]
    return ALONE in named


def _says(table: Table, *, sharded: bool) -> Says:
    """torchtune shards with FSDP wherever there is a second rank, and adds gradients up in the format of its weights."""
    reshards = str(table.get("fsdp_reshard_after_forward", True)).lower() == "true"
    return told(
        micro_batch=whole(table.get("batch_size")),
        accumulation=whole(table.get("gradient_accumulation_steps")) or 1,
        seq_len=whole(section_of(table, "tokenizer").get("max_seq_len")),
        zero=(3 if reshards else 2) if sharded else 0,
        offload="parameters" if switched(table, "fsdp_cpu_offload") else None,
        optimizer=OPTIMIZERS.get(str(section_of(table, "optimizer").get("_component_"))),
        compile=_is_compiled(table),
        compute="float8" if switched(table, "enable_fp8_training") else FORMATS.get(str(table.get("dtype"))),
        **{axis: whole(table.get(key)) for axis, key in AXES.items()},
        **_recompute(table),
    )


def _is_compiled(table: Table) -> bool:
    said = table.get("compile")
    return bool(said.get("model", True)) if isinstance(said, dict) else switched(table, "compile")


def _recompute(table: Table) -> Says:
    """Whole layers, or of the selective kind every nth of them, or what attention and matrices give is kept."""
    if table.get("ac_mode") == "selective":
        each = whole(table.get("ac_option"))
        return {"recompute": "full", "recompute_every": each} if each else {"recompute": "selective"}
    return {"recompute": "full" if switched(table, "enable_activation_checkpointing") else "none"}


def _adapters(model: Table) -> Says:
    """What is trained, by the name of the model's builder; of adapters, which, where a plan can name all of them."""
    method = _METHOD.match(_builder(model))
    if method is None:
        return {"method": "full"}
    listed = [MATRICES.get(str(name), "") for name in model.get("lora_attn_modules") or ()]
    targets = [*listed, *(TARGETS[-3:] if switched(model, "apply_lora_to_mlp") else ())]
    is_plain = bool(targets) and all(targets) and not switched(model, "apply_lora_to_output")
    return told(
        method=method[1],
        lora_rank=whole(model.get("lora_rank")) or ADAPTER_RANK,
        lora_targets=",".join(targets) if is_plain else None,
    )


def _builder(model: Table) -> str:
    """The last part of the builder's name: lora_llama3_1_8b."""
    return str(model.get("_component_", "")).rpartition(".")[2]


def _faults(table: Table) -> Iterator[Finding]:
    """What its recipes stop at, and keys that they never look at."""
    for key in table:
        near = next((known for known in keys_of("torchtune") if is_misspelt(key, known)), None)
        if near and key not in keys_of("torchtune"):
            words = {"title": "torchtune 0.6", "where": "at its top level", "swallows": "its recipes never look at it"}
            yield finding("unknown-key", key, key=key, near=f"Write {near}.", **words)
    optimizer = section_of(table, "optimizer").get("_component_")
    if optimizer is not None and optimizer not in OPTIMIZERS:
        yield finding("uncounted-optimizer", "optimizer", word=shown(str(optimizer)))
    if table.get("dtype") == "fp16":
        yield finding("torchtune-fp16", "dtype")
    if switched(table, "optimizer_in_bwd"):
        stops = [key for key in ("clip_grad_norm",) if table.get(key) is not None]
        stops += ["gradient_accumulation_steps"] if (whole(table.get("gradient_accumulation_steps")) or 1) > 1 else []
        yield from (finding("torchtune-in-backward", key, key=key) for key in stops)
    if switched(table, "enable_activation_offloading"):
        checkpoints = switched(table, "enable_activation_checkpointing")
        yield finding("activations-on-host" if checkpoints else "torchtune-offload", "enable_activation_offloading")
    if (whole(table.get("tensor_parallel_dim")) or 1) > 1 and table.get("tensor_parallel_plan") is None:
        yield finding("torchtune-tp-plan", "tensor_parallel_plan")


def _table(source: Source, script: Script | None) -> dict[str, Any]:
    """The configuration, of a line the one that it names with the line's words in it; empty where that is not known."""
    if script is None:
        return resolved(source.table)
    found = _named(source, script.option("--config") or "")
    return {} if found is None else resolved(_overridden(found, script))


def _named(source: Source, name: str) -> Table | None:
    """The configuration behind --config: one of torchtune's own, by which it looks first, or a file."""
    own = _own().get(name)
    if own is not None:
        return own
    file = source_named(source, name) if name else None
    return None if file is None else file.table


@cache
def _own() -> Mapping[str, Table]:
    """The configurations that torchtune brings along, by name: of each what is read here."""
    return {row["config"]: row["table"] for row in rows("torchtune_configs")}


def _overridden(table: Table, script: Script) -> dict[str, Any]:
    """The configuration with the words behind it put in, places joined by dots, and without those that a tilde takes out
    (torchtune/config/_utils.py, _merge_yaml_and_cli_args)."""
    found: dict[str, Any] = _copied(table)
    start = next(index for index, word in enumerate(script.words) if word.startswith("--config"))
    for word in script.words[start:]:
        if _OVERRIDE.match(word):
            place, _, value = word.partition("=")
            _put(found, place.split("."), parse_yaml(value, place) if value else None)
        elif word.startswith("~"):
            _take_out(found, word[1:].split("."))
    return found


def _copied(value: Any) -> Any:
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def _put(table: dict[str, Any], place: list[str], value: Any) -> None:
    """Set the value there; a section's own name stands for its component."""
    *sections, last = place
    for name in sections:
        inner = table.get(name)
        table[name] = inner if isinstance(inner, dict) else {}
        table = table[name]
    if isinstance(table.get(last), dict) and isinstance(value, str):
        table[last] = {**table[last], "_component_": value}
    else:
        table[last] = value


def _take_out(table: dict[str, Any], place: list[str]) -> None:
    *sections, last = place
    for name in sections:
        inner = table.get(name)
        table = inner if isinstance(inner, dict) else {}
    table.pop(last, None)


def _recipe(script: Script) -> str:
    """The recipe of `tune run`: the last word before its own arguments."""
    words = script.words
    start = next((index for index, word in enumerate(words) if word.startswith("--config")), 0)
    return words[start - 1] if start else ""


def recognises(source: Source) -> bool:
    """A table with a model of torchtune's and a batch, or `tune run` with a configuration that is known."""
    if is_script(source):
        script = script_of(source)
        return script.runs("tune") and _is_training(_named(source, script.option("--config") or "") or {})
    return _is_training(source.table)


def _is_training(table: Table) -> bool:
    model, loss = (str(section_of(table, name).get("_component_", "")) for name in ("model", "loss"))
    is_plain = not set(SECOND_MODELS) & set(table) and not loss.startswith(PREFERENCES)
    return model.startswith(BUILDERS) and {"batch_size", "optimizer"} <= set(table) and is_plain


def _model(source: Source, flag: str) -> ModelShape | None:
    """The catalogue's model of a builder, where it has it."""
    script = script_of(source) if is_script(source) else None
    builder = _METHOD.sub("", _builder(section_of(_table(source, script), "model")))
    plain = builder.removesuffix("_instruct").removesuffix("_base")
    found = next((row for row in rows("torchtune_models") if row["builder"] == plain), None)
    return None if found is None else load_model(found["model"], f"{flag}: model._component_")


TORCHTUNE = Reader(
    name="torchtune",
    title="torchtune 0.6",
    recognises=recognises,
    read=read,
    profile="torchtune",
    model=_model,
)
