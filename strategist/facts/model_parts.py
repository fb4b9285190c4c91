"""Parts that only some models have: experts, latent attention, state-space mixers, unequal heads, adapters."""

from __future__ import annotations

from typing import Literal

from strategist.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Routed experts. `ffn` is the hidden width of one expert, `shared_ffn` the total width of the shared ones.

    `layers` of the layers have experts: the last ones after `first_dense` dense ones, spread evenly. `latent` is the
    width the experts work in where it is not the model's (0: it is). With `groups` of neighbouring experts a router chooses `top_groups` of
    these first, then experts among theirs.
    """

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
    groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1); `q_lora` 0 means a full query matrix.

    `shared_kv`: the latent itself serves as key and value of all heads, nothing maps it up (DeepSeek-V4). `o_groups`
    and `o_rank`: the output goes through that many block-diagonal maps of that rank (0: through one full matrix).
    """

    q_lora: int
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_dim: int
    index_heads: int = 0
    index_dim: int = 0
    shared_kv: bool = False
    o_groups: int = 0
    o_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Key-value heads of the full-attention layers, where they differ from the sliding ones.

    `shared_kv`: values are the keys, without a matrix of their own.
    """

    kv_heads: int
    head_dim: int
    shared_kv: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssm:
    """A state-space or linear-attention mixer; only the fields of its `kind` are set.

    mamba1: expand, state, dt_rank, conv. mamba2: heads, head_dim, state, groups, conv. gated-delta: k_heads, v_heads,
    k_dim, v_dim, conv. short-conv: conv. lightning: heads, head_dim. kimi-delta: heads, head_dim, conv.
    """

    kind: Literal["mamba1", "mamba2", "gated-delta", "short-conv", "lightning", "kimi-delta"]
    conv: int = 0
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
class Adapters:
    """Low-rank adapters beside frozen matrices (LoRA, Hu et al. 2021, arXiv 2106.09685): a matrix W of the layers gives
    W x + (alpha / rank) B A x, where A is rank x inputs and B outputs x rank. `targets` name the matrices (q, k, v, o, gate, up,
    down). Under `qlora` all matrices of the layers rest in four bits (Dettmers et al. 2023, arXiv 2305.14314).
    """

    method: Literal["lora", "qlora"] = "lora"
    rank: int
    alpha: int
    targets: tuple[str, ...]
