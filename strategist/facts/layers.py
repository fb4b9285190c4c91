"""What one layer of each kind is made of: its matrices and its vectors. Parameters, FLOPs, time and memory read this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache

from strategist.facts.attention import attention, cross_attention, latent_attention
from strategist.facts.convolutions import block_weights, blocks
from strategist.facts.model import Adapters, LayerKind, ModelShape, Moe, Norm, Ssm, layer_counts
from strategist.facts.weights import ADAPTER_ENDS, Matrix, Vector, Weights
from strategist.records import dataclass, replace

__all__ = ["KEYS_OF_INPUTS", "Layer", "Matrix", "Vector", "build_layer", "norm_size"]

KEYS_OF_INPUTS = ("cross_k", "cross_v")
"""Matrices of a decoder that read what the encoder in front of it gave (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.3)."""


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
        return self.parameters - sum(
            m.parameters - m.parameters // m.copies * m.used for m in self.matrices if m.copies
        )


def sides_divide(shape: ModelShape, by: int) -> bool:
    """Whether `by` divides both sides of every matrix of the layers, (inputs, outputs)."""
    every = (matrix for kind in layer_counts(shape) for matrix in build_layer(shape, kind).matrices)
    return all(matrix.inputs % by == 0 and matrix.outputs % by == 0 for matrix in every)


@cache
def build_layer(shape: ModelShape, kind: LayerKind) -> Layer:
    """The layer of one kind in this model."""
    if kind.mixer == "convolution":
        return Layer(*block_weights(blocks(shape.extra)[kind.block]), norms=0)
    mixer, mixer_vectors = _mixer(shape, kind)
    cross, cross_vectors = cross_attention(shape) if kind.cross else ((), ())
    ffn, ffn_vectors = _ffn(shape, kind)
    norms = _norm_count(shape, kind)
    own_vectors = (
        Vector("norms", norms * norm_size(shape, shape.hidden)),
        Vector("extra", shape.layer_extra_parameters),
    )
    vectors = tuple(v for v in (*mixer_vectors, *cross_vectors, *ffn_vectors, *own_vectors) if v.size)
    matrices = mixer + cross + ffn
    if kind.cross:
        matrices = tuple(m if m.name in KEYS_OF_INPUTS else replace(m, of_targets=True) for m in matrices)
    return Layer(
        matrices if shape.adapters is None else (*matrices, *_adapters(shape.adapters, matrices)), vectors, norms
    )


def _adapters(adapters: Adapters, matrices: tuple[Matrix, ...]) -> Iterator[Matrix]:
    """The two factors beside each matrix that has an adapter."""
    first, second = ADAPTER_ENDS
    for matrix in matrices:
        if matrix.name in adapters.targets:
            yield Matrix(matrix.name + first, matrix.inputs, adapters.rank, "whole")
            yield Matrix(matrix.name + second, adapters.rank, matrix.outputs, "whole")


_NORM_WEIGHTS: Mapping[Norm, int] = {
    "rmsnorm": 1, "layernorm": 2, "layernorm_nobias": 1, "layernorm_nonparam": 0, "rmsnorm_nonparam": 0,
    "batchnorm": 2, "none": 0,
}  # fmt: skip


def norm_size(shape: ModelShape, width: int) -> int:
    """Weights of one norm over `width` elements."""
    return _NORM_WEIGHTS[shape.norm] * width


def _norm_count(shape: ModelShape, kind: LayerKind) -> int:
    if shape.mix is not None:
        return sum(part != "none" for part in (kind.mixer, kind.ffn))
    return shape.norms_per_layer + (1 if kind.cross else 0)


def _mixer(shape: ModelShape, kind: LayerKind) -> Weights:
    if kind.mixer in ("attention", "sliding"):
        return attention(shape, is_full=kind.mixer == "attention")
    if kind.mixer == "mla" and shape.mla is not None:
        return latent_attention(shape, shape.mla)
    if shape.ssm is not None and kind.mixer == shape.ssm.kind:
        return _LINEAR[shape.ssm.kind](shape.hidden, shape.ssm)
    return (), ()


def _mamba1(h: int, ssm: Ssm) -> Weights:
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


def _mamba2(h: int, ssm: Ssm) -> Weights:
    inner = ssm.heads * ssm.head_dim
    channels = inner + 2 * ssm.groups * ssm.state
    matrices = (Matrix("in", h, inner + channels + ssm.heads, "column"), Matrix("out", inner, h, "row"))
    vectors = (
        Vector("conv", channels * ssm.conv + channels, cut=True),
        Vector("state", 3 * ssm.heads, cut=True),
        Vector("gate_norm", inner, cut=True),
    )
    return matrices, vectors


def _gated_delta(h: int, ssm: Ssm) -> Weights:
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


def _short_conv(h: int, ssm: Ssm) -> Weights:
    """A gated convolution over a few tokens (LFM2: transformers 5.23.0, models/lfm2/modeling_lfm2.py)."""
    return (Matrix("in", h, 3 * h, "column"), Matrix("out", h, h, "row")), (Vector("conv", h * ssm.conv, cut=True),)


def _lightning(h: int, ssm: Ssm) -> Weights:
    """Linear attention with a gate on its output (MiniMax-01, arXiv 2501.08313, section 2.2)."""
    inner = ssm.heads * ssm.head_dim
    matrices = (
        Matrix("qkv", h, 3 * inner, "column"),
        Matrix("output_gate", h, inner, "column"),
        Matrix("out", inner, h, "row"),
    )
    return matrices, (Vector("gate_norm", inner, cut=True),)


def _kimi_delta(h: int, ssm: Ssm) -> Weights:
    """Kimi Delta Attention: a gated delta rule that forgets each channel by itself, whose gates go through a narrow map (Kimi Team 2025, arXiv
    2510.26692, section 3; transformers 5.23.0, models/kimi_linear/modeling_kimi_linear.py)."""
    inner, rank = ssm.heads * ssm.head_dim, ssm.head_dim
    matrices = (
        Matrix("qkv", h, 3 * inner, "column"),
        Matrix("decay_in", h, rank, "whole"),
        Matrix("decay_out", rank, inner, "column"),
        Matrix("beta", h, ssm.heads, "column"),
        Matrix("gate_in", h, rank, "whole"),
        Matrix("gate_out", rank, inner, "column"),
        Matrix("out", inner, h, "row"),
    )
    vectors = (
        Vector("conv", 3 * inner * ssm.conv, cut=True),
        Vector("state", inner + ssm.heads, cut=True),
        Vector("gate_norm", ssm.head_dim),
    )
    return matrices, vectors


_LINEAR: Mapping[str, Callable[[int, Ssm], Weights]] = {
    "mamba1": _mamba1, "mamba2": _mamba2, "gated-delta": _gated_delta, "short-conv": _short_conv, "lightning": _lightning,
    "kimi-delta": _kimi_delta,
}  # fmt: skip


def _ffn(shape: ModelShape, kind: LayerKind) -> Weights:
    if kind.ffn == "dense":
        return _mlp(shape, shape.ffn_hidden, shape.mlp_bias), ()
    if kind.ffn == "moe" and shape.moe is not None:
        return _experts(shape, shape.moe)
    return (), ()


def _mlp(shape: ModelShape, width: int, bias: bool, prefix: str = "") -> tuple[Matrix, ...]:
    gate = (Matrix(f"{prefix}gate", shape.hidden, width, "column", bias),) if shape.mlp_gated else ()
    up = Matrix(f"{prefix}up", shape.hidden, width, "column", bias)
    return (*gate, up, Matrix(f"{prefix}down", width, shape.hidden, "row", bias))


def _experts(shape: ModelShape, moe: Moe) -> Weights:
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
