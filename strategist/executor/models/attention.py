"""Causal attention with grouped queries (Ainslie et al. 2023, arXiv 2305.13245).

Shapes: B sequences, T tokens, H model width, N query heads, K key/value heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strategist.executor.context import Context, causal_attention
from strategist.executor.models.norms import RMSNorm
from strategist.executor.models.positions import Places, rotate
from strategist.executor.tensor_styles import Linear, OutputLinear
from strategist.facts.constants import Constants
from strategist.facts.model import ModelShape


class Attention(nn.Module):
    """Attention over all earlier tokens, or over those of a window; `context` reaches those that other ranks hold."""

    context: Context | None = None

    def __init__(self, shape: ModelShape, constants: Constants, *, slides: bool) -> None:
        super().__init__()
        self.head_dim, self.slides, self.norms_all_heads = shape.head_dim, slides, shape.qk_norm == "full"
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = Linear(shape.hidden, queries, bias=shape.qkv_bias)
        self.k = Linear(shape.hidden, keys, bias=shape.qkv_bias)
        self.v = Linear(shape.hidden, keys, bias=shape.qkv_bias)
        self.o = OutputLinear(queries, shape.hidden, bias=shape.o_bias)
        self.q_norm = _query_norm(shape, queries, constants)
        self.k_norm = _query_norm(shape, keys, constants)

    def forward(self, x: Tensor, places: Places) -> Tensor:
        """x (B, T, H) to (B, T, H); under tensor parallelism each rank has N/tp and K/tp heads, under context parallelism
        T/cp tokens."""
        q = self._heads(self.q(x), self.q_norm, places)
        k = self._heads(self.k(x), self.k_norm, places)
        v = self.v(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        band = places.band if self.slides else None
        attend = causal_attention if self.context is None else self.context.attend
        mixed = attend(q, k, v, band)
        return self.o(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor, norm: nn.Module | None, places: Places) -> Tensor:
        """Queries or keys (B, T, heads x D) as (B, heads, T, D), normalised and turned by their positions."""
        if norm is not None and self.norms_all_heads:
            x = norm(x)
        x = torch.unflatten(x, -1, (-1, self.head_dim))
        if norm is not None and not self.norms_all_heads:
            x = norm(x)
        if places.cos is not None and places.sin is not None:
            x = rotate(x, places.cos, places.sin)
        return x.transpose(1, 2)


def _query_norm(shape: ModelShape, all_heads: int, constants: Constants) -> RMSNorm | None:
    """The norm of queries or keys: over each head, over all heads at once, or none."""
    widths = {"head": shape.head_dim, "full": all_heads}
    return RMSNorm(widths[shape.qk_norm], constants.norm_eps) if shape.qk_norm else None
