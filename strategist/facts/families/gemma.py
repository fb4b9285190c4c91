"""Gemma: tied embeddings, wide heads, from Gemma 2 on four norms per layer and sliding layers (transformers 5.23.0)."""

from __future__ import annotations

from strategist.facts.families.config import MAX_EXPERTS, MAX_FFN, MAX_HEADS, MAX_WIDTH, Config, Family
from strategist.facts.families.decoder import decoder, slides_but_every, with_experts
from strategist.facts.model import MAX_LAYERS, Heads, ModelShape, Moe, arranged, layer_sequence
from strategist.records import replace


def _gemma(config: Config) -> ModelShape:
    bias = config.yes("attention_bias")
    return decoder(config, qkv_bias=bias, o_bias=bias)


def _sliding(config: Config, period: int) -> ModelShape:
    """Four norms, and full attention in every `period`-th layer only."""
    return slides_but_every(config, replace(_gemma(config), norms_per_layer=4), period)


def _gemma2(config: Config) -> ModelShape:
    return _sliding(config, 2)


def _gemma3(config: Config) -> ModelShape:
    period = config.optional("sliding_window_pattern", high=MAX_LAYERS) or 6
    return replace(_sliding(config, period), qk_norm="head")


def _gemma4(config: Config) -> ModelShape:
    """Gemma 4 without per-layer inputs and shared caches: wider heads in full layers, experts beside the dense part."""
    config.only("hidden_size_per_layer_input", 0)
    config.only("num_kv_shared_layers", 0)
    config.only("use_double_wide_mlp", False)
    config.only("attention_bias", False)
    full_width = config.optional("global_head_dim", high=MAX_WIDTH) or config.default("global_head_dim", 512)
    shared = config.yes("attention_k_eq_v")
    full_kv = config.optional("num_global_key_value_heads", high=MAX_HEADS) if shared else None
    shape = _ending_full(replace(_sliding(config, 6), qk_norm="head"))
    if full_kv:
        config.at_most(full_kv, "num_global_key_value_heads", shape.heads, "num_attention_heads")
        config.divisible(shape.heads, "num_attention_heads", full_kv, "num_global_key_value_heads")
    full = Heads(kv_heads=full_kv or shape.kv_heads, head_dim=full_width, shared_kv=shared)
    shape = replace(shape, full_heads=full)
    return _with_parallel_experts(config, shape) if config.yes("enable_moe_block") else shape


def _ending_full(shape: ModelShape) -> ModelShape:
    """The shape whose last layer attends to everything, as transformers makes it whatever the file says."""
    *kinds, last = layer_sequence(shape)
    return arranged(shape, (*kinds, replace(last, mixer="attention")))


def _with_parallel_experts(config: Config, shape: ModelShape) -> ModelShape:
    """Every layer has experts beside its dense part, which is given as a shared expert; three more norms, two scales."""
    count, chosen = config.integer("num_experts", high=MAX_EXPERTS), config.integer("top_k_experts", high=MAX_EXPERTS)
    config.at_most(chosen, "top_k_experts", count, "num_experts")
    width = config.integer("moe_intermediate_size", high=MAX_FFN)
    config.settle()
    moe = Moe(experts=count, top_k=chosen, ffn=width, layers=shape.layers, shared_ffn=shape.ffn_hidden)
    scales = shape.hidden + count
    wider = replace(shape, norms_per_layer=shape.norms_per_layer + 3, layer_extra_parameters=scales)
    return with_experts(config, wider, moe, [True] * shape.layers)


FAMILY = Family("gemma", {"gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3, "gemma4_text": _gemma4})
