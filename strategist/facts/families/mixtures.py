"""Mixture-of-experts decoders with ordinary attention (transformers 5.23.0; Grok-1: xai-org/grok-1 run.py, model.py)."""

from __future__ import annotations

from strategist.facts.families.config import (
    MAX_FFN,
    MAX_HEADS,
    MAX_TOKENS,
    MAX_VOCAB,
    MAX_WIDTH,
    Config,
    Family,
)
from strategist.facts.families.decoder import (
    checked_heads,
    decoder,
    experts,
    experts_beside_shared,
    first_dense,
    slides_but_every,
    slides_by_pattern,
    slides_everywhere,
    window_of,
    with_experts,
    with_layer_types,
)
from strategist.facts.model import MAX_LAYERS, Heads, ModelShape, Moe
from strategist.records import replace


def _everywhere(config: Config, shape: ModelShape, moe: Moe) -> ModelShape:
    return with_experts(config, shape, moe, [True] * shape.layers)


def _mixtral(config: Config) -> ModelShape:
    shape = slides_everywhere(config, decoder(config))
    return _everywhere(config, shape, experts(config, "num_local_experts", "num_experts", ffn=shape.ffn_hidden))


def _phimoe(config: Config) -> ModelShape:
    bias, head_bias = config.yes("attention_bias"), config.yes("lm_head_bias")
    shape = decoder(config, norm="layernorm", qkv_bias=bias, o_bias=bias, lm_head_bias=head_bias)
    moe = experts(config, "num_local_experts", ffn=shape.ffn_hidden)
    return _everywhere(config, slides_everywhere(config, shape), moe)


def _olmoe(config: Config) -> ModelShape:
    bias = config.yes("attention_bias")
    shape = decoder(config, qk_norm="full", qkv_bias=bias, o_bias=bias)
    return _everywhere(config, shape, experts(config, "num_experts", "num_local_experts", ffn=shape.ffn_hidden))


def _minimax_m2(config: Config) -> ModelShape:
    config.only("use_qk_norm", True)
    shape = decoder(config, qk_norm="full")
    return _everywhere(config, shape, experts(config, "num_local_experts", "num_experts", ffn=shape.ffn_hidden))


def _granite_moe(config: Config) -> ModelShape:
    """Granite's mixtures; `shared_intermediate_size` is the width of what every token uses beside them, 0 for none."""
    bias = config.yes("attention_bias")
    shape = decoder(config, qkv_bias=bias, o_bias=bias)
    shared = config.optional("shared_intermediate_size", high=MAX_FFN, low=0) or 0
    return _everywhere(config, shape, experts(config, "num_local_experts", ffn=shape.ffn_hidden, shared_ffn=shared))


def _solar_open(config: Config) -> ModelShape:
    shape = decoder(config, qkv_bias=config.yes("attention_bias"), ffn_hidden=0)
    moe = experts_beside_shared(config, "n_shared_experts", "n_routed_experts", "num_local_experts")
    return _everywhere(config, shape, moe)


def _exaone_moe(config: Config) -> ModelShape:
    shape = slides_by_pattern(config, decoder(config, qk_norm="head"))
    moe = experts_beside_shared(config, "num_shared_experts", "num_experts", "num_local_experts")
    return with_experts(config, shape, moe, first_dense(config, shape.layers))


def _hy_v3(config: Config) -> ModelShape:
    """Hunyuan V3: the first layer is dense unless `mlp_layer_types` says."""
    config.only("first_k_dense_replace", 1)
    config.only("mlp_bias", False)
    bias = config.yes("attention_bias")
    shape = decoder(config, qk_norm="head", qkv_bias=bias, o_bias=bias)
    moe = experts_beside_shared(config, "num_shared_experts", "num_experts", "num_local_experts")
    return with_experts(config, shape, moe, first_dense(config.saying(first_k_dense_replace=1), shape.layers))


def _mellum(config: Config) -> ModelShape:
    bias = config.yes("attention_bias")
    config.only("num_mtp_layers", 0)
    shape = replace(decoder(config, qk_norm="head", qkv_bias=bias, o_bias=bias), window=window_of(config))
    shape = with_layer_types(config, shape, [False] * shape.layers)
    width = config.integer("moe_intermediate_size", high=MAX_FFN)
    moe = experts(config, "num_experts", "num_local_experts", ffn=width)
    return with_experts(config, shape, moe, first_dense(config, shape.layers))


def _ernie_moe(config: Config) -> ModelShape:
    """ERNIE 4.5: experts in every `moe_layer_interval`-th layer from a first to a last; a correction of their scores."""
    config.only("use_bias", False)
    shape = decoder(config)
    moe = experts_beside_shared(
        config, "moe_num_shared_experts", "moe_num_experts", chosen_key="moe_k", router_bias=True
    )
    step = config.optional("moe_layer_interval", high=MAX_LAYERS) or 1
    first = config.optional("moe_layer_start_index", high=MAX_LAYERS, low=0) or 0
    last = config.optional("moe_layer_end_index", high=MAX_LAYERS, low=-1)
    end = shape.layers - 1 if last in (None, -1) else last
    return with_experts(config, shape, moe, [(i + 1) % step == 0 and first <= i <= end for i in range(shape.layers)])


def _hunyuan_moe(config: Config) -> ModelShape:
    """Hunyuan V1: every layer has experts beside a dense part of their width; lists must say the same of all layers."""
    bias = config.yes("attention_bias")
    config.only("use_qk_norm", True)
    same = _uniform(config, "num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size")
    same.only("num_shared_expert", 1)
    shape = decoder(same, qk_norm="head", qkv_bias=bias, o_bias=bias)
    same.only("moe_intermediate_size", shape.ffn_hidden)
    moe = experts(same, "num_experts", chosen_key="moe_topk", ffn=shape.ffn_hidden, shared_ffn=shape.ffn_hidden)
    return _everywhere(same, shape, moe)


def _uniform(config: Config, *keys: str) -> Config:
    """The configuration with lists under `keys` that repeat one number replaced by that number."""
    lists = {
        key: config.list_of(int, key, limit=MAX_LAYERS) for key in keys if isinstance(config.values.get(key), list)
    }
    for key, values in lists.items():
        if values is not None and len(set(values)) != 1:
            config.refuse("CHOICE", key, "differs between layers; only one number for all layers can be read")
    config.settle()
    found = {key: values[0] for key, values in lists.items() if values}
    return config.saying(**found)


def _grok(config: Config) -> ModelShape:
    shape = replace(decoder(config, norms_per_layer=4), mlp_act="gelu")
    return _everywhere(config, shape, experts(config, "num_experts", ffn=shape.ffn_hidden))


def _gpt_oss(config: Config) -> ModelShape:
    """Biases everywhere, one sink per head, a clamped gated activation; every other layer slides."""
    bias = config.yes("attention_bias")
    shape = decoder(config, qkv_bias=bias, o_bias=bias, attn_sinks=True, window=window_of(config))
    slides = [(i + 1) % 2 == 1 for i in range(shape.layers)]
    shape = replace(with_layer_types(config, shape, slides), mlp_act="swiglu_clamped")
    moe = experts(config, "num_local_experts", "num_experts", ffn=shape.ffn_hidden, router_bias=True, expert_bias=True)
    return _everywhere(config, shape, moe)


def _dbrx(config: Config) -> ModelShape:
    attention, ffn = config.within("attn_config"), config.within("ffn_config")
    count, chosen = ffn.integer("moe_num_experts", high=2**16), ffn.integer("moe_top_k", high=2**16)
    ffn.at_most(chosen, "moe_top_k", count, "moe_num_experts")
    width = ffn.integer("ffn_hidden_size", high=MAX_FFN)
    shape = checked_heads(
        config,
        ("n_heads", "attn_config.kv_n_heads"),
        0,
        layers=config.integer("n_layers", "num_hidden_layers", high=MAX_LAYERS),
        hidden=config.integer("d_model", "hidden_size", high=MAX_WIDTH),
        heads=config.integer("n_heads", "num_attention_heads", high=MAX_HEADS),
        kv_heads=attention.integer("kv_n_heads", high=MAX_HEADS),
        vocab=config.integer("vocab_size", high=MAX_VOCAB),
        max_seq=config.integer("max_seq_len", "max_position_embeddings", high=MAX_TOKENS),
        tied=config.yes("tie_word_embeddings"),
        norm="layernorm_nobias",
    )
    return _everywhere(config, shape, Moe(experts=count, top_k=chosen, ffn=width, layers=shape.layers))


def _llama4(config: Config) -> ModelShape:
    """Llama 4: chunked attention in three layers of four, experts in every n-th layer beside one shared expert."""
    bias, width = config.yes("attention_bias"), config.integer("intermediate_size", high=MAX_FFN)
    shape = decoder(
        config,
        qkv_bias=bias,
        o_bias=bias,
        ffn_hidden=config.integer("intermediate_size_mlp", high=MAX_FFN),
        window=config.optional("attention_chunk_size", high=MAX_TOKENS),
        qk_norm="l2_noweight" if config.yes("use_qk_norm") else "",
    )
    interval = config.optional("no_rope_layer_interval", high=MAX_LAYERS) or 4
    chunked = [(i + 1) % interval != 0 for i in range(shape.layers)]
    shape = with_layer_types(config, shape, chunked)
    moe = experts(config, "num_local_experts", "num_experts", ffn=width, shared_ffn=width)
    return with_experts(config, shape, moe, _every_nth(config, shape.layers))


def _every_nth(config: Config, layers: int) -> list[bool]:
    named = config.list_of(int, "moe_layers", limit=MAX_LAYERS)
    step = config.optional("interleave_moe_layer_step", high=MAX_LAYERS) or 1
    return [(i + 1) % step == 0 if named is None else i in set(named) for i in range(layers)]


def _mimo_v2(config: Config) -> ModelShape:
    """MiMo-V2: sliding layers with twice the key-value heads and a sink per head; the first layer is dense."""
    config.only("attention_bias", False)
    shape = decoder(config, attn_sinks=True, window=_mimo_window(config), v_dim=config.integer("v_head_dim", high=MAX_WIDTH))  # fmt: skip
    sliding_kv = config.optional("swa_num_key_value_heads", high=MAX_HEADS) or 2 * shape.kv_heads
    config.at_most(sliding_kv, "swa_num_key_value_heads", shape.heads, "num_attention_heads")
    full = Heads(kv_heads=shape.kv_heads, head_dim=shape.head_dim)
    slides = [i != 0 and (i + 1) % 6 != 0 for i in range(shape.layers)]
    shape = with_layer_types(config, replace(shape, kv_heads=sliding_kv, full_heads=full), slides)
    moe = experts(config, "n_routed_experts", "num_local_experts", ffn=config.integer("moe_intermediate_size", high=MAX_FFN))  # fmt: skip
    return with_experts(config, shape, moe, _mimo_experts(config, shape.layers))


def _mimo_window(config: Config) -> int | None:
    return config.optional("sliding_window_size", "sliding_window", high=MAX_TOKENS)


def _mimo_experts(config: Config, layers: int) -> list[bool]:
    """`mlp_layer_types`, or the older `moe_layer_freq` (1 where a layer has experts), or all but the first layer."""
    named = config.list_of(str, "mlp_layer_types", limit=MAX_LAYERS)
    marks = config.list_of(int, "moe_layer_freq", limit=MAX_LAYERS)
    placed = [i > 0 for i in range(layers)]
    if named is not None:
        placed = [word == "sparse" for word in named]
    elif marks is not None:
        placed = [mark == 1 for mark in marks]
    if len(placed) != layers:
        key = "mlp_layer_types" if named is not None else "moe_layer_freq"
        config.refuse("RANGE", key, f"has {len(placed)} entries for {layers} layers", hint="Give one entry per layer.")
        config.settle()
    return placed


def _granite_moe_swa(config: Config) -> ModelShape:
    """Granite's mixtures with a sink per head; the first of every four layers attends to everything."""
    shape = _granite_moe(config)
    return slides_but_every(config, replace(shape, attn_sinks=True), 4, 0)


def _afmoe(config: Config) -> ModelShape:
    """AFMoE (Trinity): four norms, gates on what attention gives, experts behind the first `num_dense_layers`, chosen by sigmoids of
    their scores with a correction for each expert."""
    config.only("attention_bias", False)  # the gate would have none
    shape = decoder(config, norms_per_layer=4, qk_norm="head", attn_gate=True)
    shape = slides_but_every(config, shape, config.optional("global_attn_every_n_layers", high=MAX_LAYERS) or 1)
    moe = experts_beside_shared(config, "num_shared_experts", "num_experts", "num_local_experts", router_bias=True)
    first = config.optional("num_dense_layers", high=MAX_LAYERS, low=0) or 0
    return with_experts(config, shape, moe, [index >= first for index in range(shape.layers)])


FAMILY = Family(
    "mixtures of experts",
    {
        "mixtral": _mixtral,
        "phimoe": _phimoe,
        "olmoe": _olmoe,
        "flex_olmo": _olmoe,
        "granitemoe": _granite_moe,
        "granitemoeshared": _granite_moe,
        "solar_open": _solar_open,
        "exaone_moe": _exaone_moe,
        "ernie4_5_moe": _ernie_moe,
        "hunyuan_v1_moe": _hunyuan_moe,
        "minimax_m2": _minimax_m2,
        "grok-1": _grok,
        "gpt_oss": _gpt_oss,
        "dbrx": _dbrx,
        "llama4_text": _llama4,
        "mimo_v2_flash": _mimo_v2,
        "hy_v3": _hy_v3,
        "mellum": _mellum,
        "granitemoe_swa": _granite_moe_swa,
        "afmoe": _afmoe,
    },
)
