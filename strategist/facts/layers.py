"""What one layer of each kind is made of: its matrices and its vectors. Parameters, FLOPs, time and memory all read this.

A `Matrix` says how tensor parallelism cuts it: "column" cuts the outputs, "row" cuts the inputs, "whole" keeps a copy on
every rank. Cuts follow Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from strategist.facts.model import Heads, LayerKind, Mla, ModelShape, Moe, Norm, QkNorm, Ssm

Cut = Literal["column", "row", "whole"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear map of `inputs` to `outputs`. `copies` of it are stored and `used` of them see each token (experts)."""

    name: str
    inputs: int
    outputs: int
    cut: Cut
    bias: bool = False
    copies: int = 1
    used: int = 1

    @property
    def weights(self) -> int:
        """Elements of one copy, without the bias."""
        return self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        """Elements of all copies, biases included."""
        return self.copies * (self.weights + (self.outputs if self.bias else 0))

    @property
    def is_expert(self) -> bool:
        """True for routed experts, which expert parallelism spreads."""
        return self.name.startswith("expert")


@dataclass(frozen=True, slots=True)
class Vector:
    """A small weight such as a norm, a sink or a convolution; `cut` is true when tensor parallelism splits it."""

    name: str
    size: int
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer, and how many of its norms work on the model width."""

    matrices: tuple[Matrix, ...]
    vectors: tuple[Vector, ...]
    norms: int

    @property
    def parameters(self) -> int:
        """All elements of the layer."""
        return sum(m.parameters for m in self.matrices) + sum(v.size for v in self.vectors)

    @property
    def active_parameters(self) -> int:
        """Elements that one token meets: experts it is not routed to are left out."""
        return self.parameters - sum(m.parameters - m.parameters // m.copies * m.used for m in self.matrices)


@cache
def build_layer(shape: ModelShape, kind: LayerKind) -> Layer:
    """The layer of one kind in this model."""
    mixer, mixer_vectors = _mixer(shape, kind)
    cross, cross_vectors = _cross(shape) if kind.cross else ((), ())
    ffn, ffn_vectors = _ffn(shape, kind)
    norms = _norm_count(shape, kind)
    own_vectors = (
        Vector("norms", norms * norm_size(shape, shape.hidden)),
        Vector("extra", shape.layer_extra_parameters),
    )
    vectors = tuple(v for v in (*mixer_vectors, *cross_vectors, *ffn_vectors, *own_vectors) if v.size)
    return Layer(mixer + cross + ffn, vectors, norms)


_NORM_WEIGHTS: Mapping[Norm, int] = {
    "rmsnorm": 1, "layernorm": 2, "layernorm_nobias": 1, "layernorm_nonparam": 0, "batchnorm": 2, "none": 0
}  # fmt: skip


def norm_size(shape: ModelShape, width: int) -> int:
    """Weights of one norm over `width` elements."""
    return _NORM_WEIGHTS[shape.norm] * width


def _norm_count(shape: ModelShape, kind: LayerKind) -> int:
    if shape.mix is not None:
        return sum(part != "none" for part in (kind.mixer, kind.ffn))
    return shape.norms_per_layer + (1 if kind.cross else 0)


def _mixer(shape: ModelShape, kind: LayerKind) -> tuple[tuple[Matrix, ...], tuple[Vector, ...]]:
    if kind.mixer in ("attention", "sliding"):
        return _attention(shape, is_full=kind.mixer == "attention")
    if kind.mixer == "mla" and shape.mla is not None:
        return _latent_attention(shape, shape.mla)
    if shape.ssm is not None and kind.mixer == shape.ssm.kind:
        build = {"mamba1": _mamba1, "mamba2": _mamba2, "gated-delta": _gated_delta}[shape.ssm.kind]
        return build(shape.hidden, shape.ssm)
    return (), ()


def _attention(shape: ModelShape, is_full: bool = True) -> tuple[tuple[Matrix, ...], tuple[Vector, ...]]:
    heads = _heads(shape, is_full)
    h, width = shape.hidden, shape.v_dim or heads.head_dim
    q, k, v = shape.heads * heads.head_dim, heads.kv_heads * heads.head_dim, heads.kv_heads * width
    query = q * (2 if shape.attn_gate else 1)
    values = () if heads.shared_kv else (Matrix("v", h, v, "column"),)
    output = Matrix("o", shape.heads * width, h, "row", shape.o_bias)
    biases = query + (k if shape.k_bias else 0) + (0 if heads.shared_kv else v)
    vectors = (
        Vector("qkv_bias", biases if shape.qkv_bias else 0, cut=True),
        Vector("sinks", shape.heads if heads.sinks else 0, cut=True),
        Vector("qk_norm", _qk_norm_size(shape, heads), cut=shape.qk_norm in ("full", "per_head")),
    )
    return (Matrix("q", h, query, "column"), Matrix("k", h, k, "column"), *values, output), vectors


def _heads(shape: ModelShape, is_full: bool) -> Heads:
    """The key-value heads of one sort of layer."""
    if is_full and shape.full_heads is not None:
        return shape.full_heads
    return Heads(kv_heads=shape.kv_heads, head_dim=shape.head_dim, sinks=shape.attn_sinks)


def _qk_norm_size(shape: ModelShape, heads: Heads) -> int:
    every_head = (shape.heads + heads.kv_heads) * heads.head_dim
    sizes: Mapping[QkNorm, int] = {
        "": 0,
        "l2_noweight": 0,
        "head": 2 * heads.head_dim,
        "head_ln": 4 * heads.head_dim,
        "full": every_head,
        "per_head": every_head,
    }
    return sizes[shape.qk_norm]


def _cross(shape: ModelShape) -> tuple[tuple[Matrix, ...], tuple[Vector, ...]]:
    matrices, vectors = _attention(shape)
    renamed = tuple(Matrix(f"cross_{m.name}", m.inputs, m.outputs, m.cut, m.bias) for m in matrices)
    return renamed, tuple(Vector(f"cross_{v.name}", v.size, v.cut) for v in vectors)


def _latent_attention(shape: ModelShape, mla: Mla) -> tuple[tuple[Matrix, ...], tuple[Vector, ...]]:
    h, heads, qk = shape.hidden, shape.heads, mla.qk_nope + mla.qk_rope
    query = (
        (Matrix("q_down", h, mla.q_lora, "whole", shape.qkv_bias), Matrix("q_up", mla.q_lora, heads * qk, "column"))
        if mla.q_lora
        else (Matrix("q", h, heads * qk, "column"),)
    )
    up = () if mla.shared_kv else (Matrix("kv_up", mla.kv_lora, heads * (mla.qk_nope + mla.v_dim), "column"),)
    down = Matrix("kv_down", h, mla.kv_lora + mla.qk_rope, "whole", shape.qkv_bias)
    latent = mla.q_lora + mla.kv_lora + (mla.qk_rope if mla.shared_kv else 0)
    vectors = (
        Vector("latent_norms", latent),
        Vector("index_norm", 2 * mla.index_dim if mla.index_heads else 0),
        Vector("sinks", heads if shape.attn_sinks else 0, cut=True),
    )
    return (*query, down, *up, *_latent_output(shape, mla), *_index(shape, mla)), vectors


def _latent_output(shape: ModelShape, mla: Mla) -> tuple[Matrix, ...]:
    """One matrix, or block-diagonal maps of the head groups followed by one matrix that mixes them."""
    width = shape.heads * mla.v_dim
    if not mla.o_rank:
        return (Matrix("o", width, shape.hidden, "row", shape.o_bias),)
    block = Matrix("o_down", width // mla.o_groups, mla.o_rank, "column", copies=mla.o_groups, used=mla.o_groups)
    return block, Matrix("o_up", mla.o_groups * mla.o_rank, shape.hidden, "row", shape.o_bias)


def _index(shape: ModelShape, mla: Mla) -> tuple[Matrix, ...]:
    """The lightning indexer that picks which tokens sparse attention looks at (DeepSeek-V3.2)."""
    if not mla.index_heads:
        return ()
    return (
        Matrix("index_q", mla.q_lora, mla.index_heads * mla.index_dim, "whole"),
        Matrix("index_k", shape.hidden, mla.index_dim, "whole"),
        Matrix("index_weights", shape.hidden, mla.index_heads, "whole"),
    )


def _mamba1(h: int, ssm: Ssm) -> tuple[tuple[Matrix, ...], tuple[Vector, ...]]:
    inner, projected = ssm.expand * h, ssm.dt_rank + 2 * ssm.state
    matrices = (
        Matrix("in", h, 2 * inner, "column"),
        Matrix("x", inner, projected, "row"),
        Matrix("dt", ssm.dt_rank, inner, "column", bias=True),
        Matrix("out", inner, h, "row"),
    )
    vectors = (
        Vector("conv", inner * ssm.conv + inner, cut=True),
        Vector("state", inner * ssm.state + inner, cut=True),
        Vector("inner_norms", projected if ssm.inner_norms else 0),
    )
    return matrices, vectors


def _mamba2(h: int, ssm: Ssm) -> tuple[tuple[Matrix, ...], tuple[Vector, ...]]:
    inner = ssm.heads * ssm.head_dim
    channels = inner + 2 * ssm.groups * ssm.state
    matrices = (Matrix("in", h, inner + channels + ssm.heads, "column"), Matrix("out", inner, h, "row"))
    vectors = (
        Vector("conv", channels * ssm.conv + channels, cut=True),
        Vector("state", 3 * ssm.heads, cut=True),
        Vector("gate_norm", inner, cut=True),
    )
    return matrices, vectors


def _gated_delta(h: int, ssm: Ssm) -> tuple[tuple[Matrix, ...], tuple[Vector, ...]]:
    values = ssm.v_heads * ssm.v_dim
    channels = 2 * ssm.k_heads * ssm.k_dim + values
    matrices = (
        Matrix("qkvz", h, channels + values, "column"),
        Matrix("beta", h, 2 * ssm.v_heads, "column"),
        Matrix("out", values, h, "row"),
    )
    vectors = (
        Vector("conv", channels * ssm.conv, cut=True),
        Vector("state", 2 * ssm.v_heads, cut=True),
        Vector("gate_norm", ssm.v_dim),
    )
    return matrices, vectors


def _ffn(shape: ModelShape, kind: LayerKind) -> tuple[tuple[Matrix, ...], tuple[Vector, ...]]:
    if kind.ffn == "dense":
        return _mlp(shape, shape.ffn_hidden, shape.mlp_bias), ()
    if kind.ffn == "moe" and shape.moe is not None:
        return _experts(shape, shape.moe)
    return (), ()


def _mlp(shape: ModelShape, width: int, bias: bool, prefix: str = "") -> tuple[Matrix, ...]:
    gate = (Matrix(f"{prefix}gate", shape.hidden, width, "column", bias),) if shape.mlp_gated else ()
    up = Matrix(f"{prefix}up", shape.hidden, width, "column", bias)
    return (*gate, up, Matrix(f"{prefix}down", width, shape.hidden, "row", bias))


def _experts(shape: ModelShape, moe: Moe) -> tuple[tuple[Matrix, ...], tuple[Vector, ...]]:
    h, width = shape.hidden, moe.latent or shape.hidden
    names = (("expert_gate", "expert_up") if shape.mlp_gated else ("expert_up",)) + ("expert_down",)
    sizes = [(moe.ffn, width) if name == "expert_down" else (width, moe.ffn) for name in names]
    experts = tuple(
        Matrix(name, i, o, "row" if name == "expert_down" else "column", moe.expert_bias, moe.experts, moe.top_k)
        for name, (i, o) in zip(names, sizes, strict=True)
    )
    latent = (
        (Matrix("latent_down", h, moe.latent, "whole"), Matrix("latent_up", moe.latent, h, "whole"))
        if moe.latent
        else ()
    )
    shared = _mlp(shape, moe.shared_ffn, False, "shared_") if moe.shared_ffn else ()
    shared_gate = (Matrix("shared_gate_weight", h, 1, "whole"),) if moe.shared_gate and moe.shared_ffn else ()
    router = Matrix("router", h, moe.experts, "whole", bias=moe.router_bias)
    return (router, *experts, *latent, *shared, *shared_gate), ()
