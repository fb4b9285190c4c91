"""GPT-2 and the decoders of its generation: LayerNorm, ungated feed-forward, mostly biases, each with its own key names.

Layers as built by transformers 5.23.0 (models/<type>/modeling_*.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strategist.facts.families.config import MAX_FFN, MAX_HEADS, MAX_TOKENS, MAX_VOCAB, MAX_WIDTH, Config, Family
from strategist.facts.families.decoder import activation, checked_heads, decoder, with_layer_types
from strategist.facts.model import MAX_LAYERS, ModelShape
from strategist.records import replace

_BIASED: Mapping[str, Any] = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


def _own_keys(config: Config, width: str, layers: str, heads: str, ffn: str = "", **facts: Any) -> ModelShape:
    """A decoder whose width, depth and heads have names of their own (Llama's names are accepted as synonyms).

    `ffn` names the feed-forward width; without that key in the file, or without such a key at all, it is four widths.
    """
    hidden = config.integer(width, "hidden_size", high=MAX_WIDTH)
    count = config.integer(heads, "num_attention_heads", high=MAX_HEADS)
    common = {
        "hidden": hidden,
        "layers": config.integer(layers, "num_hidden_layers", high=MAX_LAYERS),
        "heads": count,
        "kv_heads": count,
        "ffn_hidden": (config.optional(ffn, high=MAX_FFN) if ffn else None) or 4 * hidden,
        "vocab": config.integer("vocab_size", high=MAX_VOCAB),
        "tied": config.yes("tie_word_embeddings"),
        "norm": "layernorm",
        "mlp_gated": False,
    }
    return checked_heads(config, (heads, "num_kv_heads"), 0, **common | facts)


def _gpt2(config: Config) -> ModelShape:
    config.only("add_cross_attention", False)
    rows = config.integer("n_positions", "max_position_embeddings", high=MAX_TOKENS)
    act = activation(config, "activation_function")
    return _own_keys(config, "n_embd", "n_layer", "n_head", "n_inner", pos="learned", pos_rows=rows, max_seq=rows, **act, **_BIASED)  # fmt: skip


def _gpt_bigcode(config: Config) -> ModelShape:
    """GPT-2 whose queries share one key and value head (StarCoder, SantaCoder)."""
    shape = _gpt2(config)
    return replace(shape, kv_heads=1) if config.yes("multi_query") else shape


def _gpt_neo(config: Config) -> ModelShape:
    rows = config.integer("max_position_embeddings", high=MAX_TOKENS)
    window, act = config.optional("window_size", high=MAX_TOKENS), activation(config, "activation_function")
    shape = _own_keys(
        config,
        "hidden_size",
        "num_layers",
        "num_heads",
        "intermediate_size",
        pos="learned",
        pos_rows=rows,
        max_seq=rows,
        **act,
        mlp_bias=True,
        o_bias=True,
        window=window,
    )
    return with_layer_types(config, shape, _local_layers(config, shape.layers))


def _local_layers(config: Config, layers: int) -> list[bool]:
    """`attention_types`, such as [[["global", "local"], 12]]: patterns, each with how often it is repeated."""
    given = config.values.get("attention_types")
    if given is None:
        config.default("attention_types", "global and local in turn")
        return [index % 2 == 1 for index in range(layers)]
    named = _repeated(given, layers)
    if named is None or not all(isinstance(name, str) and name in ("global", "local") for name in named):
        rule = f'must spell {layers} layers, as in [[["global", "local"], {layers // 2}]]'
        config.refuse("CHOICE", "attention_types", rule, value=type(given).__name__)
        config.settle()
    return [name == "local" for name in named or ()]


def _repeated(given: object, layers: int) -> list[object] | None:
    """The patterns written out, or None when they are malformed or do not make `layers` layers."""
    named: list[object] = []
    for item in given if isinstance(given, (list, tuple)) else [None]:
        if not isinstance(item, (list, tuple)) or len(item) != 2:
            return None
        pattern, times = item
        if not isinstance(pattern, (list, tuple)) or type(times) is not int or not 0 <= times * len(pattern) <= layers:
            return None
        named += list(pattern) * times
    return named if len(named) == layers else None


def _gptj(config: Config) -> ModelShape:
    seq = config.integer("n_positions", "max_position_embeddings", high=MAX_TOKENS)
    act = activation(config, "activation_function")
    return _own_keys(config, "n_embd", "n_layer", "n_head", "n_inner", max_seq=seq, **act, norms_per_layer=1, parallel_block=True, mlp_bias=True, lm_head_bias=True)  # fmt: skip


def _gpt_neox(config: Config) -> ModelShape:
    bias, heads = config.yes("attention_bias"), config.integer("num_attention_heads", high=MAX_HEADS)
    shape = decoder(
        config, kv_heads=heads, norm="layernorm", mlp_gated=False, mlp_bias=True, qkv_bias=bias, o_bias=bias
    )
    return replace(shape, parallel_block=config.yes("use_parallel_residual"))


def _opt(config: Config) -> ModelShape:
    positions = config.integer("max_position_embeddings", high=MAX_TOKENS)
    hidden, table = (
        config.integer("hidden_size", high=MAX_WIDTH),
        config.optional("word_embed_proj_dim", high=MAX_WIDTH),
    )
    bias, ends_with_norm = config.yes("enable_bias"), config.yes("do_layer_norm_before")
    return _own_keys(
        config,
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        ffn_hidden=config.integer("ffn_dim", high=MAX_FFN),
        emb_dim=table if table and table != hidden else 0,
        pos="learned",
        pos_rows=positions + 2,  # the table starts two rows late
        max_seq=positions,
        final_norm=ends_with_norm and not config.yes("_remove_final_layer_norm"),
        norm="layernorm" if config.yes("layer_norm_elementwise_affine") else "layernorm_nonparam",
        **activation(config, "activation_function"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def _bloom(config: Config) -> ModelShape:
    """Published files call the width `n_embed`, which wins where both stand (configuration_bloom.py, __post_init__)."""
    width = "n_embed" if config.has("n_embed") else "hidden_size"
    config = config.saying(hidden_size=config.values.get(width))
    seq = config.optional("seq_length", high=MAX_TOKENS) or config.default("seq_length", 2048)
    return _own_keys(
        config, width, "n_layer", "n_head", pos="alibi", max_seq=seq, embed_norm=True, mlp_act="gelu", **_BIASED
    )


def _mpt(config: Config) -> ModelShape:
    config.only("no_bias", True)
    config.only("expansion_ratio", 4)
    if config.has("attn_config"):
        attention = config.within("attn_config")
        for key, value in (("alibi", True), ("qk_ln", False), ("qk_gn", False), ("attn_type", "multihead_attention")):
            attention.only(key, value)
        attention.only("kv_n_heads", config.integer("n_heads", "num_attention_heads", high=MAX_HEADS))
    width, seq = config.integer("d_model", high=MAX_WIDTH), config.integer("max_seq_len", high=MAX_TOKENS)
    return _own_keys(
        config,
        "d_model",
        "n_layers",
        "n_heads",
        ffn_hidden=4 * width,
        pos="alibi",
        max_seq=seq,
        norm="layernorm_nobias",
        mlp_act="gelu",
    )


def _falcon(config: Config) -> ModelShape:
    """Falcon: one key-value head, or `num_kv_heads` of them in the new architecture; one norm for parallel blocks."""
    new, bias = config.yes("new_decoder_architecture"), config.yes("bias")
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    grouped = new or not config.yes("multi_query")
    kv = (config.optional("num_kv_heads", high=MAX_HEADS) or heads) if grouped else 1
    norms = config.optional("num_ln_in_parallel_attn", high=2) or (2 if new else 1)
    return _own_keys(
        config,
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "ffn_hidden_size",
        kv_heads=kv,
        norms_per_layer=norms if config.yes("parallel_attn") else 2,
        parallel_block=config.yes("parallel_attn"),
        max_seq=config.optional("max_position_embeddings", high=MAX_TOKENS) or 2048,
        pos="alibi" if config.yes("alibi") else "rope",
        **activation(config, "activation"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def _phi(config: Config) -> ModelShape:
    qk_norm = "head_ln" if config.yes("qk_layernorm") else ""
    return decoder(
        config,
        norm="layernorm",
        norms_per_layer=1,
        parallel_block=True,
        mlp_gated=False,
        lm_head_bias=True,
        qk_norm=qk_norm,
        **_BIASED,
    )


_OPENAI_ACTS = {
    "gelu": {"mlp_act": "gelu", "act_form": "gelu_new"},
    "relu": {"mlp_act": "relu"},
    "silu": {"mlp_act": "silu"},
    "swish": {"mlp_act": "silu"},
}
"""What the words under `afn` stand for in GPT's own table of activations (models/openai/modeling_openai.py, ACT_FNS)."""


def _openai_gpt(config: Config) -> ModelShape:
    """GPT: norms behind attention and feed-forward part, so that none follows the last layer."""
    rows = config.integer("n_positions", "max_position_embeddings", high=MAX_TOKENS)
    act = config.chosen("afn", _OPENAI_ACTS)
    return _own_keys(config, "n_embd", "n_layer", "n_head", pos="learned", pos_rows=rows, max_seq=rows, final_norm=False, **act, **_BIASED)  # fmt: skip


def _persimmon(config: Config) -> ModelShape:
    own = {"qk_norm": "head_ln" if config.yes("qk_layernorm") else ""}
    return _biased(config, ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"), "hidden_act", **own)  # fmt: skip


def _xglm(config: Config) -> ModelShape:
    """XGLM: sines of positions, computed."""
    config.only("add_cross_attention", False)
    return _biased(config, ("d_model", "num_layers", "attention_heads", "ffn_dim"), "activation_function", pos="sincos-fixed")  # fmt: skip


def _biogpt(config: Config) -> ModelShape:
    """BioGPT: learned positions, whose table starts two rows late."""
    names = "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
    shape = _biased(config, names, "hidden_act", pos="learned")
    return replace(shape, pos_rows=shape.max_seq + 2)


def _biased(config: Config, names: tuple[str, str, str, str], act: str, **facts: Any) -> ModelShape:
    """Layers with biases everywhere, whose width, number, heads and feed-forward width have these names; the last must be said."""
    width, layers, heads, ffn = names
    positions = config.integer("max_position_embeddings", high=MAX_TOKENS)
    facts |= {
        "ffn_hidden": config.integer(ffn, high=MAX_FFN),
        "max_seq": positions,
        **activation(config, act),
        **_BIASED,
    }
    return _own_keys(config, width, layers, heads, **facts)


FAMILY = Family(
    "gpt",
    {
        "gpt2": _gpt2,
        "gpt_bigcode": _gpt_bigcode,
        "gpt_neo": _gpt_neo,
        "gptj": _gptj,
        "codegen": _gptj,
        "gpt_neox": _gpt_neox,
        "opt": _opt,
        "bloom": _bloom,
        "mpt": _mpt,
        "falcon": _falcon,
        "phi": _phi,
        "openai-gpt": _openai_gpt,
        "persimmon": _persimmon,
        "xglm": _xglm,
        "biogpt": _biogpt,
    },
)
