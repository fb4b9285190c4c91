"""Jamba, Nemotron-H, Granite 4, Bamba, LFM2, MiniMax-01, Qwen3-Next and Qwen3.5: attention layers among state-space or linear ones (transformers 5.23.0)."""

from __future__ import annotations

from collections.abc import Sequence

from strategist.facts.families.config import MAX_EXPERTS, MAX_FFN, MAX_HEADS, MAX_TOKENS, MAX_WIDTH, Config, Family
from strategist.facts.families.decoder import (
    decoder,
    experts,
    experts_beside_shared,
    first_dense,
    layer_types,
    shared_gated_experts,
    sparse_steps,
    with_experts,
)
from strategist.facts.families.deepseek import with_latent_attention
from strategist.facts.families.state_space import rank_of
from strategist.facts.layer_kind import Ffn, LayerKind, Mixer
from strategist.facts.model import MAX_LAYERS, Mix, ModelShape, Moe, Ssm, arranged
from strategist.records import replace


def _mixed(shape: ModelShape, ssm: Ssm, moe: Moe | None, kinds: Sequence[LayerKind]) -> ModelShape:
    """The shape stacking exactly these layers."""
    mixers, ffns = [kind.mixer for kind in kinds], [kind.ffn for kind in kinds]
    attention = mixers.count("attention") + mixers.count("mla")
    with_experts, mlp = ffns.count("moe"), ffns.count("dense")
    linear = mixers.count(ssm.kind)
    mix = Mix(attention=attention, linear=linear, mlp=mlp, moe=with_experts, norms=attention + linear + with_experts + mlp)  # fmt: skip
    placed = replace(moe, layers=with_experts) if moe is not None and with_experts else None
    full = replace(shape, kind="hybrid", formula="hybrid", layers=len(kinds), ssm=ssm, mix=mix, moe=placed)
    return arranged(replace(full, ffn_hidden=shape.ffn_hidden if mlp else 0), kinds)


def _jamba(config: Config) -> ModelShape:
    config.only("mamba_conv_bias", True)
    config.only("mamba_proj_bias", False)
    ssm = Ssm(
        kind="mamba1",
        conv=config.integer("mamba_d_conv", high=1024),
        expand=config.integer("mamba_expand", high=1024),
        state=config.integer("mamba_d_state", high=MAX_WIDTH),
        dt_rank=rank_of(config, "mamba_dt_rank"),
        inner_norms=True,
    )
    attention, sparse = _positions(config, "attn_layer"), _positions(config, "expert_layer")
    shape = decoder(config, pos="none")
    moe = experts(config, "num_experts", "num_local_experts", ffn=shape.ffn_hidden)
    kinds = [
        LayerKind("attention" if i in attention else "mamba1", "moe" if i in sparse and moe.experts > 1 else "dense")
        for i in range(shape.layers)
    ]
    return _mixed(shape, ssm, moe, kinds)


def _positions(config: Config, name: str) -> range:
    """Layers at `<name>_offset` and every `<name>_period` after it."""
    period = config.integer(f"{name}_period", high=MAX_LAYERS)
    offset = config.integer(f"{name}_offset", high=MAX_LAYERS, low=0)
    if offset >= period:
        config.refuse(
            "RANGE", f"{name}_offset", f"is {offset}; it must be below {name}_period ({period})", value=offset
        )
    return range(offset, MAX_LAYERS, period)


_LETTERS = {
    "M": LayerKind("mamba2", "none"),
    "*": LayerKind("attention", "none"),
    "-": LayerKind("none", "dense"),
    "E": LayerKind("none", "moe"),
}
_WORDS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}


def _nemotron_h(config: Config) -> ModelShape:
    """One part per layer, in the order of `hybrid_override_pattern` (or `layers_block_type`, the same in words)."""
    config.only("use_bias", False)
    config.only("mamba_proj_bias", False)
    config.only("use_conv_bias", True)
    config.only("mlp_bias", False)
    ssm = Ssm(
        kind="mamba2",
        conv=config.integer("conv_kernel", "mamba_d_conv", high=1024),
        state=config.integer("ssm_state_size", high=MAX_WIDTH),
        heads=config.integer("mamba_num_heads", high=MAX_HEADS),
        head_dim=config.integer("mamba_head_dim", high=MAX_WIDTH),
        groups=config.integer("n_groups", "mamba_n_groups", high=MAX_HEADS),
    )
    letters = _pattern(config)
    shape = decoder(
        config.saying(num_hidden_layers=len(letters)), pos="none", norms_per_layer=1, mlp_gated=False, tied=False
    )
    moe = _latent_experts(config) if "E" in letters else None
    return _mixed(shape, ssm, moe, [_LETTERS[letter] for letter in letters])


def _pattern(config: Config) -> str:
    """The layers as letters; at least one, at most MAX_LAYERS."""
    named = config.list_of(str, "layers_block_type", limit=MAX_LAYERS)
    if named is None:
        key = "hybrid_override_pattern"
        letters = config.word(key) if config.has(key) else ""
        if not config.has(key):
            config.refuse("MISSING", key, "is missing", hint="Add it; nothing is guessed.")
    else:
        key, letters = "layers_block_type", "".join(_WORDS.get(word, "?") for word in named)
    if not set(letters) <= set(_LETTERS) or not 1 <= len(letters) <= MAX_LAYERS:
        known = f"{', '.join(_LETTERS)} or {', '.join(_WORDS)}"
        config.refuse("CHOICE", key, f"must name 1 to {MAX_LAYERS} layers", value=letters, hint=f"Known: {known}.")
    config.settle()
    return letters


def _latent_experts(config: Config) -> Moe:
    shared = config.integer("moe_shared_expert_intermediate_size", high=MAX_FFN)
    return experts(
        config,
        "n_routed_experts",
        "num_local_experts",
        ffn=config.integer("moe_intermediate_size", high=MAX_FFN),
        shared_ffn=shared if config.optional("n_shared_experts", high=MAX_EXPERTS, low=0) else 0,
        latent=config.optional("moe_latent_size", high=MAX_WIDTH) or 0,
    )


_MAMBA_KINDS = {
    "mamba": "mamba2",
    "linear_attention": "mamba2",
    "attention": "attention",
    "full_attention": "attention",
}


def _granite_hybrid(config: Config) -> ModelShape:
    """Granite 4: Mamba-2 layers among attention, every one with a dense part beside its experts, if it has any."""
    bias, shared = config.yes("attention_bias"), config.integer("shared_intermediate_size", high=MAX_FFN)
    words = config.list_of(str, "layer_types", limit=MAX_LAYERS)
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    if words is not None and (len(words) != layers or not set(words) <= set(_MAMBA_KINDS)):
        known = f"{layers} of {', '.join(_MAMBA_KINDS)}"
        config.refuse("CHOICE", "layer_types", f"must be {known}", hint="Give one entry per layer.")
    config.settle()
    has_experts = config.optional("num_local_experts", high=MAX_EXPERTS, low=0) != 0
    pos = "rope" if config.word("position_embedding_type") == "rope" else "none"
    shape = decoder(config, ffn_hidden=shared, pos=pos, qkv_bias=bias, o_bias=bias)
    moe = _granite_experts(config, shared) if has_experts else None
    attends = [_MAMBA_KINDS[word] == "attention" for word in words or ["mamba"] * layers]
    return _among_mamba2(config, shape, moe, attends)


def _granite_experts(config: Config, shared: int) -> Moe:
    width = config.integer("intermediate_size", high=MAX_FFN)
    return experts(config, "num_local_experts", ffn=width, shared_ffn=shared)


def _bamba(config: Config) -> ModelShape:
    """Bamba: Mamba-2 layers, and attention in those that `attn_layer_indices` lists."""
    bias = config.yes("attention_bias")
    shape = decoder(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.yes("mlp_bias"))
    listed = set(config.list_of(int, "attn_layer_indices", limit=MAX_LAYERS) or ())
    return _among_mamba2(config, shape, None, [i in listed for i in range(shape.layers)])


def _among_mamba2(config: Config, shape: ModelShape, moe: Moe | None, attends: Sequence[bool]) -> ModelShape:
    """Attention in the layers where `attends` is true, Mamba-2 in the others, and after each of them a feed-forward part."""
    config.only("mamba_conv_bias", True)
    config.only("mamba_proj_bias", False)
    ffn: Ffn = "dense" if moe is None else "moe"
    if all(attends):
        return shape if moe is None else with_experts(config, shape, moe, attends)
    heads = config.integer("mamba_n_heads", high=MAX_HEADS)
    inner = shape.hidden * config.integer("mamba_expand", high=1024)
    config.divisible(inner, "mamba_expand * hidden_size", heads, "mamba_n_heads")
    ssm = Ssm(
        kind="mamba2",
        conv=config.integer("mamba_d_conv", high=1024),
        state=config.integer("mamba_d_state", high=MAX_WIDTH),
        heads=heads,
        head_dim=inner // heads,
        groups=config.integer("mamba_n_groups", high=MAX_HEADS),
    )
    config.settle()
    return _mixed(shape, ssm, moe, [LayerKind("attention" if one else "mamba2", ffn) for one in attends])


def _gated_delta(config: Config) -> Ssm:
    return Ssm(
        kind="gated-delta",
        conv=config.integer("linear_conv_kernel_dim", high=1024),
        k_heads=config.integer("linear_num_key_heads", high=MAX_HEADS),
        v_heads=config.integer("linear_num_value_heads", high=MAX_HEADS),
        k_dim=config.integer("linear_key_head_dim", high=MAX_WIDTH),
        v_dim=config.integer("linear_value_head_dim", high=MAX_WIDTH),
    )


def _mostly_linear(config: Config, width: int, moe: Moe | None, sparse: Sequence[bool] | None) -> ModelShape:
    """Gated linear layers with full, gated attention in every `full_attention_interval`-th."""
    ssm, bias = _gated_delta(config), config.yes("attention_bias")
    shape = decoder(config, ffn_hidden=width, attn_gate=True, qk_norm="head", qkv_bias=bias, o_bias=bias)
    interval = config.optional("full_attention_interval", high=MAX_LAYERS) or 4
    rule: list[Mixer] = ["gated-delta" if (i + 1) % interval else "attention" for i in range(shape.layers)]
    mixers = layer_types(config, shape.layers) or rule
    placed = [moe is not None] * shape.layers if sparse is None else sparse
    kinds = [LayerKind(mixer, "moe" if has else "dense") for mixer, has in zip(mixers, placed, strict=True)]
    return _mixed(shape, ssm, moe, kinds)


def _qwen3_next(config: Config) -> ModelShape:
    layers, width = config.integer("num_hidden_layers", high=MAX_LAYERS), config.integer("intermediate_size", high=MAX_FFN)  # fmt: skip
    return _mostly_linear(config, width, shared_gated_experts(config), sparse_steps(config, layers))


def _qwen3_5(config: Config) -> ModelShape:
    return _mostly_linear(config, config.integer("intermediate_size", high=MAX_FFN), None, None)


def _qwen3_5_moe(config: Config) -> ModelShape:
    return _mostly_linear(config, 0, shared_gated_experts(config), None)


def _olmo_hybrid(config: Config) -> ModelShape:
    """OLMo Hybrid: OLMo 2's layers in every fourth place, gated linear ones with norms in front in the others. What a file does not say of
    these is as wide as attention, three quarters of it for keys and twice that for values (models/olmo_hybrid/configuration_olmo_hybrid.py)."""
    bias = config.yes("attention_bias")
    shape = decoder(config, qk_norm="full", qkv_bias=bias, o_bias=bias)
    ssm = _gated_delta(_with_linear_widths(config, shape))
    if config.has("layer_types"):
        attends = _attending(config, shape.layers, "linear_attention")
    else:
        attends = [i % 4 == 3 or (i == shape.layers - 1 and shape.layers < 4) for i in range(shape.layers)]
    if all(attends) or not any(attends):
        config.refuse("CHOICE", "layer_types", "must name layers of both sorts, as the class asks")
    config.settle()
    return _mixed(shape, ssm, None, [LayerKind("attention" if one else "gated-delta", "dense") for one in attends])


def _with_linear_widths(config: Config, shape: ModelShape) -> Config:
    """The configuration with the heads of linear layers that it leaves to its class."""
    said: dict[str, int] = {}
    for key in ("linear_num_key_heads", "linear_num_value_heads"):
        said[key] = config.optional(key, high=MAX_HEADS) or config.default(key, shape.heads)
    key, value = "linear_key_head_dim", "linear_value_head_dim"
    quarters = int(0.75 * shape.hidden / said["linear_num_key_heads"])
    said[key] = config.optional(key, high=MAX_WIDTH) or config.default(key, quarters)
    said[value] = config.optional(value, high=MAX_WIDTH) or config.default(value, 2 * said[key])
    kernel = config.optional("linear_conv_kernel_dim", high=1024)
    return config.saying(**said, **({} if kernel is None else {"linear_conv_kernel_dim": kernel}))


def _lfm2(config: Config) -> ModelShape:
    """LFM2: short convolutions, and attention in the layers that `layer_types` or `full_attn_idxs` names; published files call two
    things by names of their own."""
    tied = config.yes("tie_embedding" if config.has("tie_embedding") else "tie_word_embeddings")
    width = config.integer("block_ff_dim" if config.has("block_ff_dim") else "intermediate_size", high=MAX_FFN)
    if config.yes("block_auto_adjust_ff_dim"):
        if config.values.get("block_ffn_dim_multiplier", 1) != 1:
            config.refuse("CHOICE", "block_ffn_dim_multiplier", "must be 1; other factors cannot be read")
        multiple = config.optional("block_multiple_of", high=MAX_WIDTH) or 1
        width = -(-(2 * width // 3) // multiple) * multiple
    return _among_convolutions(
        config, decoder(config, ffn_hidden=width, tied=tied, qk_norm="head", mlp_act="silu"), None, 0
    )


def _lfm2_moe(config: Config) -> ModelShape:
    """The same with experts behind the first `num_dense_layers`."""
    tied = config.yes("tie_embedding" if config.has("tie_embedding") else "tie_word_embeddings")
    shape = decoder(config, tied=tied, qk_norm="head", mlp_act="silu")
    moe = experts(config, "num_experts", ffn=config.integer("moe_intermediate_size", high=MAX_FFN))
    return _among_convolutions(config, shape, moe, config.integer("num_dense_layers", high=MAX_LAYERS, low=0))


def _among_convolutions(config: Config, shape: ModelShape, moe: Moe | None, dense: int) -> ModelShape:
    config.only("conv_bias", False)
    attends = _attending(config, shape.layers, "conv")
    ssm = Ssm(kind="short-conv", conv=config.integer("conv_L_cache", high=1024))
    config.settle()
    ffns: list[Ffn] = ["dense" if moe is None or i < dense else "moe" for i in range(shape.layers)]
    return _mixed(shape, ssm, moe, [LayerKind("attention" if one else "short-conv", ffn) for one, ffn in zip(attends, ffns, strict=True)])  # fmt: skip


def _attending(config: Config, layers: int, other: str) -> list[bool]:
    """Which layers attend: those that `layer_types` calls so, the others being called `other`, or those that `full_attn_idxs` lists."""
    words, listed = config.list_of(str, "layer_types", limit=MAX_LAYERS), config.list_of(int, "full_attn_idxs", limit=MAX_LAYERS)  # fmt: skip
    if words is None and listed is None:
        config.refuse("MISSING", "layer_types", "is missing", hint="Add it; nothing is guessed.")
    if words is not None and (len(words) != layers or not set(words) <= {"full_attention", other}):
        config.refuse("CHOICE", "layer_types", f"must be {layers} of full_attention, {other}", hint="Give one entry per layer.")  # fmt: skip
    config.settle()
    return [word == "full_attention" for word in words] if words is not None else [i in set(listed or ()) for i in range(layers)]  # fmt: skip


def _minimax(config: Config) -> ModelShape:
    """MiniMax-01: linear attention with full attention among it, experts in every layer."""
    shape = decoder(config)
    moe = experts(config, "num_local_experts", "num_experts", ffn=shape.ffn_hidden)
    attends = _attending(config, shape.layers, "linear_attention")
    ssm = Ssm(kind="lightning", heads=shape.heads, head_dim=shape.head_dim)
    return _mixed(shape, ssm, moe, [LayerKind("attention" if one else "lightning", "moe") for one in attends])


def _kimi_linear(config: Config) -> ModelShape:
    """Kimi Linear: latent attention among Kimi Delta Attention, experts behind the first layers. Published files say the linear layers under
    `linear_attn_config`, which wins where it stands (models/kimi_linear/configuration_kimi_linear.py, __post_init__)."""
    linear = config.within("linear_attn_config") if config.has("linear_attn_config") else config
    inside = linear is not config
    config.only("moe_layer_freq", 1)
    config.only("attention_bias", False)
    config.only("num_nextn_predict_layers", 0)
    # its class shares no table, whatever the file says
    shape = with_latent_attention(_with_positions(config).saying(tie_word_embeddings=False))
    ssm = Ssm(
        kind="kimi-delta",
        heads=linear.integer("num_heads" if inside else "linear_num_heads", high=MAX_HEADS),
        head_dim=linear.integer("head_dim" if inside else "linear_head_dim", high=MAX_WIDTH),
        conv=linear.integer("short_conv_kernel_size" if inside else "linear_conv_kernel_dim", high=1024),
    )
    moe = experts_beside_shared(
        config,
        "num_shared_experts" if config.has("num_shared_experts") else "n_shared_experts",
        "num_experts",
        "num_local_experts",
        chosen_key="num_experts_per_token" if config.has("num_experts_per_token") else "num_experts_per_tok",
        group_keys=("num_expert_group" if config.has("num_expert_group") else "n_group", "topk_group"),
    )
    attends = _kimi_attention(config, linear, shape.layers)
    placed = first_dense(config, shape.layers)
    config.settle()
    kinds = [
        LayerKind("mla" if full else "kimi-delta", "moe" if has else "dense")
        for full, has in zip(attends, placed, strict=True)
    ]
    return _mixed(shape, ssm, moe, kinds)


def _with_positions(config: Config) -> Config:
    """The configuration with its longest sequence under the name that others have for it."""
    if config.has("max_position_embeddings"):
        return config
    return config.saying(max_position_embeddings=config.integer("model_max_length", high=MAX_TOKENS))


def _kimi_attention(config: Config, linear: Config, layers: int) -> list[bool]:
    """Which layers attend: as `layer_types` says, else as `full_attn_layers` and `kda_layers` count from one, else every fourth from the fifth on."""
    if config.has("layer_types"):
        return _attending(config, layers, "linear_attention")
    full, others = (linear.list_of(int, key, limit=MAX_LAYERS) for key in ("full_attn_layers", "kda_layers"))
    if full is None or others is None:
        return [index > 0 and index % 4 == 0 for index in range(layers)]
    if sorted(full + others) != list(range(1, layers + 1)):
        rule = f"must name each of {layers} layers once, together with kda_layers"
        linear.refuse("CHOICE", "full_attn_layers", rule)
        config.settle()
    return [number in set(full) for number in range(1, layers + 1)]


FAMILY = Family(
    "hybrids",
    {
        "jamba": _jamba,
        "nemotron_h": _nemotron_h,
        "granitemoehybrid": _granite_hybrid,
        "bamba": _bamba,
        "lfm2": _lfm2,
        "lfm2_moe": _lfm2_moe,
        "minimax": _minimax,
        "qwen3_next": _qwen3_next,
        "olmo_hybrid": _olmo_hybrid,
        "kimi_linear": _kimi_linear,
        "qwen3_5_text": _qwen3_5,
        "qwen3_5_moe_text": _qwen3_5_moe,
    },
)
