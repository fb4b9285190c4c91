"""Tensors that autograd keeps from forward to backward, per token and per sort of layer.

Each row is one tensor of strategist's own reference block (executor/models): what it is, its width in elements per
token, how parallelism cuts it, its format, and under which recompute policies it is kept. The list follows Korthikanti
et al. 2022 (arXiv 2205.05198, section 4), with flash attention (Dao et al. 2022, arXiv 2205.14135: only q, k, v, the
output and one log-sum-exp per head remain). Selective recompute keeps the results of matrix products, of attention and
of reductions (executor/steps/recompute.py); full recompute keeps the input of the layer alone.

cut "sequence": the residual stream, divided by tp only under sequence parallelism; "heads": divided by tp always;
"whole": gathered before a column-cut matrix or partial after a row-cut one, never divided.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal

from strategist.facts.layers import build_layer
from strategist.facts.model import LayerKind, Mla, ModelShape, Moe, Ssm
from strategist.records import dataclass

Cut = Literal["sequence", "heads", "whole"]
Part = Literal["mixer", "ffn", "inside", "product", "entry", "rest"]
Policy = Literal["none", "selective", "full"]

POLICIES: tuple[Policy, ...] = ("none", "selective", "full")
ALWAYS: tuple[Policy, ...] = POLICIES
PLAIN: tuple[Policy, ...] = ("none",)
COSTLY: tuple[Policy, ...] = ("none", "selective")
REPLACED: tuple[Policy, ...] = ("selective",)
"""Kept under every policy; only without recompute; unless recompute is full; only by selective recompute."""


@dataclass(frozen=True, slots=True)
class Saved:
    """One kept tensor: `width` elements per token; `is_float32` rows are statistics of 4 bytes; `policies` keep it. `part`
    says when backward is through with it: "product" feeds the last matrix of the feed-forward part, "inside" lies between
    its matrices, "entry" is what the layer begins with, "rest" is let go of with the whole layer. `cut_only` rows exist only
    where tensor parallelism cuts the layer."""

    name: str
    width: float
    cut: Cut
    policies: tuple[Policy, ...] = PLAIN
    is_float32: bool = False
    part: Part = "ffn"
    cut_only: bool = False


@cache
def saved_tensors(shape: ModelShape, kind: LayerKind) -> tuple[Saved, ...]:
    """The kept tensors of one layer, in forward order; the first is the layer's input, which every policy keeps."""
    mixer = _mixer(shape, kind) if kind.mixer != "none" else ()
    cross = _attention(shape, "cross_") if kind.cross else ()
    ffn = _ffn(shape, kind) if kind.ffn != "none" else ()
    mixed = tuple(replace(row, part="mixer") for row in (*mixer, *cross))
    first, *rest = (*mixed, *ffn)
    return (replace(first, policies=ALWAYS, part="entry"), *rest)


def _norm(shape: ModelShape, name: str) -> tuple[Saved, ...]:
    statistics = 1 if shape.norm == "rmsnorm" else 2
    return (
        Saved(f"{name}_input", shape.hidden, "sequence"),
        Saved(f"{name}_statistics", statistics, "sequence", is_float32=True),
    )


def _projected(shape: ModelShape, name: str, part: Part = "ffn") -> tuple[Saved, Saved]:
    """The result of a matrix that writes back to the residual stream, and the sum of the ranks' results; only selective
    recompute keeps them. What the feed-forward part gives is never asked for again: recomputation stops before it."""
    return (
        Saved(f"{name}_result", shape.hidden, "whole", REPLACED, part=part),
        Saved(f"{name}_sum", shape.hidden, "sequence", REPLACED, part=part, cut_only=True),
    )


def _mixer(shape: ModelShape, kind: LayerKind) -> tuple[Saved, ...]:
    if shape.mla is not None and kind.mixer == "mla":
        return (*_norm(shape, "mixer_norm"), *_latent(shape, shape.mla), *_projected(shape, "mixer"))
    if shape.ssm is not None and kind.mixer == shape.ssm.kind:
        return (*_norm(shape, "mixer_norm"), *_state_space(shape, shape.ssm), *_projected(shape, "mixer"))
    return _attention(shape, "")


def _attention(shape: ModelShape, prefix: str) -> tuple[Saved, ...]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    normed_qk = (Saved(f"{prefix}qk_norm_input", q + kv, "heads"),) if shape.qk_norm else ()
    return (
        *_norm(shape, f"{prefix}attention_norm"),
        Saved(f"{prefix}qkv_input", shape.hidden, "whole"),
        *normed_qk,
        Saved(f"{prefix}query", q, "heads", COSTLY),
        Saved(f"{prefix}key_value", 2 * kv, "heads", COSTLY),
        Saved(f"{prefix}attention_output", q, "heads", COSTLY),
        Saved(f"{prefix}log_sum_exp", shape.heads, "heads", COSTLY, is_float32=True),
        *_projected(shape, f"{prefix}attention"),
    )


def _latent(shape: ModelShape, mla: Mla) -> tuple[Saved, ...]:
    qk = shape.heads * (mla.qk_nope + mla.qk_rope)
    return (
        Saved("latent_input", shape.hidden, "whole"),
        Saved("latent_query", 2 * mla.q_lora, "whole"),
        Saved("latent_key_value", 2 * mla.kv_lora + mla.qk_rope, "whole"),
        Saved("query", qk, "heads"),
        Saved("key", qk, "heads"),
        Saved("value", shape.heads * mla.v_dim, "heads"),
        Saved("attention_output", shape.heads * mla.v_dim, "heads", COSTLY),
        Saved("log_sum_exp", shape.heads, "heads", COSTLY, is_float32=True),
    )


def _state_space(shape: ModelShape, ssm: Ssm) -> tuple[Saved, ...]:
    layer = build_layer(shape, LayerKind(ssm.kind, "none"))
    projected = sum(matrix.outputs for matrix in layer.matrices if matrix.name not in ("out", "o"))
    inner = next(matrix.inputs for matrix in layer.matrices if matrix.name == "out")
    return (
        Saved("mixer_input", shape.hidden, "whole"),
        Saved("projected", 2 * projected, "heads"),
        Saved("mixer_output", 2 * inner, "heads", COSTLY),
    )


def _ffn(shape: ModelShape, kind: LayerKind) -> tuple[Saved, ...]:
    norm = _norm(shape, "ffn_norm")
    if kind.ffn == "moe" and shape.moe is not None:
        return (*norm, *_experts(shape, shape.moe))
    mlp = _mlp(shape, shape.ffn_hidden, "heads")
    return (*norm, Saved("ffn_input", shape.hidden, "whole"), *mlp, *_projected(shape, "ffn", "rest"))


def _mlp(shape: ModelShape, width: float, cut: Cut, name: str = "ffn") -> tuple[Saved, ...]:
    """Gated: gate, up, act(gate) and their product; plain: the value before and after the activation. The backward of ReLU
    needs its result alone; the value before it is kept where selective recompute makes the result again."""
    product = Saved(f"{name}_product", width, cut, part="product")
    if not shape.mlp_gated and shape.mlp_act in ("relu", "relu2"):
        squared = (Saved(f"{name}_activated", width, cut, part="inside"),) if shape.mlp_act == "relu2" else ()
        return (Saved(f"{name}_hidden", width, cut, REPLACED, part="inside"), *squared, product)
    if not shape.mlp_gated:
        return (Saved(f"{name}_hidden", width, cut, COSTLY, part="inside"), product)
    return (
        Saved(f"{name}_hidden", 2 * width, cut, COSTLY, part="inside"),
        Saved(f"{name}_activated", width, cut, part="inside"),
        product,
    )


def _experts(shape: ModelShape, moe: Moe) -> tuple[Saved, ...]:
    """Scores of the router and the weights of the chosen (float32, and as they multiply); three lists of `top_k` places, eight
    bytes each. Every token is copied to its experts; their outputs are weighted."""
    width, k = moe.latent or shape.hidden, moe.top_k
    return (
        Saved("ffn_input", shape.hidden, "whole"),
        Saved("router_scores", moe.experts, "whole", COSTLY),
        Saved("router_weights", k, "whole"),
        Saved("router_shares_and_places", k + 3 * 2 * k, "whole", is_float32=True),
        Saved("expert_input", k * width, "whole", part="inside"),
        *_mlp(shape, k * moe.ffn, "heads", "expert"),
        Saved("expert_result", k * width, "whole", REPLACED, part="inside"),
        Saved("expert_output", k * width, "whole", part="inside"),
        *(_shared_experts(shape, moe) if moe.shared_ffn else ()),
        _projected(shape, "ffn", "rest")[1],
    )


def _shared_experts(shape: ModelShape, moe: Moe) -> tuple[Saved, ...]:
    """A feed-forward part that every token uses; where a gate weighs its result, that is kept."""
    policies = COSTLY if moe.shared_gate else REPLACED
    return (
        *_mlp(shape, moe.shared_ffn, "heads", "shared"),
        Saved("shared_result", shape.hidden, "whole", policies, part="inside"),
    )
