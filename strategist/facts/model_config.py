"""A Hugging Face configuration becomes a ModelShape: the right family is found, and nothing in the file is executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from strategist.errors import InputError, nearest, shown
from strategist.facts.families import FAMILIES
from strategist.facts.families.config import Config, class_defaults
from strategist.facts.families.vision_language import WRAPPERS, language_tower
from strategist.facts.model import ModelShape
from strategist.facts.parameters import table_width
from strategist.facts.sizes import of_bearable_size
from strategist.records import replace

REMOTE_CODE_KEYS = ("auto_map", "custom_pipelines", "trust_remote_code", "_attn_implementation_internal")
"""Keys by which a configuration can name code to be run. They are never followed."""

SAME_AS = {"gpt-sw3": "gpt2"}
"""Types that transformers has another type's class for (models/auto/auto_mappings.py); they are read as that, under its name."""

LAYER_BY_LAYER = ("gemma4_text",)
"""Types whose reader knows `per_layer_config`, by which transformers 5 gives single layers other sizes than the file says
(configuration_utils.py). To others it would be a silent error."""


def shape_from_config(config: Mapping[str, Any], flag: str = "--model-config", *, is_built: bool = False) -> ModelShape:
    """The shape that a configuration describes: the language tower of composite ones. Of a module that is built already the module
    itself says what its class has otherwise.

    Nothing is imported, downloaded or executed because of it. Raises InputError UNKNOWN_ARCH for a `model_type` without
    a reader (never a guess), MISSING, TYPE, NEGATIVE, TOO_SMALL, TOO_LARGE, RANGE, CHOICE and DIVISIBILITY with the
    place in the file; further problems of the same file are in `also`.
    """
    if not isinstance(config, Mapping):
        raise InputError("TYPE", f"{flag} must hold an object.", flag=flag, value=type(config).__name__, hint="Give a config.json.")  # fmt: skip
    top = Config(config, flag)
    tower, model_type = _described(top)
    read = _reader(tower, model_type)
    if model_type not in LAYER_BY_LAYER and tower.values.get("per_layer_config"):
        tower.refuse("CHOICE", "per_layer_config", "gives layers sizes of their own, which cannot be read for this model_type")  # fmt: skip
        tower.settle()
    shape = read(tower)
    top.settle()
    named = replace(
        shape,
        name=_name(config, model_type),
        family=model_type,
        model_type=model_type,
        source=f"configuration given with {flag}, read as {model_type}",
        notes=(
            *_remote_code(top, tower),
            *(() if is_built else _other_class(top, shape)),
            *_quantised(top),
            *_summary(tower, shape),
            *shape.notes,
        ),
    )
    return of_bearable_size(named, flag)


def _described(top: Config) -> tuple[Config, str]:
    """The part of the file that describes the model, and its model_type."""
    key = "_class_name" if not top.has("model_type") and top.has("_class_name") else "model_type"
    if not top.has(key):
        top.refuse("MISSING", "model_type", "is missing", hint=_way_out())
    model_type = top.word(key)
    top.settle()
    model_type = SAME_AS.get(model_type, model_type)
    if model_type in WRAPPERS:
        tower, model_type = language_tower(top, model_type)
        top.settle()
        return tower, model_type
    return Config(top.values, top.flag, ledger=top.ledger, class_defaults=class_defaults(model_type)), model_type


def _reader(tower: Config, model_type: str) -> Callable[[Config], ModelShape]:
    readers = {name: read for family in FAMILIES for name, read in family.readers.items()}
    if model_type in readers:
        return readers[model_type]
    close = nearest(model_type, (*readers, *WRAPPERS))
    hint = f"The nearest known ones are {', '.join(close)}. {_way_out()}" if close else _way_out()
    sentence = f"{tower.flag}: {tower.path}.model_type {shown(model_type)} has no reader, and layers are never guessed."
    raise InputError("UNKNOWN_ARCH", sentence, flag=f"{tower.path}.model_type", value=model_type, hint=hint)


def _way_out() -> str:
    known = ", ".join(family.name for family in FAMILIES)
    return (
        f"Families with a reader: {known}. Otherwise name a catalogue model with --model, or a size with --model-size."
    )


def _name(config: Mapping[str, Any], model_type: str) -> str:
    """The last part of `_name_or_path`, made safe to print; the model_type when there is none."""
    given = config.get("_name_or_path")
    last = given.rstrip("/").rpartition("/")[2] if isinstance(given, str) else ""
    return shown(last) or model_type


def _remote_code(*parts: Config) -> list[str]:
    found = {f"{part.path}.{key}": None for part in parts for key in REMOTE_CODE_KEYS if part.has(key)}
    return [f"W_REMOTE_CODE_IGNORED: {', '.join(found)} can name code to run; it was not imported."] if found else []


_WITH_VOCABULARY = ("ForCausalLM", "LMHeadModel", "DoubleHeadsModel", "ForConditionalGeneration", "ForMaskedLM", "ForPreTraining")  # fmt: skip
"""Ends of the names of classes in transformers whose head gives a score for every token of the vocabulary."""


def _other_class(top: Config, shape: ModelShape) -> list[str]:
    """What is counted although the class that `architectures` names has it otherwise: no head over the vocabulary, for rewards, labels or
    embeddings, or layers of its own (drafts for speculative decoding)."""
    named = top.list_of(str, "architectures", limit=16) or []
    if not named or shape.kind not in ("decoder", "hybrid", "ssm", "encdec") or any(name.endswith(_WITH_VOCABULARY) for name in named):  # fmt: skip
        return []
    weights = 0 if shape.tied else shape.vocab * table_width(shape)
    beside = "its logits" if shape.tied else f"its {weights:,} weights and its logits"
    return [f"architectures names {shown(named[0])}; counted is the language model of this type, whose head gives a score for every token: {beside} are counted."]  # fmt: skip


def _quantised(top: Config) -> list[str]:
    found = top.values.get("quantization_config")
    if not isinstance(found, Mapping):
        return []
    method = found.get("quant_method")
    how = f" ({shown(method)})" if isinstance(method, str) else ""
    return [f"quantization_config{how} is not read: weights have the formats of the job, not those of the file."]


def _summary(tower: Config, shape: ModelShape) -> list[str]:
    """Where the main facts came from, and which defaults stood in for absent keys."""
    facts = f"{shape.layers} layers, width {shape.hidden}, {shape.heads} heads, {shape.kv_heads} key-value heads"
    place = [] if tower.path == "$" else [f"From {tower.path}: {facts}."]
    used = dict.fromkeys(tower.ledger.defaults)
    defaults = [f"Defaults of the configuration class: {'; '.join(used)}."] if used else []  # fmt: skip
    return [*tower.ledger.notes, *place, *defaults]
