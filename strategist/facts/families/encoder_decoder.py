"""T5, BART and Whisper: an encoder, and a decoder that also attends to it (transformers 5.23.0)."""

from __future__ import annotations

from typing import Any

from strategist.facts.families.config import MAX_FFN, MAX_HEADS, MAX_TOKENS, MAX_VOCAB, MAX_WIDTH, Config, Family
from strategist.facts.families.decoder import activation, checked_heads
from strategist.facts.model import MAX_LAYERS, ModelShape

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
        extra=(("rel_buckets", buckets),),
    )


def _two_towers(config: Config, **facts: Any) -> ModelShape:
    """Encoder and decoder under the key names of BART; both must have the same heads and feed-forward width."""
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
        "mlp_act": activation(config, "activation_function"),
        "mlp_bias": True,
        "qkv_bias": True,
        "o_bias": True,
    }
    return checked_heads(config, ("decoder_attention_heads", "decoder_attention_heads"), 0, **common | facts)


def _bart(config: Config) -> ModelShape:
    config.only("tie_word_embeddings", True)
    positions = config.integer("max_position_embeddings", high=MAX_TOKENS)
    rows = positions + 2  # both tables start two rows late
    return _two_towers(
        config,
        kind="encdec",
        max_seq=positions,
        pos_rows=rows,
        final_norm=False,
        embed_norm=True,
        extra=(("enc_pos_rows", rows),),
    )


def _whisper(config: Config) -> ModelShape:
    """Whisper: two convolutions over the spectrum, keys without bias, fixed positions in the encoder (stored)."""
    targets, sources = (config.integer(f"max_{end}_positions", high=MAX_TOKENS) for end in ("target", "source"))
    mel = config.integer("num_mel_bins", high=MAX_WIDTH)
    extra = (("audio_frames", 2 * sources), ("enc_pos_rows", sources), ("mel", mel))
    return _two_towers(config, kind="encdec-audio", max_seq=targets, pos_rows=targets, k_bias=False, extra=extra)


FAMILY = Family("encoder-decoders", {"t5": _t5, "bart": _bart, "whisper": _whisper})
