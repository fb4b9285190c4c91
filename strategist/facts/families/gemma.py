"""Gemma: tied embeddings, wide heads, from Gemma 2 on four norms per layer and sliding layers (transformers 5.23.0)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def _vaultgemma(config: Config) -> ModelShape:
    return slides_but_every(config, _gemma(config), 2)


def _gemma3(config: Config) -> ModelShape:
    period = config.optional("sliding_window_pattern", high=MAX_LAYERS) or 6
    return replace(_sliding(config, period), qk_norm="head")


def _gemma4(config: Config) -> ModelShape:
    """Gemma 4 without per-layer inputs and shared caches: wider heads in full layers, experts beside the dense part."""
    config.only("hidden_size_per_layer_input", 0)
    config.only("num_kv_shared_layers", 0)
    config.only("use_double_wide_mlp", False)
    config.only("attention_bias", False)
    shape = _ending_full(replace(_sliding(config, 6), qk_norm="head"))
    shape = replace(shape, full_heads=_full_heads(config, shape))
    return _with_parallel_experts(config, shape) if config.yes("enable_moe_block") else shape


def _full_heads(config: Config, shape: ModelShape) -> Heads:
    """The heads of full-attention layers: by keys of their own in published files, layer by layer in files that transformers 5
    wrote anew (`per_layer_config`)."""
    shared = config.yes("attention_k_eq_v")
    said = _of_full_layers(config, shape) if "per_layer_config" in config.values else None
    if said is not None:
        width = said.optional("head_dim", high=MAX_WIDTH) or shape.head_dim
        kv = said.optional("num_key_value_heads", high=MAX_HEADS)
    else:
        width = config.optional("global_head_dim", high=MAX_WIDTH) or config.default("global_head_dim", 512)
        kv = config.optional("num_global_key_value_heads", high=MAX_HEADS) if shared else None
    if kv:
        config.at_most(kv, "num_global_key_value_heads", shape.heads, "num_attention_heads")
        config.divisible(shape.heads, "num_attention_heads", kv, "num_global_key_value_heads")
    return Heads(kv_heads=kv or shape.kv_heads, head_dim=width, shared_kv=shared)


def _of_full_layers(config: Config, shape: ModelShape) -> Config:
    """What `per_layer_config` says of the full-attention layers; it must be the same for all of them, and nothing of others."""
    found = config.values.get("per_layer_config") or {}
    full = {str(i) for i, kind in enumerate(layer_sequence(shape)) if kind.mixer == "attention"}
    given = {str(index): said for index, said in found.items()} if isinstance(found, Mapping) else {}
    first: Any = next(iter(given.values()), {})
    is_known = isinstance(first, Mapping) and set(first) <= {"head_dim", "num_key_value_heads"}
    if not isinstance(found, Mapping) or not is_known or (given and given != dict.fromkeys(full, first)):
        rule = "must give all layers of full attention the same head_dim and num_key_value_heads, and others nothing"
        config.refuse("CHOICE", "per_layer_config", rule)
        config.settle()
    return Config(first, config.flag, path=f"{config.path}.per_layer_config", ledger=config.ledger)


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


FAMILY = Family(
    "gemma",
    {"gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3, "gemma4_text": _gemma4, "vaultgemma": _vaultgemma},
)
