"""Llama and the decoders that differ from it in one or two choices (transformers 5.23.0: models/<type>/modeling_*.py)."""

from __future__ import annotations

from strategist.facts.families.config import Config, Family
from strategist.facts.families.decoder import decoder, slides_everywhere, window_of, with_layer_types
from strategist.facts.model import ModelShape
from strategist.records import replace


def _llama(config: Config) -> ModelShape:
    bias = config.yes("attention_bias")
    return decoder(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.yes("mlp_bias"))


def _sliding_everywhere(config: Config) -> ModelShape:
    """Mistral and Phi-3: every layer slides when a window is given."""
    return slides_everywhere(config, decoder(config))


def _smollm3(config: Config) -> ModelShape:
    shape = replace(_llama(config), window=window_of(config) if config.yes("use_sliding_window") else None)
    interval = config.optional("no_rope_layer_interval", high=shape.layers) or 4
    slides = [(i + 1) % interval == 0 for i in range(shape.layers)]
    return with_layer_types(config, shape, slides)


def _glm(config: Config) -> ModelShape:
    return decoder(config, qkv_bias=config.yes("attention_bias"))


def _olmo(config: Config) -> ModelShape:
    return replace(_llama(config), norm="layernorm_nonparam")


def _olmo2(config: Config) -> ModelShape:
    return replace(_llama(config), qk_norm="full")


def _cohere(config: Config) -> ModelShape:
    shape = replace(_llama(config), norm="layernorm_nobias", norms_per_layer=1)
    return replace(shape, qk_norm="per_head") if config.yes("use_qk_norm") else shape


def _nemotron(config: Config) -> ModelShape:
    return replace(_llama(config), norm="layernorm", mlp_gated=False)


def _starcoder2(config: Config) -> ModelShape:
    bias = config.yes("use_bias")
    shape = decoder(config, norm="layernorm", mlp_gated=False, qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    return slides_everywhere(config, shape)


FAMILY = Family(
    "llama",
    {
        "llama": _llama,
        "mistral": _sliding_everywhere,
        "phi3": _sliding_everywhere,
        "granite": _llama,
        "smollm3": _smollm3,
        "glm": _glm,
        "olmo": _olmo,
        "olmo2": _olmo2,
        "cohere": _cohere,
        "nemotron": _nemotron,
        "starcoder2": _starcoder2,
    },
)
