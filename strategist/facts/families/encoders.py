"""BERT, RoBERTa, ModernBERT and their kin (transformers 5.23.0). What sits on the last layer depends on `architectures`."""

from __future__ import annotations

from typing import Any

from strategist.facts.families.config import MAX_FFN, MAX_HEADS, MAX_TOKENS, MAX_VOCAB, MAX_WIDTH, Config, Family
from strategist.facts.families.decoder import activation, checked_heads, decoder, with_layer_types
from strategist.facts.model import MAX_LAYERS, ModelShape
from strategist.records import replace

_ROWS: tuple[str, ...] = ("max_position_embeddings", "n_positions")
_BIASED = {"mlp_bias": True, "qkv_bias": True, "o_bias": True}


def _encoder(config: Config, **facts: Any) -> ModelShape:
    """BERT's layers behind tables of tokens and positions; `facts` are what an architecture has otherwise. DistilBERT's and
    Nomic's names of widths are synonyms. Token types count as extra."""
    config.only("add_cross_attention", False)
    config.only("is_decoder", False)
    config.only("tie_word_embeddings", True)
    heads = config.integer("num_attention_heads", "n_heads", "n_head", high=MAX_HEADS)
    positions = config.integer(*_ROWS, high=MAX_TOKENS)
    token_types = config.optional("type_vocab_size", high=MAX_VOCAB, low=0) or 0
    common = {
        "kind": "encoder",
        "layers": config.integer("num_hidden_layers", "n_layers", "n_layer", high=MAX_LAYERS),
        "hidden": config.integer("hidden_size", "dim", "n_embd", high=MAX_WIDTH),
        "ffn_hidden": config.integer("intermediate_size", "hidden_dim", "n_inner", high=MAX_FFN),
        "heads": heads,
        "kv_heads": heads,
        "vocab": config.integer("vocab_size", high=MAX_VOCAB),
        "tied": True,
        "max_seq": positions,
        "pos": "learned",
        "pos_rows": positions,
        "norm": "layernorm",
        "final_norm": False,
        "embed_norm": True,
        "mlp_gated": False,
        **_BIASED,
    }
    if "mlp_act" not in facts:
        common |= activation(config, "hidden_act", "activation")
    shape = checked_heads(config, ("num_attention_heads", "num_attention_heads"), 0, **common | facts)
    return replace(shape, extra_parameters=shape.extra_parameters + token_types * shape.hidden)


_WITH_WORDS = ("ForMaskedLM", "ForCausalLM", "LMHeadModel")
"""Ends of the names of classes with a masked-language head; those that are named after another loss have the same one."""


def _topped(config: Config, shape: ModelShape, *, pooler: bool = True, pretraining: int = 0) -> ModelShape:
    """The shape with what sits on the last layer: a masked-language head (dense, norm, bias of the vocabulary), or what the class
    was pre-trained with, or the class's own pooler if it has one."""
    named = config.list_of(str, "architectures", limit=16) or []
    h = shape.hidden
    pool, masked = h * h + h if pooler else 0, h * h + h + 2 * h + shape.vocab
    if any(name.endswith(_WITH_WORDS) for name in named):
        note, top = "Counted with the masked-language head and without a pooler, as architectures says.", masked
    elif pretraining and any(name.endswith("ForPreTraining") for name in named):
        note, top = "Counted with the heads of pre-training, as architectures says.", pretraining
    else:
        note, top = f"Counted as the bare encoder{' with its pooler' if pooler else ''}.", pool
    config.ledger.notes.append(note)
    return replace(shape, extra_parameters=shape.extra_parameters + top)


def _bert(config: Config) -> ModelShape:
    return _bert_topped(config, _encoder(config))


def _bert_topped(config: Config, shape: ModelShape) -> ModelShape:
    """With pooler, masked-language and next-sentence heads where architectures says ForPreTraining."""
    h = shape.hidden
    return _topped(config, shape, pretraining=(h * h + h) + (h * h + h + 2 * h + shape.vocab) + 2 * h + 2)


def _norms_first(config: Config) -> ModelShape:
    """Megatron-BERT and XLM-RoBERTa-XL: norms in front of the parts, so that one follows the last layer and none the tables."""
    return _bert_topped(config, _encoder(config, embed_norm=False, final_norm=True))


def _roberta_prelayernorm(config: Config) -> ModelShape:
    """RoBERTa with norms in front of the parts, and behind its tables too."""
    return _bert_topped(config, _encoder(config, final_norm=True))


def _ernie(config: Config) -> ModelShape:
    config.only("use_task_id", False)
    return _bert(config)


def _distilbert(config: Config) -> ModelShape:
    return _topped(config, _encoder(config), pooler=False)


def _electra(config: Config) -> ModelShape:
    """ELECTRA whose tables are as wide as its layers (base, large); pre-trained as a discriminator of tokens."""
    config.only("embedding_size", config.integer("hidden_size", high=MAX_WIDTH))
    shape = _encoder(config)
    h = shape.hidden
    return _topped(config, shape, pooler=False, pretraining=h * h + h + h + 1)


def _mpnet(config: Config) -> ModelShape:
    """BERT without token types, with one table of relative positions for all layers."""
    shape = _encoder(config)
    buckets = config.optional("relative_attention_num_buckets", high=MAX_TOKENS) or 0
    return _topped(config, replace(shape, extra_parameters=shape.extra_parameters + buckets * shape.heads))


def _deberta_v2(config: Config) -> ModelShape:
    """DeBERTa-v2 and v3: one table of relative positions, its norm, a convolution beside the first layer in some; with
    `share_att_key` off, maps of positions to keys and queries in every layer."""
    config.only("legacy", True)
    config.only("conv_groups", 1)
    h = config.integer("hidden_size", high=MAX_WIDTH)
    for key in ("embedding_size", "pooler_hidden_size"):
        config.only(key, h)
    kernel, is_relative = config.optional("conv_kernel_size", high=1024, low=0) or 0, config.yes("relative_attention")
    table = _relative_rows(config) * h if is_relative else 0
    norm = 2 * h if "layer_norm" in config.word("norm_rel_ebd").lower() else 0
    convolution = kernel * h * h + h + 2 * h if kernel else 0
    has_positions = config.yes("position_biased_input")
    learned = {} if has_positions else {"pos": "relative", "pos_rows": 0}
    shape = _encoder(config, extra_parameters=table + norm + convolution, **learned)
    maps = _position_maps(config) if is_relative and not config.yes("share_att_key") else ()
    config.ledger.notes.append("Scores of positions (disentangled attention) are counted by their weights only.")
    return _topped(config, replace(shape, layer_extra_parameters=len(maps) * (h * h + h)), pooler=False)


def _relative_rows(config: Config) -> int:
    """Rows of the table of relative positions: two for every bucket, or for every distance."""
    buckets, farthest = (config.optional(key, high=MAX_TOKENS, low=-1) or 0 for key in ("position_buckets", "max_relative_positions"))  # fmt: skip
    positions = config.integer("max_position_embeddings", high=MAX_TOKENS)
    return 2 * (buckets if buckets > 0 else farthest if farthest > 0 else positions)


def _position_maps(config: Config) -> tuple[str, ...]:
    """`pos_att_type`: "c2p|p2c", or a list of the two."""
    found = config.values.get("pos_att_type")
    words = found.split("|") if isinstance(found, str) else found if isinstance(found, (list, tuple)) else []
    known = tuple(word for word in ("c2p", "p2c") if word in words)
    if len(known) != len(words):
        config.refuse("CHOICE", "pos_att_type", "must name c2p, p2c or both")
    return known


def _esm(config: Config) -> ModelShape:
    """ESM-2: norms first, rotary positions (or a table of them), a head that reads contacts off the attention."""
    config.only("is_folding_model", False)
    rotary = config.word("position_embedding_type") == "rotary"
    if not rotary:
        config.only("position_embedding_type", "absolute")
    before = config.yes("emb_layer_norm_before")
    positions = {"pos": "rope", "pos_rows": 0} if rotary else {}
    shape = _encoder(config, mlp_act="gelu", embed_norm=before, final_norm=True, **positions)
    shape = replace(shape, norms_per_layer=2, extra_parameters=shape.extra_parameters + shape.layers * shape.heads + 1)
    return _topped(config, shape)


_ROTARY = {"pos": "rope", "pos_rows": 0, "mlp_gated": True}


def _nomic_bert(config: Config) -> ModelShape:
    """Nomic-BERT: rotary positions, gated feed-forward, no biases."""
    for key in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm"):
        config.only(key, False)
    config.only("activation_function", "swiglu")
    unbiased = dict.fromkeys(_BIASED, False)
    return _topped(config, _encoder(config, **_ROTARY, **unbiased, mlp_act="silu"), pooler=False)


def _gte(config: Config) -> ModelShape:
    """GTE: rotary positions and a gated feed-forward part with a bias behind it only."""
    shape = _encoder(config, **_ROTARY | {"mlp_bias": False})
    return _topped(config, replace(shape, layer_extra_parameters=shape.hidden), pooler=False)


def _eurobert(config: Config) -> ModelShape:
    """EuroBERT: Llama's layers that attend both ways, and an output head of its own."""
    bias, mlp = config.yes("attention_bias"), config.yes("mlp_bias")
    return decoder(config, kind="encoder", qkv_bias=bias, o_bias=bias, mlp_bias=mlp, lm_head_bias=mlp)


def _modernbert_decoder(config: Config) -> ModelShape:
    return replace(_modernbert(config), kind="decoder")


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


FAMILY = Family(
    "encoders",
    {
        "bert": _bert,
        "roberta": _bert,
        "xlm-roberta": _bert,
        "camembert": _bert,
        "data2vec-text": _bert,
        "ernie": _ernie,
        "megatron-bert": _norms_first,
        "xlm-roberta-xl": _norms_first,
        "roberta-prelayernorm": _roberta_prelayernorm,
        "distilbert": _distilbert,
        "electra": _electra,
        "mpnet": _mpnet,
        "deberta-v2": _deberta_v2,
        "esm": _esm,
        "nomic_bert": _nomic_bert,
        "gte": _gte,
        "eurobert": _eurobert,
        "modernbert": _modernbert,
        "modernbert-decoder": _modernbert_decoder,
    },
)
