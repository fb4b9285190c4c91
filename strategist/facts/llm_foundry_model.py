"""The model that llm-foundry builds itself, MPT. As in llm-foundry 0.22.0: names and what is taken where they are absent in
llmfoundry/models/mpt/configuration_mpt.py and utils/config_defaults.py, layers in models/layers. Published MPT models have no biases and
ALiBi; what llm-foundry builds unasked has biases and learned positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strategist.errors import shown
from strategist.facts.families.config import MAX_FFN, MAX_HEADS, MAX_TOKENS, MAX_VOCAB, MAX_WIDTH, Config
from strategist.facts.families.decoder import checked_heads
from strategist.facts.model import MAX_LAYERS, ModelShape, Norm, Position
from strategist.facts.sizes import of_bearable_size
from strategist.records import replace

DEFAULTS: Mapping[str, Any] = {
    "d_model": 2048,
    "max_seq_len": 2048,
    "n_heads": 16,
    "n_layers": 24,
    "norm_type": "low_precision_layernorm",
    "tie_word_embeddings": True,
    "vocab_size": 50368,
    "learned_pos_emb": True,
}
ATTENTION = {"attn_type": "multihead_attention"}
FFN = {"ffn_type": "mptmlp"}
KINDS = ("multihead_attention", "multiquery_attention", "grouped_query_attention")
IS_GATED = {"mptmlp": False, "mptglu": True}
NORMS: Mapping[str, Norm] = {
    "layernorm": "layernorm",
    "low_precision_layernorm": "layernorm",
    "rmsnorm": "rmsnorm",
    "low_precision_rmsnorm": "rmsnorm",
    "triton_rmsnorm": "rmsnorm",
}
NAME = "mpt_causal_lm"
"""What a configuration calls such a model."""


def shape_from_mpt(values: Mapping[str, Any], flag: str, path: str) -> ModelShape:
    """The decoder that the section `path` of a configuration describes.

    Raises InputError TYPE, TOO_SMALL, TOO_LARGE, RANGE, CHOICE and DIVISIBILITY with the place; more problems are in `also`.
    """
    given = {"attn_config": {}, "ffn_config": {}} | {key: value for key, value in values.items() if value is not None}
    config = Config(given, flag, path=path, class_defaults=DEFAULTS, nested=True)
    attention = config.within("attn_config", ATTENTION, nested=True)
    if config.has("block_overrides"):
        config.refuse(
            "CHOICE", "block_overrides", "makes layers that are not read", hint="Name the model with --model."
        )
    for name in ("qk_ln", "qk_gn"):
        attention.only(name, False)
    heads, max_seq = config.integer("n_heads", high=MAX_HEADS), config.integer("max_seq_len", high=MAX_TOKENS)
    hidden, has_biases = config.integer("d_model", high=MAX_WIDTH), not config.yes("no_bias")
    norm, pos = config.chosen("norm_type", NORMS), _position(config, attention)
    window = _window(attention)
    shape = checked_heads(
        config,
        ("n_heads", "attn_config.kv_n_heads"),
        config.optional("head_dim", high=MAX_WIDTH) or 0,
        layers=config.integer("n_layers", high=MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(attention, heads),
        vocab=config.integer("vocab_size", high=MAX_VOCAB),
        tied=config.yes("tie_word_embeddings"),
        max_seq=max_seq,
        pos=pos,
        pos_rows=max_seq if pos == "learned" else 0,
        norm="layernorm_nobias" if norm == "layernorm" and not has_biases else norm,
        mlp_bias=has_biases,
        o_bias=has_biases,
        qkv_bias=config.yes("attention_bias") if config.has("attention_bias") else has_biases,
        **_feed_forward(config, hidden),
        **({} if window is None else {"window": window, "full_every": 0}),
    )
    named = replace(shape, name="mpt", family="mpt", source=f"llm-foundry's model given with {flag}")
    return of_bearable_size(named, flag)


def _position(config: Config, attention: Config) -> Position:
    """ALiBi or rotation where attention has it; else learned ones, or none."""
    if attention.yes("alibi"):
        return "alibi"
    if attention.yes("rope"):
        return "rope"
    return "learned" if config.yes("learned_pos_emb") else "none"


def _kv_heads(attention: Config, heads: int) -> int:
    """Heads of keys and values: one for each of queries, one for all, or a number that only the third kind has."""
    kind = attention.chosen("attn_type", {word: word for word in KINDS})
    if kind == "grouped_query_attention":
        return attention.integer("kv_n_heads", high=MAX_HEADS)
    return 1 if kind == "multiquery_attention" else heads


def _window(attention: Config) -> int | None:
    """Tokens that a query sees; None for all, which -1 stands for."""
    return None if attention.values.get("sliding_window_size") == -1 else attention.optional("sliding_window_size", high=MAX_TOKENS)  # fmt: skip


def _feed_forward(config: Config, hidden: int) -> dict[str, Any]:
    """Width, gate and activation."""
    ffn = config.within("ffn_config", FFN, nested=True)
    act = ffn.values.get("ffn_act_fn")
    word = str(act.get("name")) if isinstance(act, Mapping) else "gelu"
    if word not in ("gelu", "silu", "relu", "quick_gelu"):
        ffn.refuse("CHOICE", "ffn_act_fn", f"is {shown(word)!r}, which is not read", value=word)
    return {
        "mlp_gated": ffn.chosen("ffn_type", IS_GATED),
        "mlp_act": word,
        "ffn_hidden": ffn.optional("ffn_hidden_size", high=MAX_FFN) or _expanded(config, hidden),
    }


def _expanded(config: Config, hidden: int) -> int:
    """The width times `expansion_ratio`, which must make a whole number."""
    ratio = config.values.get("expansion_ratio", 4)
    width = ratio * hidden if isinstance(ratio, (int, float)) else 0
    if not 1 <= width <= MAX_FFN or width != int(width):
        config.refuse("RANGE", "expansion_ratio", f"must make a whole width of 1 to {MAX_FFN} of d_model", value=ratio)
        return hidden
    return int(width)
