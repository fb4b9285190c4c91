"""Gemma 1 to 3: tied embeddings, wide heads, from Gemma 2 on four norms per layer and sliding layers (transformers 5.23.0)."""

from __future__ import annotations

from dataclasses import replace

from strategist.facts.families.config import Config, Family
from strategist.facts.families.decoder import decoder, window_of, with_layer_types
from strategist.facts.model import MAX_LAYERS, ModelShape


def _gemma(config: Config) -> ModelShape:
    bias = config.yes("attention_bias")
    return decoder(config, qkv_bias=bias, o_bias=bias)


def _sliding(config: Config, period: int) -> ModelShape:
    """Four norms, and full attention in every `period`-th layer only."""
    shape = replace(_gemma(config), norms_per_layer=4, window=window_of(config))
    slides = [(i + 1) % period != 0 for i in range(shape.layers)]
    return with_layer_types(config, shape, slides)


def _gemma2(config: Config) -> ModelShape:
    return _sliding(config, 2)


def _gemma3(config: Config) -> ModelShape:
    period = config.optional("sliding_window_pattern", high=MAX_LAYERS) or 6
    return replace(_sliding(config, period), qk_norm="head")


FAMILY = Family("gemma", {"gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3})
