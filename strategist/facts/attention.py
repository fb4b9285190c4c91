"""What the attention of one layer is made of, and how much it multiplies."""

from __future__ import annotations

from collections.abc import Mapping

from strategist.facts.model import Heads, LayerKind, Mla, ModelShape, QkNorm
from strategist.facts.weights import Matrix, Vector, Weights


def attention(shape: ModelShape, *, is_full: bool = True) -> Weights:
    """Query, key, value and output of one sort of layer; full and sliding layers may differ in their heads."""
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


def cross_attention(shape: ModelShape) -> Weights:
    """Attention of a decoder layer to the encoder: the same weights under other names."""
    matrices, vectors = attention(shape)
    renamed = tuple(Matrix(f"cross_{m.name}", m.inputs, m.outputs, m.cut, m.bias) for m in matrices)
    return renamed, tuple(Vector(f"cross_{v.name}", v.size, v.cut) for v in vectors)


def latent_attention(shape: ModelShape, mla: Mla) -> Weights:
    """Multi-head latent attention: low-rank queries, one latent for keys and values (arXiv 2405.04434, section 2.1)."""
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


def normed_heads(shape: ModelShape, kind: LayerKind) -> int:
    """Elements of a token's queries and keys that norms of their own read in one layer; tp cuts them as it cuts heads."""
    has_norms = shape.qk_norm and kind.mixer in ("attention", "sliding")
    return (shape.heads + shape.kv_heads) * shape.head_dim if has_norms else 0


def normed_latents(shape: ModelShape, kind: LayerKind) -> int:
    """Elements of a token's latents that norms read between the matrices of latent attention, whole on every rank of tp
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.1 and appendix: RMSNorm after the compressed latent vectors)."""
    return shape.mla.q_lora + shape.mla.kv_lora if shape.mla is not None and kind.mixer == "mla" else 0


def attention_FLOP(shape: ModelShape, kind: LayerKind, seq_len: int, inputs: int | None = None) -> float:
    """Forward FLOP per token of softmax attention in one layer over sequences of `seq_len`: scores and values, causal models count what they
    compute: half, or of a window the min(i, window) keys of the i-th query. A decoder behind an encoder also meets the keys of all its
    `inputs`, as many as `seq_len` where nothing is said (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.3). Source: Dao 2023 (arXiv
    2307.08691, section 4): 4 x seqlen^2 x head_dim x heads, halved when causal."""
    if kind.mixer not in ("attention", "sliding", "mla"):
        return 0.0
    span = keys_met(shape, kind, seq_len)
    causal = 1.0 - span / (2.0 * seq_len) if shape.kind in _CAUSAL else 1.0
    if shape.mla is not None and kind.mixer == "mla":
        width = shape.heads * (shape.mla.qk_nope + shape.mla.qk_rope + shape.mla.v_dim)
    else:
        width = 2 * shape.heads * shape.head_dim
    cross = 2.0 * shape.heads * shape.head_dim * (inputs or seq_len) * 2.0 if kind.cross else 0.0
    return 2.0 * span * causal * width + cross


_CAUSAL = ("decoder", "hybrid")


def is_masked(shape: ModelShape, kind: LayerKind, seq_len: int) -> bool:
    """Whether the queries of a layer meet some of the keys alone: those behind them, or those of a window."""
    return shape.kind in _CAUSAL or keys_met(shape, kind, seq_len) < seq_len


def keys_met(shape: ModelShape, kind: LayerKind, seq_len: int) -> float:
    """Keys that a query meets, before the causal mask."""
    return float(min(seq_len, shape.window)) if kind.mixer == "sliding" and shape.window else float(seq_len)
