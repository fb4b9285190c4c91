"""Vision-language configurations: which part of them describes the language tower, and what is said about the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from strategist.facts.families.config import Config, class_defaults
from strategist.records import dataclass


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A composite `model_type`: the text type its class falls back to, and what ties the output head to the table.

    `key` is where the text part stands. `ties` names the level whose `tie_word_embeddings` decides; an absent one is `tied` (transformers 5.23.0, whose
    composite models were built without weights for every combination of the two levels).
    """

    text_type: str
    ties: Literal["top", "text", "either"] = "top"
    tied: bool = False
    key: str = "text_config"


WRAPPERS: Mapping[str, Wrapper] = {
    "aya_vision": Wrapper("cohere2", tied=True),
    "cohere2_vision": Wrapper("cohere2", tied=True),
    "deepseek_vl": Wrapper("llama", tied=True),
    "exaone4_5": Wrapper("exaone4"),
    "gemma3": Wrapper("gemma3_text", tied=True),
    "gemma4": Wrapper("gemma4_text", tied=True),
    "glm4v": Wrapper("glm4v_text", "either"),
    "glm46v": Wrapper("glm4v_text"),
    "glm4v_moe": Wrapper("glm4v_moe_text", "either"),
    "got_ocr2": Wrapper("qwen2", tied=True),
    "idefics2": Wrapper("mistral"),
    "idefics3": Wrapper("llama"),
    "internvl": Wrapper("qwen2", tied=True),
    "internvl_chat": Wrapper("qwen2", "text", key="llm_config"),
    "kimi_k25": Wrapper("deepseek_v3", tied=True),
    "kimi_vl": Wrapper("deepseek_v3", "text"),
    "lighton_ocr": Wrapper("qwen3", tied=True),
    "llama4": Wrapper("llama4_text", "text"),
    "llava": Wrapper("llama", "either"),
    "llava_next": Wrapper("llama"),
    "llava_next_video": Wrapper("llama", "either"),
    "llava_onevision": Wrapper("qwen2", "either"),
    "mistral3": Wrapper("mistral", tied=True),
    "paligemma": Wrapper("gemma", tied=True),
    "qwen2_vl": Wrapper("qwen2_vl_text", "either"),
    "qwen2_5_vl": Wrapper("qwen2_5_vl_text", "either"),
    "qwen3_vl": Wrapper("qwen3_vl_text"),
    "qwen3_vl_moe": Wrapper("qwen3_vl_moe_text"),
    "qwen3_5": Wrapper("qwen3_5_text"),
    "qwen3_5_moe": Wrapper("qwen3_5_moe_text"),
    "smolvlm": Wrapper("llama"),
    "video_llama_3": Wrapper("qwen2", "either"),
    "video_llava": Wrapper("llama"),
    "vipllava": Wrapper("llama"),
}
"""`internvl_chat` and `kimi_vl` are published with code of their own, which hands the text part to its own class, with its own word of the
table (OpenGVLab/InternVL3-8B modeling_internvl_chat.py, moonshotai/Kimi-VL-A3B-Instruct modeling_kimi_vl.py)."""


def language_tower(config: Config, model_type: str) -> tuple[Config, str]:
    """The part of a composite configuration that describes its language tower, and that part's own model_type.

    Old Qwen2-VL files have the text keys at the top level.
    """
    wrapper = WRAPPERS[model_type]
    if config.has(wrapper.key):
        text_type = config.within(wrapper.key).word("model_type") or wrapper.text_type
        tower = config.within(wrapper.key, class_defaults(text_type), nested=True)
    else:
        text_type = wrapper.text_type
        tower = Config(config.values, config.flag, ledger=config.ledger, class_defaults=class_defaults(text_type))
    left_out = [f"{config.path}.{key}" for key in ("vision_config", "audio_config") if config.has(key)]
    not_counted = f"; {' and '.join(left_out)} not counted" if left_out else ""
    config.ledger.notes.append(f"Language tower read from {tower.path} ({text_type}){not_counted}.")
    return _with_tying(config, tower, wrapper), text_type


def _with_tying(config: Config, tower: Config, wrapper: Wrapper) -> Config:
    """The tower with `tie_word_embeddings` as the deciding level says it."""
    deciding = {"top": (config,), "text": (tower,), "either": (config, tower)}[wrapper.ties]
    said = [level.yes("tie_word_embeddings") for level in deciding if level.has("tie_word_embeddings")]
    tied = any(said) if said else deciding[0].default("tie_word_embeddings", wrapper.tied)
    return tower.saying(tie_word_embeddings=tied)
