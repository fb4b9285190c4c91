"""What a model is made of: one flat, frozen record per architecture, and the layers it stacks.

The record holds what a configuration file says. Parameter counts, FLOPs and bytes are functions of it
(`facts/parameters.py`, `memory/`, `timing/`), never fields that somebody computed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, TypeVar

Kind = Literal[
    "decoder", "encoder", "encdec", "encdec-audio", "vit", "hybrid", "ssm", "dual-encoder", "dit", "cnn", "unet", "module"
]  # fmt: skip
Mixer = Literal["attention", "sliding", "mla", "mamba1", "mamba2", "gated-delta", "cross", "none"]
Ffn = Literal["dense", "moe", "none"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Routed experts. `ffn` is the hidden width of one expert, `shared_ffn` the total width of the shared ones."""

    experts: int
    top_k: int
    ffn: int
    layers: int
    first_dense: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    latent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1); `q_lora` 0 means a full query matrix."""

    q_lora: int
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_dim: int
    index_heads: int = 0
    index_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssm:
    """A state-space or linear-attention mixer; only the fields of its `kind` are set.

    mamba1: expand, state, dt_rank, conv. mamba2: heads, head_dim, state, groups, conv. gated-delta: k_heads, v_heads,
    k_dim, v_dim, conv.
    """

    kind: Literal["mamba1", "mamba2", "gated-delta"]
    conv: int
    expand: int = 0
    state: int = 0
    dt_rank: int = 0
    heads: int = 0
    head_dim: int = 0
    groups: int = 0
    k_heads: int = 0
    v_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    inner_norms: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How many sub-blocks of each sort a hybrid stacks, spread evenly."""

    attention: int
    linear: int
    mlp: int
    moe: int
    norms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One architecture. Widths count elements, `layers` counts decoder (or only) layers, `max_seq` counts tokens.

    `window` is the span of sliding or chunked layers (None: all layers attend to everything) and `full_every` n makes
    every n-th layer attend to everything (0: none does). `extra_parameters` are weights that no other field explains;
    `extra` keeps what only one family has, for its own parameter formula.
    """

    name: str
    family: str
    kind: Kind
    layers: int
    hidden: int
    vocab: int
    formula: str = "stack"
    enc_layers: int = 0
    ffn_hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    tied: bool = False
    emb_dim: int = 0
    max_seq: int = 0
    pos: str = "rope"
    pos_rows: int = 0
    norm: str = "rmsnorm"
    norms_per_layer: int = 2
    final_norm: bool = True
    embed_norm: bool = False
    qk_norm: str = ""
    mlp_gated: bool = True
    mlp_act: str = "silu"
    mlp_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    lm_head_bias: bool = False
    attn_sinks: bool = False
    attn_gate: bool = False
    window: int | None = None
    full_every: int = 1
    moe: Moe | None = None
    mla: Mla | None = None
    ssm: Ssm | None = None
    mix: Mix | None = None
    extra_parameters: int = 0
    extra: tuple[tuple[str, int], ...] = ()
    parameters_stated: int | None = None
    other_tower_parameters: int = 0
    basis: Literal["measured", "derived", "datasheet", "assumed"] = "datasheet"
    source: str = ""
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One sort of layer: how it mixes tokens, how it transforms each token, how many norms it has."""

    mixer: Mixer
    ffn: Ffn
    cross: bool = False


@cache
def layer_sequence(shape: ModelShape) -> tuple[LayerKind, ...]:
    """The layers in order, encoder first; `len` is `enc_layers + layers`."""
    if shape.mix is not None:
        return _hybrid_sequence(shape)
    encoder = (LayerKind("attention", "dense"),) * shape.enc_layers
    return encoder + tuple(
        LayerKind(_mixer(shape, i), _ffn(shape, i), shape.enc_layers > 0) for i in range(shape.layers)
    )


def layer_counts(shape: ModelShape) -> Counter[LayerKind]:
    """How many layers there are of each sort."""
    return Counter(layer_sequence(shape))


def _mixer(shape: ModelShape, index: int) -> Mixer:
    if shape.ssm is not None:
        return shape.ssm.kind
    if shape.mla is not None:
        return "mla"
    if shape.window is None:
        return "attention"
    is_full = shape.full_every > 0 and (index + 1) % shape.full_every == 0
    return "attention" if is_full else "sliding"


def _ffn(shape: ModelShape, index: int) -> Ffn:
    if shape.ssm is not None:
        return "none"
    moe = shape.moe
    if moe is None:
        return "dense" if shape.ffn_hidden else "none"
    if index < moe.first_dense:
        return "dense"
    step = max(1, round((shape.layers - moe.first_dense) / moe.layers)) if moe.layers else 0
    placed = (index - moe.first_dense + 1) % step == 0 if step else False
    return "moe" if placed and (index - moe.first_dense + 1) // step <= moe.layers else "dense"


def _hybrid_sequence(shape: ModelShape) -> tuple[LayerKind, ...]:
    """Spread the rarer mixers and the expert layers evenly over the stack."""
    mix, ssm = shape.mix, shape.ssm
    if mix is None or ssm is None:
        return ()
    mixers: list[Mixer] = _spread(mix.attention, "attention", mix.linear, ssm.kind)
    ffns: list[Ffn] = _spread(mix.moe, "moe", mix.mlp, "dense")
    if mix.attention + mix.linear == shape.layers:  # a mixer and a feed-forward part in every layer
        return tuple(LayerKind(m, f) for m, f in zip(mixers, ffns + ["none"] * (len(mixers) - len(ffns)), strict=True))
    parts = [LayerKind(m, "none") for m in mixers], [LayerKind("none", f) for f in ffns]
    return tuple(_spread_sequences(*parts))


def _spread(rare: int, rare_word: T, common: int, common_word: T) -> list[T]:
    total = rare + common
    return (
        [rare_word if (i + 1) * rare // total > i * rare // total else common_word for i in range(total)]
        if total
        else []
    )


def _spread_sequences(a: list[T], b: list[T]) -> list[T]:
    """Merge two sequences so that both run evenly through the result."""
    total, merged, take_a, take_b = len(a) + len(b), [], iter(a), iter(b)
    for i in range(total):
        from_a = (i + 1) * len(a) // total > i * len(a) // total
        merged.append(next(take_a) if from_a else next(take_b))
    return merged
