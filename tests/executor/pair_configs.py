"""Configurations of tiny encoders with decoders, which need no transformers."""

from __future__ import annotations

from typing import Any

T5: dict[str, Any] = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": 64, "n_positions": 64,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip
BART: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64, "max_position_embeddings": 64, "activation_function": "gelu",
    "dropout": 0.0, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": T5 | {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "mt5": T5,
    "bart": BART,
    "mbart": BART,
    "blenderbot": BART,
}
"""`model_type` and what is said of a tiny model."""


def config_of(family: str) -> dict[str, Any]:
    """The configuration of a tiny model."""
    return FAMILIES[family] | {"model_type": family}
