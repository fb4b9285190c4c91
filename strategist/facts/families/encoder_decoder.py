"""T5, BART, their kin and Whisper: an encoder, and a decoder that also attends to it (transformers 5.23.0)."""

from __future__ import annotations

from typing import Any

from strategist.errors import shown
from strategist.facts.families.config import MAX_FFN, MAX_HEADS, MAX_TOKENS, MAX_VOCAB, MAX_WIDTH, Config, Family
from strategist.facts.families.decoder import activation, checked_heads
from strategist.facts.model import MAX_LAYERS, ModelShape
from strategist.records import replace

_T5_ACTS = ("relu", "gated-gelu", "gated-silu", "gelu", "silu")


def _t5(config: Config) -> ModelShape:
    layers, heads = config.integer("num_layers", high=MAX_LAYERS), config.integer("num_heads", high=MAX_HEADS)
    projection = config.word("feed_forward_proj")
    if projection not in _T5_ACTS:
        config.refuse("CHOICE", "feed_forward_proj", "is not known", value=projection, hint=f"Known: {', '.join(_T5_ACTS)}.")  # fmt: skip
    config.only("is_gated_act", projection.startswith("gated"), "it must say what feed_forward_proj says")
    buckets = config.optional("relative_attention_num_buckets", high=MAX_TOKENS) or 0
    return checked_heads(
        config,
        ("num_heads", "num_heads"),
        config.integer("d_kv", high=MAX_WIDTH),
        kind="encdec",
        formula="encdec",
        layers=config.optional("num_decoder_layers", high=MAX_LAYERS) or layers,
        enc_layers=layers,
        hidden=config.integer("d_model", high=MAX_WIDTH),
        ffn_hidden=config.integer("d_ff", high=MAX_FFN),
        heads=heads,
        kv_heads=heads,
        vocab=config.integer("vocab_size", high=MAX_VOCAB),
        max_seq=config.optional("n_positions", high=MAX_TOKENS) or config.default("n_positions", 512),
        tied=config.yes("tie_word_embeddings"),
        pos="relative",
        mlp_gated=projection.startswith("gated"),
        mlp_act=projection.removeprefix("gated-"),
        act_form="gelu_new" if projection == "gated-gelu" else "",
        extra=(("rel_buckets", buckets),),
    )


def _two_towers(config: Config, **facts: Any) -> ModelShape:
    """Encoder and decoder under the key names of BART; both must have the same heads and feed-forward width."""
    _only_both(config)
    heads = config.integer("decoder_attention_heads", high=MAX_HEADS)
    ffn = config.integer("decoder_ffn_dim", high=MAX_FFN)
    for key, decoder in (("encoder_attention_heads", heads), ("encoder_ffn_dim", ffn)):
        if config.integer(key, high=MAX_FFN) != decoder:
            config.refuse("CHOICE", key, f"differs from the decoder's ({decoder}); only equal towers can be read", value=config.values.get(key))  # fmt: skip
    common = {
        "formula": "encdec",
        "layers": config.integer("decoder_layers", high=MAX_LAYERS),
        "enc_layers": config.integer("encoder_layers", high=MAX_LAYERS),
        "hidden": config.integer("d_model", high=MAX_WIDTH),
        "ffn_hidden": ffn,
        "heads": heads,
        "kv_heads": heads,
        "vocab": config.integer("vocab_size", high=MAX_VOCAB),
        "tied": config.yes("tie_word_embeddings"),
        "pos": "learned",
        "norm": "layernorm",
        "mlp_gated": False,
        **activation(config, "activation_function"),
        "mlp_bias": True,
        "qkv_bias": True,
        "o_bias": True,
    }
    return checked_heads(config, ("decoder_attention_heads", "decoder_attention_heads"), 0, **common | facts)


def _only_both(config: Config) -> None:
    """Refuse a file whose class is the decoder alone, which keeps the weights of attention to an encoder that it does not have."""
    named = config.list_of(str, "architectures", limit=16) or []
    alone = next((name for name in named if name.endswith("ForCausalLM")), None)
    if alone is not None:
        rule = f"names {shown(alone)}, the decoder alone; only encoder and decoder together can be read"
        config.refuse("CHOICE", "architectures", rule, value=alone, hint="Name the class that has both, or pass a shape close to it with --model or --model-size.")  # fmt: skip


def _umt5(config: Config) -> ModelShape:
    """UMT5: every layer has a table of relative positions of its own."""
    shape = _t5(config)
    buckets = dict(shape.extra)["rel_buckets"]
    return replace(shape, extra=(("rel_buckets", 0),), layer_extra_parameters=buckets * shape.heads)


def _learned(config: Config, late: int = 2, **facts: Any) -> ModelShape:
    """BART and its kin: tables of positions that start some rows late, norms behind the tables or behind the last layers."""
    config.only("tie_word_embeddings", True)
    positions = config.integer("max_position_embeddings", high=MAX_TOKENS)
    rows = positions + late
    return _two_towers(config, kind="encdec", max_seq=positions, pos_rows=rows, extra=(("enc_pos_rows", rows),), **facts)  # fmt: skip


def _bart(config: Config) -> ModelShape:
    return _learned(config, final_norm=False, embed_norm=True)


def _mvp(config: Config) -> ModelShape:
    config.only("use_prompt", False)
    return _bart(config)


def _mbart(config: Config) -> ModelShape:
    return _learned(config, embed_norm=True)


def _blenderbot(config: Config) -> ModelShape:
    return _learned(config, late=0)


def _blenderbot_small(config: Config) -> ModelShape:
    return _learned(config, late=0, final_norm=False, embed_norm=True)


def _pegasus(config: Config) -> ModelShape:
    """Sines of positions, stored as tables."""
    config.only("static_position_embeddings", True)
    return _learned(config, late=0, pos="sincos-fixed")


def _marian(config: Config) -> ModelShape:
    """Sines of positions, stored as tables; one table of tokens for both towers, and norms behind the parts only."""
    config.only("share_encoder_decoder_embeddings", True)
    config.only("normalize_embedding", False)
    config.only("normalize_before", False)
    if config.has("decoder_vocab_size"):
        config.only("decoder_vocab_size", config.integer("vocab_size", high=MAX_VOCAB))
    return _learned(config, late=0, pos="sincos-fixed", final_norm=False)


def _m2m_100(config: Config) -> ModelShape:
    """M2M-100 and NLLB: sines of positions, computed."""
    config.only("tie_word_embeddings", True)
    positions = config.integer("max_position_embeddings", high=MAX_TOKENS)
    return _two_towers(config, kind="encdec", max_seq=positions, pos="sincos-fixed")


def _whisper(config: Config) -> ModelShape:
    """Whisper: two convolutions over the spectrum, keys without bias, fixed positions in the encoder (stored)."""
    targets, sources = (config.integer(f"max_{end}_positions", high=MAX_TOKENS) for end in ("target", "source"))
    mel = config.integer("num_mel_bins", high=MAX_WIDTH)
    extra = (("audio_frames", 2 * sources), ("enc_pos_rows", sources), ("mel", mel))
    return _two_towers(config, kind="encdec-audio", max_seq=targets, pos_rows=targets, k_bias=False, extra=extra)


FAMILY = Family(
    "encoder-decoders",
    {
        "t5": _t5,
        "mt5": _t5,
        "umt5": _umt5,
        "bart": _bart,
        "plbart": _bart,
        "mvp": _mvp,
        "mbart": _mbart,
        "blenderbot": _blenderbot,
        "blenderbot-small": _blenderbot_small,
        "pegasus": _pegasus,
        "marian": _marian,
        "m2m_100": _m2m_100,
        "whisper": _whisper,
    },
)
