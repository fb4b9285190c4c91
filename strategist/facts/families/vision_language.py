"""Vision-language configurations: which part of them describes the language tower, and what is said about the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strategist.facts.families.config import Config, class_defaults


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A composite `model_type`: the text type its class falls back to, and whether it ties the output head by default."""

    text_type: str
    tied: bool = False


WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper("gemma3_text", tied=True),
    "idefics3": Wrapper("llama"),
    "internvl": Wrapper("qwen2", tied=True),
    "llama4": Wrapper("llama4_text"),
    "llava": Wrapper("llama"),
    "llava_next": Wrapper("llama"),
    "llava_onevision": Wrapper("qwen2"),
    "mistral3": Wrapper("mistral"),
    "paligemma": Wrapper("gemma", tied=True),
    "qwen2_vl": Wrapper("qwen2_vl_text"),
    "qwen2_5_vl": Wrapper("qwen2_5_vl_text"),
    "qwen3_vl": Wrapper("qwen3_vl_text"),
    "qwen3_vl_moe": Wrapper("qwen3_vl_moe_text"),
    "qwen3_5": Wrapper("qwen3_5_text"),
    "qwen3_5_moe": Wrapper("qwen3_5_moe_text"),
    "smolvlm": Wrapper("llama"),
    "vipllava": Wrapper("llama"),
}


def language_tower(config: Config, model_type: str) -> tuple[Config, str]:
    """The part of a composite configuration that describes its language tower, and that part's own model_type.

    Old Qwen2-VL files have the text keys at the top level. The output head is tied when either level says so.
    """
    wrapper = WRAPPERS[model_type]
    if not config.has("text_config"):
        tower, text_type = config, wrapper.text_type
        tower = Config(config.values, config.flag, path=config.path, ledger=config.ledger, class_defaults=class_defaults(text_type))  # fmt: skip
    else:
        named = config.within("text_config").word("model_type")
        text_type = named or wrapper.text_type
        tower = config.within("text_config", class_defaults(text_type), nested=True)
        tower = _with_tying(config, tower, wrapper)
    other = [key for key in ("vision_config", "audio_config") if config.has(key)]
    left_out = "".join(f"; {config.path}.{key} is not counted" for key in other)
    config.ledger.notes.append(f"Language tower read from {tower.path} ({text_type}){left_out}.")
    return tower, text_type


def _with_tying(config: Config, tower: Config, wrapper: Wrapper) -> Config:
    """The tower with `tie_word_embeddings` as the two levels together say it."""
    levels = [level.yes("tie_word_embeddings") for level in (config, tower) if level.has("tie_word_embeddings")]
    tied = any(levels) if levels else tower.default("tie_word_embeddings", wrapper.tied)
    values = {**tower.values, "tie_word_embeddings": tied}
    return Config(values, tower.flag, path=tower.path, ledger=tower.ledger, class_defaults=tower.class_defaults, nested=True)  # fmt: skip
