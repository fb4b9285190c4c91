"""BERT, RoBERTa and ModernBERT (transformers 5.23.0). What sits on the last layer depends on `architectures`."""

from __future__ import annotations

from strategist.facts.families.config import MAX_FFN, MAX_HEADS, MAX_TOKENS, MAX_VOCAB, MAX_WIDTH, Config, Family
from strategist.facts.families.decoder import activation, checked_heads, decoder, with_layer_types
from strategist.facts.model import MAX_LAYERS, ModelShape
from strategist.records import replace


def _bert(config: Config) -> ModelShape:
    config.only("add_cross_attention", False)
    config.only("is_decoder", False)
    config.only("tie_word_embeddings", True)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    positions = config.integer("max_position_embeddings", high=MAX_TOKENS)
    token_types = config.optional("type_vocab_size", high=MAX_VOCAB, low=0) or 0
    shape = checked_heads(
        config,
        ("num_attention_heads", "num_attention_heads"),
        0,
        kind="encoder",
        layers=config.integer("num_hidden_layers", high=MAX_LAYERS),
        hidden=config.integer("hidden_size", high=MAX_WIDTH),
        ffn_hidden=config.integer("intermediate_size", high=MAX_FFN),
        heads=heads,
        kv_heads=heads,
        vocab=config.integer("vocab_size", high=MAX_VOCAB),
        tied=True,
        max_seq=positions,
        pos="learned",
        pos_rows=positions,
        norm="layernorm",
        final_norm=False,
        embed_norm=True,
        mlp_gated=False,
        mlp_act=activation(config, "hidden_act"),
        mlp_bias=True,
        qkv_bias=True,
        o_bias=True,
    )
    return replace(shape, extra_parameters=token_types * shape.hidden + _on_top(config, shape))


def _on_top(config: Config, shape: ModelShape) -> int:
    """Weights after the last layer: a masked-language head, or a pooler, or both."""
    named = config.list_of(str, "architectures", limit=16) or []
    h = shape.hidden
    pooler, masked = h * h + h, h * h + h + 2 * h + shape.vocab
    if any(name.endswith("ForMaskedLM") for name in named):
        config.ledger.notes.append("Counted with the masked-language head and without a pooler, as architectures says.")
        return masked
    if any(name.endswith("ForPreTraining") for name in named):
        config.ledger.notes.append(
            "Counted with pooler, masked-language and next-sentence heads, as architectures says."
        )
        return pooler + masked + 2 * h + 2
    config.ledger.notes.append("Counted as the bare encoder with its pooler.")
    return pooler


def _modernbert(config: Config) -> ModelShape:
    """Alternating attention; the first layer lacks its attention norm; dense, norm and bias of the masked-language head."""
    for key in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"):
        config.only(key, False)
    config.only("tie_word_embeddings", True)
    shape = decoder(
        config,
        kind="encoder",
        norm="layernorm_nobias",
        embed_norm=True,
        window=config.optional("local_attention", high=MAX_TOKENS),
        tied=True,
    )
    h, bias = shape.hidden, shape.vocab if config.yes("decoder_bias") else 0
    period = config.optional("global_attn_every_n_layers", high=MAX_LAYERS) or 3
    slides = [i % period != 0 for i in range(shape.layers)]
    return with_layer_types(config, replace(shape, extra_parameters=h * h + h + bias - h), slides)


FAMILY = Family("encoders", {"bert": _bert, "roberta": _bert, "xlm-roberta": _bert, "modernbert": _modernbert})
