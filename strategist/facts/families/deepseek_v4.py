"""DeepSeek-V4: latent attention without up-projection, compressors of old tokens, several residual streams.

Weights as built by transformers 5.23.0 (models/deepseek_v4/modeling_deepseek_v4.py). Compressors differ from layer to
layer; their weights are spread evenly, so that totals are exact and single layers nearly so (V4-Flash: 0.2 %).
"""

from __future__ import annotations

from strategist.facts.families.config import MAX_FFN, MAX_HEADS, MAX_TOKENS, MAX_WIDTH, Config, Family
from strategist.facts.families.decoder import decoder, experts, with_experts
from strategist.facts.model import MAX_LAYERS, Mla, ModelShape
from strategist.records import replace

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_NAMES = ("sliding_attention", _SPARSE, _HEAVY)
_BY_RATIO = {0: "sliding_attention", 4: _SPARSE, 128: _HEAVY}


def _deepseek_v4(config: Config) -> ModelShape:
    for key in ("attention_bias", "mlp_bias"):
        config.only(key, False)
    head, rope = config.integer("head_dim", high=MAX_WIDTH), config.optional("qk_rope_head_dim", high=MAX_WIDTH) or 64
    config.at_most(rope, "qk_rope_head_dim", head, "head_dim")
    mla = Mla(
        q_lora=config.integer("q_lora_rank", high=MAX_WIDTH),
        kv_lora=head - rope,
        qk_nope=head - rope,
        qk_rope=rope,
        v_dim=head,
        shared_kv=True,
        o_groups=config.integer("o_groups", high=MAX_HEADS),
        o_rank=config.integer("o_lora_rank", high=MAX_WIDTH),
    )
    config.only("n_shared_experts", 1, "transformers builds one whatever is said")
    width = config.integer("moe_intermediate_size", high=MAX_FFN)
    shape = decoder(config, mla=mla, head_dim=head, attn_sinks=True, ffn_hidden=0)
    config.divisible(shape.heads * head, "num_attention_heads", mla.o_groups, "o_groups")
    moe = experts(config, "n_routed_experts", "num_local_experts", ffn=width, shared_ffn=width)
    shape = replace(shape, window=config.optional("sliding_window", high=MAX_TOKENS), kv_heads=1)
    return _with_rest(config, with_experts(config, shape, moe, [True] * shape.layers), mla)


def _with_rest(config: Config, shape: ModelShape, mla: Mla) -> ModelShape:
    """Compressors and hyper-connections added to every layer alike; what does not divide goes to the whole model."""
    streams = config.optional("hc_mult", high=64) or 1
    mixing = (2 + streams) * streams
    connection = mixing * streams * shape.hidden + mixing + 3
    collapse = streams * streams * shape.hidden + streams + 1
    rest = shape.layers * 2 * connection + collapse + _compressors(config, shape, mla)
    per_layer = rest // shape.layers
    return replace(shape, layer_extra_parameters=per_layer, extra_parameters=rest - per_layer * shape.layers)


def _compressors(config: Config, shape: ModelShape, mla: Mla) -> int:
    """Weights of the compressors of all layers; the sparse ones carry an index each."""
    sorts = _sorts(config, shape.layers)
    rates = config.within("compress_rates") if config.has("compress_rates") else config
    sparse_rate = rates.optional(_SPARSE, "compress_rate_csa", high=MAX_TOKENS) or 4
    heavy_rate = rates.optional(_HEAVY, "compress_rate_hca", high=MAX_TOKENS) or 128
    heads, dim = config.integer("index_n_heads", high=MAX_HEADS), config.integer("index_head_dim", high=MAX_WIDTH)
    config.settle()
    index = _pooling(shape.hidden, 2 * dim, sparse_rate) + dim + mla.q_lora * heads * dim + shape.hidden * heads
    sparse = _pooling(shape.hidden, 2 * mla.v_dim, sparse_rate) + mla.v_dim + index
    heavy = _pooling(shape.hidden, mla.v_dim, heavy_rate) + mla.v_dim
    return sorts.count(_SPARSE) * sparse + sorts.count(_HEAVY) * heavy


def _pooling(hidden: int, width: int, rate: int) -> int:
    """Value and gate maps, and one bias per position of the window that is pooled."""
    return 2 * hidden * width + rate * width


def _sorts(config: Config, layers: int) -> list[str]:
    """The sort of every layer: `layer_types`, or the older `compress_ratios`, or the class's own order."""
    named = config.list_of(str, "layer_types", limit=MAX_LAYERS)
    ratios = config.list_of(int, "compress_ratios", limit=MAX_LAYERS)
    if named is None and ratios is not None:
        named = [_BY_RATIO.get(ratio, "") for ratio in ratios[:layers]]
    if named is None:
        config.default("layer_types", "two heavily compressed layers, then heavy and sparse in turn")
        named = [_HEAVY if i < 2 or i % 2 == 0 else _SPARSE for i in range(layers)]
    if len(named) != layers or not set(named) <= set(_NAMES):
        config.refuse("CHOICE", "layer_types", f"must name {layers} layers", hint=f"Known: {', '.join(_NAMES)}.")
    return named


FAMILY = Family("deepseek v4", {"deepseek_v4": _deepseek_v4})
