"""Qwen 2 and 3, dense and with experts, and the language towers of their vision-language models (transformers 5.23.0)."""

from __future__ import annotations

from strategist.facts.families.config import MAX_FFN, Config, Family
from strategist.facts.families.decoder import (
    decoder,
    experts,
    shared_gated_experts,
    slides_everywhere,
    sparse_steps,
    window_of,
    with_experts,
    with_layer_types,
)
from strategist.facts.model import MAX_LAYERS, ModelShape
from strategist.records import replace


def _slides_at_the_end(config: Config, shape: ModelShape) -> ModelShape:
    """Layers from `max_window_layers` on slide, if sliding is switched on at all."""
    if not config.yes("use_sliding_window"):
        return shape
    first = config.optional("max_window_layers", high=MAX_LAYERS, low=0) or 0
    windowed = replace(shape, window=window_of(config))
    return with_layer_types(config, windowed, [i >= first for i in range(shape.layers)])


def _qwen2(config: Config) -> ModelShape:
    return _slides_at_the_end(config, decoder(config, qkv_bias=True))


def _qwen3(config: Config) -> ModelShape:
    bias = config.yes("attention_bias")
    return _slides_at_the_end(config, decoder(config, qk_norm="head", qkv_bias=bias, o_bias=bias))


def _qwen2_moe(config: Config) -> ModelShape:
    shape = decoder(config, qkv_bias=config.yes("qkv_bias"))
    moe = shared_gated_experts(config)
    if config.yes("use_sliding_window"):
        until = config.optional("max_window_layers", high=MAX_LAYERS, low=0) or 0
        slides = [(i + 1) % 2 == 1 and i < until for i in range(shape.layers)]
        shape = with_layer_types(config, replace(shape, window=window_of(config)), slides)
    return with_experts(config, shape, moe, sparse_steps(config, shape.layers))


def _qwen3_moe(config: Config) -> ModelShape:
    bias = config.yes("attention_bias")
    shape = decoder(config, qk_norm="head", qkv_bias=bias, o_bias=bias)
    if config.yes("use_sliding_window"):
        shape = slides_everywhere(config, shape)
    width = config.integer("moe_intermediate_size", high=MAX_FFN)
    moe = experts(config, "num_experts", "num_local_experts", ffn=width)
    return with_experts(config, shape, moe, sparse_steps(config, shape.layers))


FAMILY = Family(
    "qwen",
    {
        "qwen2": _qwen2,
        "qwen2_vl_text": _qwen2,
        "qwen2_5_vl_text": _qwen2,
        "qwen2_moe": _qwen2_moe,
        "qwen3": _qwen3,
        "qwen3_vl_text": _qwen3,
        "qwen3_moe": _qwen3_moe,
        "qwen3_vl_moe_text": _qwen3_moe,
    },
)
