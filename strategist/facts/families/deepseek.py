"""DeepSeek and GLM mixtures: a few dense layers first, shared experts, and from V2 on latent attention.

Multi-head latent attention: DeepSeek-V2, arXiv 2405.04434, section 2.1; sparse index: DeepSeek-V3.2 (transformers 5.23.0:
models/deepseek_v32, models/glm_moe_dsa). `deepseek` is the remote-code type of DeepSeekMoE 16B (arXiv 2401.06066).
"""

from __future__ import annotations

from strategist.facts.families.config import MAX_HEADS, MAX_WIDTH, Config, Family
from strategist.facts.families.decoder import decoder, experts_beside_shared, window_of, with_experts, with_layer_types
from strategist.facts.model import MAX_LAYERS, Mla, ModelShape
from strategist.records import replace


def _after_dense(config: Config, shape: ModelShape) -> ModelShape:
    """Experts in every layer after the first `first_k_dense_replace`."""
    first = config.optional("first_k_dense_replace", high=MAX_LAYERS, low=0) or 0
    config.only("moe_layer_freq", 1)
    keys = ("n_routed_experts", "num_local_experts", "num_experts")
    moe = experts_beside_shared(config, "n_shared_experts", *keys)
    if config.optional("num_nextn_predict_layers", "num_mtp_layers", high=MAX_LAYERS, low=0):
        config.ledger.notes.append("The multi-token-prediction module is not counted.")
    return with_experts(config, shape, moe, [index >= first for index in range(shape.layers)])


def _plain(config: Config) -> ModelShape:
    bias = config.yes("attention_bias")
    return _after_dense(config, decoder(config, qkv_bias=bias, o_bias=bias))


def _glm4_moe(config: Config) -> ModelShape:
    shape = decoder(config, qkv_bias=config.yes("attention_bias"), qk_norm="head" if config.yes("use_qk_norm") else "")
    return _after_dense(config, shape)


def _dots1(config: Config) -> ModelShape:
    """dots.llm1: layers from `max_window_layers` on slide where there is a window."""
    bias = config.yes("attention_bias")
    shape = replace(decoder(config, qk_norm="head", qkv_bias=bias, o_bias=bias), window=window_of(config))
    first = config.optional("max_window_layers", high=MAX_LAYERS, low=0) or 0
    return _after_dense(config, with_layer_types(config, shape, [i >= first for i in range(shape.layers)]))


def _glm4_moe_lite(config: Config) -> ModelShape:
    """Latent attention; whatever the file says, only the first layer is dense unless `mlp_layer_types` is there."""
    config.only("first_k_dense_replace", 1)
    _only_uniform(config, "mlp_layer_types")
    return _latent(config.saying(first_k_dense_replace=1))


def _latent(config: Config) -> ModelShape:
    return _after_dense(config, with_latent_attention(config))


def with_latent_attention(config: Config) -> ModelShape:
    """A decoder of dense layers with latent attention."""
    config.only("mlp_bias", False)
    bias = config.yes("attention_bias")
    mla = Mla(
        q_lora=_query_rank(config),
        kv_lora=config.integer("kv_lora_rank", high=MAX_WIDTH),
        qk_nope=config.integer("qk_nope_head_dim", high=MAX_WIDTH),
        qk_rope=config.integer("qk_rope_head_dim", high=MAX_WIDTH),
        v_dim=config.integer("v_head_dim", high=MAX_WIDTH),
        index_heads=config.optional("index_n_heads", high=MAX_HEADS, low=0) or 0,
        index_dim=config.optional("index_head_dim", high=MAX_WIDTH, low=0) or 0,
    )
    shape = decoder(config, mla=mla, qkv_bias=bias, o_bias=bias, head_dim=mla.qk_nope + mla.qk_rope)
    return replace(shape, kv_heads=shape.heads)


def _minicpm3(config: Config) -> ModelShape:
    """MiniCPM3: dense layers with latent attention; values are as wide as hidden / heads where nothing is said."""
    hidden, heads = config.integer("hidden_size", high=MAX_WIDTH), config.integer("num_attention_heads", high=MAX_HEADS)
    config.divisible(hidden, "hidden_size", heads, "num_attention_heads")
    bias = config.yes("mlp_bias")
    said = config.saying(mlp_bias=False)
    if not config.has("v_head_dim"):
        said = said.saying(v_head_dim=config.default("v_head_dim", hidden // heads))
    return replace(with_latent_attention(said), mlp_bias=bias)


def _query_rank(config: Config) -> int:
    """`q_lora_rank`; null means a full query matrix, and so must be said."""
    if "q_lora_rank" in config.values and not config.has("q_lora_rank"):
        return 0
    return config.integer("q_lora_rank", high=MAX_WIDTH)


def _indexed(config: Config) -> ModelShape:
    """Latent attention with an index in every layer."""
    config.only("index_topk_freq", 1)
    for key in ("index_topk_pattern", "indexer_types", "mlp_layer_types"):
        _only_uniform(config, key)
    return _latent(config)


def _only_uniform(config: Config, key: str) -> None:
    """Accept a per-layer list only where it says what the class would do by itself."""
    usual = {"indexer_types": {"full"}, "index_topk_pattern": {"F"}, "mlp_layer_types": {"dense", "sparse"}}[key]
    found = config.values.get(key)
    listed = list(found) if isinstance(found, (str, list, tuple)) else [] if found is None else [None]
    if not all(isinstance(word, str) and word in usual for word in listed):
        config.refuse("CHOICE", key, "makes layers share an index; only one index per layer can be read")
    if key == "mlp_layer_types" and listed:
        first = config.optional("first_k_dense_replace", high=MAX_LAYERS, low=0) or 0
        if listed != ["dense" if i < first else "sparse" for i in range(len(listed))]:
            config.refuse("CHOICE", key, "must be dense for the first first_k_dense_replace layers and sparse after")


FAMILY = Family(
    "deepseek",
    {
        "deepseek": _plain,
        "deepseek_v2": _latent,
        "deepseek_v3": _latent,
        "kimi_k2": _latent,
        "dots1": _dots1,
        "glm4_moe_lite": _glm4_moe_lite,
        "deepseek_v32": _indexed,
        "glm_moe_dsa": _indexed,
        "glm4_moe": _glm4_moe,
        "glm4v_moe_text": _glm4_moe,
        "youtu": with_latent_attention,
        "minicpm3": _minicpm3,
    },
)
