"""Llama 3 as torchtitan trained it in December 2024, for `trace`: complex rotations, norms out of single operations, and
recomputation of every second matrix product. Source: pytorch/torchtitan at 9dec370: torchtitan/models/llama/model.py,
models/norms.py, parallelisms/parallelize_llama.py (_apply_ac_to_transformer_block), train_configs/llama3_8b.toml.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, SEQ_LEN = 32, 4096, 32, 8, 14336, 128256, 8192
WIDTH = HIDDEN // HEADS
PRODUCT = torch.ops.aten.mm.default
KEPT = {
    PRODUCT,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def every_second_product() -> Any:
    """The policy of one block: attention and every other matrix product are kept, counted anew in forward and in backward."""
    seen: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
        seen[context.is_recompute] += operation is PRODUCT
        kept = operation in KEPT and not (operation is PRODUCT and seen[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Norm(nn.Module):
    """RMS norm out of single operations, in float32 between the casts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """(B, T, H, W) with pairs as complex numbers times `turns` (T, W / 2), in float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(3).type_as(x)


class Attention(nn.Module):
    """Keys and values are repeated for the queries of their group."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(HIDDEN, KV_HEADS * WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH)) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, turns), rotated(k, turns)
        k, v = (torch.repeat_interleave(part, HEADS // KV_HEADS, dim=2) for part in (k, v))
        given = scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
        return self.wo(given.transpose(1, 2).contiguous().flatten(2))


class FeedForward(nn.Module):
    """Gated by SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer; what the policy does not keep is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = Norm(), Norm()

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        return checkpoint(
            self._once, x, turns, use_reentrant=False, context_fn=every_second_product, preserve_rng_state=False
        )

    def _once(self, x: Tensor, turns: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """The whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.output = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.register_buffer("turns", torch.empty(SEQ_LEN, WIDTH // 2, dtype=torch.complex64), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T) to logits (B, T, V)."""
        h = self.tok_embeddings(input_ids)
        for layer in self.layers:
            h = layer(h, self.turns)
        return self.output(self.norm(h))


def make_model() -> Llama:
    """The 8B model."""
    return Llama()
