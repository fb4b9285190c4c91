"""What tells attention where a token stands: rotary angles or a table of learned positions, and windows.

Rotary positions: Su et al. 2021, arXiv 2104.09864, section 3.4. Sliding windows: Beltagy et al. 2020, arXiv 2004.05150,
section 3.1, as in Mistral (Jiang et al. 2023, arXiv 2310.06825, section 2).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from strategist.executor.sequence import TokenShare
from strategist.executor.tensor_styles import part_here
from strategist.facts.constants import PLAIN, Constants, RopeScaling
from strategist.facts.model import ModelShape

ALL_TOKENS = TokenShare()


class Places(NamedTuple):
    """What all layers share in one forward pass.

    `cos` and `sin` are t x D/2 (None without rotation), of the t tokens of a sequence that are here. `band` is T x T, of all
    of them: zero where a layer with a window may look, minus infinity elsewhere; None when the window covers the sequence.
    """

    cos: Tensor | None
    sin: Tensor | None
    band: Tensor | None


def places(
    shape: ModelShape, tokens: int, like: Tensor, share: TokenShare = ALL_TOKENS, constants: Constants = PLAIN
) -> Places:
    """The places of `tokens` tokens, which are this `share` of each sequence, in the type of `like`."""
    turns = shape.pos == "rope"
    cos, sin = rope_tables(tokens, shape.head_dim, like, share, constants) if turns else (None, None)
    every = share.whole(tokens)
    narrow = shape.window is not None and shape.window < every
    return Places(cos, sin, _band(every, shape.window, like) if narrow and shape.window else None)


def rope_tables(
    tokens: int, head_dim: int, like: Tensor, share: TokenShare = ALL_TOKENS, constants: Constants = PLAIN
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of some tokens, each t x D/2, computed in at least float32 and given in the type of `like`."""
    work = torch.promote_types(like.dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, device=like.device, dtype=work) / head_dim
    rates = constants.rope_theta**-exponent
    if constants.rope_scaling is not None:
        rates = _slower(rates, constants.rope_scaling)
    angles = torch.outer(share.places(tokens, like.device, work), rates)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _slower(rates: Tensor, scaling: RopeScaling) -> Tensor:
    """Angles per token (D/2,) as Llama 3.1 scales them (transformers 5.23: modeling_rope_utils.py, _compute_llama3_parameters)."""
    turns = scaling.original_max_position_embeddings * rates / (2 * math.pi)  # in the context of before
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return rates * (kept + (1 - kept) / scaling.factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, heads, D) turned by its positions, halves of D paired as in Hugging Face's Llama."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def _band(tokens: int, window: int, like: Tensor) -> Tensor:
    """Token t may look at itself and the `window` - 1 tokens before it."""
    place = torch.arange(tokens, device=like.device)
    distance = place[:, None] - place[None, :]
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(tokens, tokens, device=like.device, dtype=like.dtype).masked_fill(hidden, float("-inf"))


class PositionTable(nn.Module):
    """Learned positions (GPT-2): one row per place, added to the embedded tokens."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, places: Tensor) -> Tensor:
        """The rows of some places (t,) as (t, H): a copy, because FSDP2 takes the weight back after forward."""
        return nn.functional.embedding(places, part_here(self.weight))
