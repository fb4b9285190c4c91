"""The model that GPT-NeoX's arguments describe. As in EleutherAI/gpt-neox ea7aefd (2026-05-19): names and what is taken where they are
absent in megatron/neox_arguments/neox_args.py, layers in megatron/model/transformer.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strategist.errors import shown
from strategist.facts.families.config import MAX_FFN, MAX_HEADS, MAX_TOKENS, MAX_VOCAB, MAX_WIDTH, Config
from strategist.facts.families.decoder import checked_heads
from strategist.facts.model import MAX_LAYERS, ModelShape, Norm, Position
from strategist.facts.sizes import of_bearable_size
from strategist.records import replace

NORMS: Mapping[str, Norm] = {
    "layernorm": "layernorm",
    "te_layernorm": "layernorm",
    "rmsnorm": "rmsnorm",
    "te_rmsnorm": "rmsnorm",
    "non_parametric_layernorm": "layernorm_nonparam",
}
POSITIONS: Mapping[str, Position] = {"rotary": "rope", "learned": "learned", "alibi": "alibi", "none": "none"}
PLAIN = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"}
GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
ATTENTION = ("global", "flash")
"""Layers whose queries see all that stands before them."""
DEFAULTS: Mapping[str, Any] = {
    "activation": "gelu",
    "make_vocab_size_divisible_by": 128,
    "mlp_multiple_of": 1,
    "model_parallel_size": 1,
    "norm": "layernorm",
    "pos_emb": "learned",
    "tokenizer_type": "GPT2BPETokenizer",
    "use_bias_in_attn_linear": True,
    "use_bias_in_mlp": True,
}
"""What the arguments are where these are absent."""
VOCABULARIES = {"GPT2BPETokenizer": 50257, "HFGPT2Tokenizer": 50258, "CharLevelTokenizer": 512}
"""Entries of tokenizers whose vocabulary is no file's choice; the second adds a padding token (megatron/tokenizer/tokenizer.py)."""
VOCABULARY_FILES = {"20B_tokenizer.json": 50277}
"""Entries of the file that GPT-NeoX brings (README.md) for HFTokenizer: padded for two ranks of the model they are the 50,432 of
GPT-NeoX-20B's and Pythia's published weights."""
ONLY: Mapping[str, Any] = {
    "moe_num_experts": 1,
    "num_unique_layers": 0,
    "opt_pos_emb_offset": 0,
    "train_impl": "normal",
    "use_qk_layernorm": False,
}
"""Arguments that anything else makes another model of, or another training: experts, shared layers, a second model."""


def shape_from_neox(values: Mapping[str, Any], flag: str) -> ModelShape:
    """The decoder that arguments describe, by their names with underscores.

    Raises InputError MISSING, TYPE, TOO_SMALL, TOO_LARGE, RANGE, CHOICE and DIVISIBILITY with the argument; more problems are in
    `also`. The table of the vocabulary is padded as GPT-NeoX pads it, for the ranks that share it.
    """
    config = Config(values, flag, path="arguments", class_defaults=DEFAULTS)
    for name, usual in ONLY.items():
        config.only(name, usual)
    heads, max_seq = (
        config.integer("num_attention_heads", high=MAX_HEADS),
        config.integer("max_position_embeddings", high=MAX_TOKENS),
    )
    hidden, bias = config.integer("hidden_size", high=MAX_WIDTH), config.yes("use_bias_in_attn_linear")
    act, pos = config.chosen("activation", PLAIN | GATED), config.chosen("pos_emb", POSITIONS)
    layers, window = (
        config.integer("num_layers", high=MAX_LAYERS),
        config.optional("sliding_window_width", high=MAX_TOKENS),
    )
    _check_layers(config)
    shape = checked_heads(
        config,
        ("num_attention_heads", "num_kv_heads"),
        0,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=config.optional("num_kv_heads", high=MAX_HEADS) or heads,
        ffn_hidden=_width(config, hidden),
        vocab=_vocabulary(config),
        tied=not config.yes("no_weight_tying"),
        max_seq=max_seq,
        pos=pos,
        pos_rows=max_seq if pos == "learned" else 0,
        norm=config.chosen("norm", NORMS),
        parallel_block=config.yes("gpt_j_residual"),
        mlp_gated=config.word("activation") in GATED,
        mlp_act=act,
        mlp_bias=config.yes("use_bias_in_mlp"),
        qkv_bias=bias,
        o_bias=bias,
        **({} if window is None else {"window": window, "full_every": 0}),
    )
    named = replace(shape, name="gpt-neox", family="gpt-neox", source=f"GPT-NeoX's arguments given with {flag}")
    return of_bearable_size(named, flag)


def _check_layers(config: Config) -> None:
    """A problem for layers that are no plain attention: lists of kinds, each with how often they are repeated."""
    given = config.values.get("attention_config")
    kinds = {kind for item in given or () for kind in _kinds(item)} if isinstance(given, (list, tuple)) else set()
    other = next((kind for kind in sorted(kinds) if kind not in ATTENTION), None)
    if other is not None:
        rule = f"names layers of the kind {shown(other)!r}, which is not read"
        config.refuse("CHOICE", "attention_config", rule, value=other, hint="Name a model with --model.")


def _kinds(item: Any) -> list[str]:
    """The kinds of layers that one item names: a word, or a list of them and a number."""
    found = item[0] if isinstance(item, (list, tuple)) and item else item
    return [str(kind) for kind in found] if isinstance(found, (list, tuple)) else [str(found)]


def _width(config: Config, hidden: int) -> int:
    """Width of what the second matrix of a feed-forward part reads: of a gated one a third of what is said, so that both have as many
    weights; rounded up (ParallelMLP)."""
    said = config.optional("intermediate_size", high=MAX_FFN) or _expanded(config, hidden)
    width = int(said * 2 / 3) // 2 if config.word("activation") in GATED else said
    multiple = config.optional("mlp_multiple_of", high=MAX_FFN) or 1
    return -(-width // multiple) * multiple


def _expanded(config: Config, hidden: int) -> int:
    """Four times the width, or as many times as is said."""
    factor = config.values.get("expansion_factor")
    if factor is None:
        return 4 * hidden
    if not isinstance(factor, (int, float)) or not 1 <= factor * hidden <= MAX_FFN:
        config.refuse("RANGE", "expansion_factor", f"must be a number that makes a width of 1 to {MAX_FFN}")
        return hidden
    return int(factor * hidden)


def _vocabulary(config: Config) -> int:
    """Rows of the table of embeddings: the entries of a tokenizer that is known, made a multiple (_vocab_size_with_padding)."""
    kind, file = config.word("tokenizer_type"), str(config.values.get("vocab_file", "")).rpartition("/")[2]
    entries = VOCABULARY_FILES.get(file) if kind == "HFTokenizer" else VOCABULARIES.get(kind)
    if entries is None:
        rule = f"names {shown(kind)} and no vocabulary whose entries are known"
        config.refuse("MISSING", "tokenizer_type", rule, value=kind, hint="Name the model with --model.")
        return 1
    ranks = config.optional("model_parallel_size", high=MAX_HEADS, low=0) or 1
    multiple = ranks * (config.optional("make_vocab_size_divisible_by", high=MAX_VOCAB) or 1)
    return -(-entries // multiple) * multiple
