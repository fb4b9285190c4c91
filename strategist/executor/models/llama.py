"""The built-in reference model: a decoder of the Llama family, made from the facts of a catalogue row.

Shapes: B sequences, T tokens, H model width, N query heads, K key/value heads, D head width, V vocabulary.
RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), rotary positions (Su et al. 2021, arXiv 2104.09864, section 3.4),
gated SiLU (Shazeer 2020, arXiv 2002.05202), grouped queries (Ainslie et al. 2023, arXiv 2305.13245), pre-norm residual
blocks as in Llama (Touvron et al. 2023, arXiv 2302.13971, section 2.2).

The residual stream has the compute format whichever mechanism brings it: under autocast the embedding's output is cast
once and norms run outside autocast (which would lift them to float32), exactly as FSDP2 computes with cast weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
)

from strategist.executor.architecture import window_obstacles
from strategist.executor.models.reference import ReferenceModel
from strategist.executor.obstacles import refuse
from strategist.executor.tensor_styles import Cut, Entry, Exit, Linear, part_here
from strategist.facts.model import ModelShape

ROPE_BASE = 10_000.0
"""Base of the rotary angles (arXiv 2104.09864, section 3.3); catalogue rows do not carry one, and it costs nothing."""
NORM_EPSILON = 1e-5
INITIAL_STD = 0.02
"""Standard deviation of initial weights (GPT-2, Radford et al. 2019); output projections get 1/sqrt(2 layers) of it."""


def rope_tables(tokens: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each T x D/2, computed in at least float32 and given in the type of `like`."""
    work = torch.promote_types(like.dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, device=like.device, dtype=work) / head_dim
    angles = torch.outer(torch.arange(tokens, device=like.device, dtype=work), ROPE_BASE**-exponent)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, heads, D) turned by its positions, halves of D paired as in Hugging Face's Llama."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, in the type of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x; autocast is off because it would compute and keep a float32 copy on GPUs."""
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.rms_norm(x, (x.shape[-1],), part_here(self.weight).to(x.dtype), NORM_EPSILON)


class Attention(nn.Module):
    """Causal attention over all earlier tokens, with grouped queries."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = Linear(shape.hidden, queries, bias=shape.qkv_bias)
        self.k = Linear(shape.hidden, keys, bias=shape.qkv_bias)
        self.v = Linear(shape.hidden, keys, bias=shape.qkv_bias)
        self.o = Linear(queries, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim) if shape.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, T, H) to (B, T, H); under tensor parallelism each rank has N/tp and K/tp heads."""
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = Linear(shape.hidden, shape.ffn_hidden, bias=False)
        self.up = Linear(shape.hidden, shape.ffn_hidden, bias=False)
        self.down = Linear(shape.ffn_hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, H) to (B, T, H)."""
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer: attention and feed-forward, each on the norm of the residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden)
        self.attention = Attention(shape)
        self.mlp_norm = RMSNorm(shape.hidden)
        self.mlp = FeedForward(shape)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """h (B, T, H), or (B, T/tp, H) under sequence parallelism, to the same shape."""
        h = h + self.attention(self.attention_norm(h), cos, sin)
        return h + self.mlp(self.mlp_norm(h))  # type: ignore[no-any-return]


class Llama(ReferenceModel):
    """Tokens (B, T) to logits (B, T, V); a pipeline stage takes or gives hidden states (B, T, H) instead."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape, self.tied, self.token_ranks = shape, shape.tied, 1
        self.takes_tokens = self.gives_logits = True
        self.token_embedding: nn.Embedding | None = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleDict({str(i): Block(shape) for i in range(shape.layers)})
        self.norm: RMSNorm | None = RMSNorm(shape.hidden)
        self.head: nn.Linear | None = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.tie()

    def forward(self, input_ids: Tensor) -> Tensor:
        """`input_ids` are tokens on the first stage and hidden states on the others."""
        h = (
            self._embed(self.token_embedding, input_ids)
            if self.takes_tokens and self.token_embedding is not None
            else input_ids
        )
        tokens = h.shape[1] * self.token_ranks
        refuse(window_obstacles(self.shape, tokens))
        cos, sin = rope_tables(tokens, self.shape.head_dim, h)
        for block in self.layers.values():
            h = block(h, cos, sin)
        if self.gives_logits and self.norm is not None and self.head is not None:
            h = self.head(self.norm(h))
        return h

    @staticmethod
    def _embed(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
        h: Tensor = embedding(tokens)
        device = h.device.type
        return h.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else h

    def layer_count(self) -> int:
        """Layers of the whole model."""
        return self.shape.layers

    def keep_stage(self, layers: range, *, embedding: bool, head: bool) -> None:
        """Keep `layers`; a tied head keeps the embedding, which owns its weight, without using it for tokens."""
        for name in [name for name in self.layers if int(name) not in layers]:
            del self.layers[name]
        self.takes_tokens, self.gives_logits = embedding, head
        if not embedding and not (head and self.tied):
            self.token_embedding = None
        if not head:
            self.norm, self.head = None, None

    def tie(self) -> None:
        """One parameter for embedding and head when the shape says so."""
        if self.tied and self.token_embedding is not None and self.head is not None:
            self.head.weight = self.token_embedding.weight

    def embedding(self) -> nn.Module | None:
        """The module that holds the token embedding's weight."""
        return self.token_embedding

    def head_parts(self) -> list[nn.Module]:
        """Last norm and head."""
        return [part for part in (self.norm, self.head) if part is not None]

    def spread_tokens(self, ranks: int) -> None:
        """Hidden states between blocks hold 1/`ranks` of the tokens."""
        self.token_ranks = ranks

    def tensor_styles(self, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        """Megatron-LM's cuts (arXiv 1909.08053, section 3; with sequence parallelism arXiv 2205.05198, section 4.2.2).

        Attention and feed-forward gather their input once, not once per matrix. The head gives logits that stay cut by
        vocabulary, for a loss that is computed without gathering them.
        """
        between = Shard(1) if sequence_parallel else Replicate()
        ends: dict[str, ParallelStyle] = {}
        if self.token_embedding is not None:
            ends["token_embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        if self.head is not None:
            ends["head"] = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
        if self.norm is not None and sequence_parallel:
            ends["norm"] = Cut(Replicate())
        blocks = {
            f"layers.{number}.{name}": style
            for number in self.layers
            for name, style in self._block_styles(between, sequence_parallel).items()
        }
        return ends | blocks

    def _block_styles(self, between: Shard | Replicate, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        column, whole = Cut(Shard(0)), Cut(Replicate())
        styles: dict[str, ParallelStyle] = {
            "attention": Entry(between),
            "attention.q": column,
            "attention.k": column,
            "attention.v": column,
            "attention.o": Exit(between),
            "mlp": Entry(between),
            "mlp.gate": column,
            "mlp.up": column,
            "mlp.down": Exit(between),
        }
        if self.shape.qk_norm:  # each rank sees its own heads only, so the weight's gradient must be added over tp
            styles |= {"attention.q_norm": whole, "attention.k_norm": whole}
        if sequence_parallel:  # and here its own tokens
            styles |= {"attention_norm": whole, "mlp_norm": whole}
        return styles

    def fill(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Ones for norms, zeros for biases, normal numbers for matrices."""
        if "norm" in name:
            weight.fill_(1.0)
        elif name.endswith(".bias"):
            weight.zero_()
        else:
            is_output = name.endswith((".o.weight", ".down.weight"))
            std = INITIAL_STD / math.sqrt(2 * self.shape.layers) if is_output else INITIAL_STD
            weight.normal_(0.0, std, generator=generator)
