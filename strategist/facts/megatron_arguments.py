"""The model that Megatron-LM's arguments describe. As in Megatron-LM d98e8a6 (2026-08-22), megatron/training/arguments.py: names and
what is taken where they are absent."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, TypeVar

from strategist.facts.families.config import MAX_FFN, MAX_HEADS, MAX_TOKENS, MAX_VOCAB, MAX_WIDTH, Config
from strategist.facts.families.decoder import checked_heads, experts, with_experts
from strategist.facts.model import MAX_LAYERS, ModelShape, Norm, Position
from strategist.facts.model_parts import Mla
from strategist.facts.model_rows import rows_called
from strategist.facts.sizes import of_bearable_size
from strategist.records import replace

NORMS: Mapping[str, Norm] = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
POSITIONS: Mapping[str, Position] = {
    "learned_absolute": "learned",
    "rope": "rope",
    "mrope": "rope",
    "yarn": "rope",
    "none": "none",
}
DEFAULTS = {
    "--moe-router-topk": 2,
    "--normalization": "LayerNorm",
    "--num-query-groups": 1,
    "--position-embedding-type": "learned_absolute",
}
"""What the parser takes where these are absent."""

Word = TypeVar("Word")
LONGEST = 500
"""Characters of a pattern of layers beyond which nobody wrote it."""

OTHERS = (
    "--experimental-attention-variant", "--hybrid-layer-pattern", "--hybrid-override-pattern", "--is-hybrid-model",
    "--mlp-type", "--moe-latent-size", "--mtp-num-layers", "--spec", "--window-size",
)  # fmt: skip
"""Arguments that make layers of another kind, which is not read from them."""


def shape_from_arguments(said: Mapping[str, str], flag: str) -> ModelShape:
    """The decoder that arguments describe; switches have an empty word.

    Raises InputError MISSING, TYPE, TOO_SMALL, TOO_LARGE, RANGE, CHOICE and DIVISIBILITY with the argument; more problems are in
    `also`. The vocabulary is that of a tokenizer that the catalogue knows where no argument says it; its padding is not counted.
    """
    values = {name: _value(word) for name, word in said.items()}
    config = Config(values, flag, path="arguments", class_defaults=DEFAULTS)
    for name in OTHERS:
        if config.has(name):
            config.refuse(
                "CHOICE", name, "makes layers that are not read from arguments", hint="Name the model with --model."
            )
    hidden = config.integer("--hidden-size", high=MAX_WIDTH)
    is_gated, has_biases = "--swiglu" in said, "--disable-bias-linear" not in said
    shape = _with_heads(
        config,
        layers=config.integer("--num-layers", high=MAX_LAYERS),
        hidden=hidden,
        vocab=_vocabulary(config),
        ffn_hidden=config.optional("--ffn-hidden-size", high=MAX_FFN) or _usual_width(hidden, is_gated=is_gated),
        max_seq=config.integer("--max-position-embeddings", high=MAX_TOKENS),
        tied="--untie-embeddings-and-output-weights" not in said,
        norm=_word(config, "--normalization", NORMS),
        mlp_gated=is_gated,
        mlp_act="silu" if is_gated else "gelu",
        mlp_bias=has_biases,
        o_bias=has_biases,
        qkv_bias=has_biases or "--add-qkv-bias" in said,
    )
    shape = _with_positions(config, shape)
    shape = _with_experts(config, shape) if config.has("--num-experts") else shape
    config.settle()
    named = replace(shape, name="megatron", family="megatron", source=f"Megatron-LM's arguments given with {flag}")
    return of_bearable_size(named, flag)


def _value(word: str) -> Any:
    return True if word == "" else int(word) if word.isdecimal() else word


def _vocabulary(config: Config) -> int:
    """Entries of the vocabulary: said, those of GPT-2's tokenizer, or of a model of the catalogue that a tokenizer is named after."""
    found = config.optional("--vocab-size", "--padded-vocab-size", high=MAX_VOCAB)
    if found is not None:
        return found
    kind, model = config.values.get("--tokenizer-type"), config.values.get("--tokenizer-model")
    named = {"GPT2BPETokenizer": "gpt2", "HuggingFaceTokenizer": str(model)}.get(str(kind))
    known = {int(row["vocab"]) for row in rows_called(named)} if named else set()
    if len(known) != 1:
        hint = "Add it, or name the model with --model."
        config.refuse("MISSING", "--vocab-size", "is missing, and the catalogue knows no such tokenizer", hint=hint)
        return 1
    return known.pop()


def _usual_width(hidden: int, *, is_gated: bool) -> int:
    """What the parser fills in: four times the width, of a gated part two thirds of it in whole multiples of 64."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if is_gated else 4 * hidden


def _word(config: Config, name: str, known: Mapping[str, Word]) -> Word:
    usual = str(DEFAULTS[name])
    word = config.word(name) or usual
    if word not in known:
        config.refuse("CHOICE", name, f"must be one of {', '.join(known)}", value=word)
    return known.get(word, known[usual])


def _with_heads(config: Config, **fields: Any) -> ModelShape:
    """The shape with its attention: grouped queries, or latent attention, whose parts have widths of their own."""
    heads = config.integer("--num-attention-heads", high=MAX_HEADS)
    groups = config.optional("--num-query-groups", high=MAX_HEADS)
    kv_heads = groups if "--group-query-attention" in config.values else heads
    width, mla = config.optional("--kv-channels", high=MAX_WIDTH) or 0, None
    if "--multi-latent-attention" in config.values:
        mla = Mla(
            q_lora=config.optional("--q-lora-rank", high=MAX_WIDTH) or 0,
            kv_lora=config.integer("--kv-lora-rank", high=MAX_WIDTH),
            qk_nope=config.integer("--qk-head-dim", high=MAX_WIDTH),
            qk_rope=config.integer("--qk-pos-emb-head-dim", high=MAX_WIDTH),
            v_dim=config.integer("--v-head-dim", high=MAX_WIDTH),
        )
        kv_heads, width = heads, mla.qk_nope + mla.qk_rope
    elif "--qk-layernorm" in config.values:
        fields["qk_norm"] = "head" if fields["norm"] == "rmsnorm" else "head_ln"
    if not width:
        config.divisible(fields["hidden"], "--hidden-size", heads, "--num-attention-heads")
    names = ("--num-attention-heads", "--num-query-groups")
    return checked_heads(config, names, width, heads=heads, kv_heads=kv_heads, mla=mla, **fields)


def _with_positions(config: Config, shape: ModelShape) -> ModelShape:
    """Rows of learned positions, unless queries and keys are rotated."""
    pos = _word(config, "--position-embedding-type", POSITIONS)
    if "--use-rotary-position-embeddings" in config.values:
        pos = "rope"
    return replace(shape, pos=pos, pos_rows=shape.max_seq if pos == "learned" else 0)


def _with_experts(config: Config, shape: ModelShape) -> ModelShape:
    """Experts in the layers that the pattern names, all of them where none is given; two for each token unless said otherwise."""
    shared = config.optional("--moe-shared-expert-intermediate-size", high=MAX_FFN) or 0
    moe = experts(
        config,
        "--num-experts",
        chosen_key="--moe-router-topk",
        group_keys=("--moe-router-num-groups", "--moe-router-group-topk"),
        ffn=config.optional("--moe-ffn-hidden-size", high=MAX_FFN) or shape.ffn_hidden,
        shared_ffn=shared,
        shared_gate=bool(shared) and "--moe-shared-expert-gate" in config.values,
    )
    return with_experts(config, shape, moe, _placed(config, shape.layers))


def _placed(config: Config, layers: int) -> list[bool]:
    """Which layers have experts: the first of every so many, or as a list in Python's words says, such as ([0]*3+[1]*58)."""
    found = config.values.get("--moe-layer-freq", 1)
    if type(found) is int and found > 0:
        return [number % found == 0 for number in range(layers)]
    placed = _spelled(str(found))
    if len(placed) != layers:
        rule = f"must be a number, or lists of 0 and 1 for {layers} layers, such as [0]*1+[1]*{layers - 1}"
        config.refuse("CHOICE", "--moe-layer-freq", rule, value=str(found)[:80])
        return [True] * layers
    return placed


def _spelled(text: str) -> list[bool]:
    """What sums and multiples of lists spell; nothing for any other text, which is never run."""
    if len(text) > LONGEST:
        return []
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):  # the latter of a null byte
        return []
    return _list_of(tree.body) or []


def _list_of(node: ast.expr) -> list[bool] | None:
    match node:
        case ast.List(elts):
            return _flags(elts)
        case ast.BinOp(left, ast.Add(), right):
            one, other = _list_of(left), _list_of(right)
            return None if one is None or other is None else (one + other)[: MAX_LAYERS + 1]
        case ast.BinOp(left, ast.Mult(), ast.Constant(int(times))) if times <= MAX_LAYERS:
            one = _list_of(left)
            return None if one is None else (one * times)[: MAX_LAYERS + 1]
    return None


def _flags(items: list[ast.expr]) -> list[bool] | None:
    """The values of a list of 0 and 1."""
    values = [item.value for item in items if isinstance(item, ast.Constant)]
    return [value == 1 for value in values] if len(values) == len(items) and set(values) <= {0, 1} else None
