"""One layer: attention and feed-forward, each on the norm of the residual stream (pre-norm, as in GPT-2 and Llama)."""

from __future__ import annotations

from torch import Tensor, nn

from strategist.executor.models.attention import Attention
from strategist.executor.models.experts import MixtureOfExperts, Routing
from strategist.executor.models.feed_forward import FeedForward
from strategist.executor.models.norms import make_norm
from strategist.executor.models.positions import Places
from strategist.facts.constants import PLAIN, Constants
from strategist.facts.model import LayerKind, ModelShape


class Block(nn.Module):
    """A layer of one kind: full or windowed attention, a feed-forward part or experts."""

    def __init__(self, shape: ModelShape, kind: LayerKind, routing: Routing, constants: Constants = PLAIN) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape, constants)
        self.attention = Attention(shape, constants, slides=kind.mixer == "sliding")
        self.mlp_norm = make_norm(shape, constants)
        self.mlp: FeedForward | MixtureOfExperts = _feed_forward(shape, kind, routing)

    def forward(self, h: Tensor, places: Places) -> Tensor:
        """h (B, T, H), or (B, T/tp, H) under sequence parallelism, to the same shape."""
        h = h + self.attention(self.attention_norm(h), places)
        return h + self.mlp(self.mlp_norm(h))  # type: ignore[no-any-return]


def _feed_forward(shape: ModelShape, kind: LayerKind, routing: Routing) -> FeedForward | MixtureOfExperts:
    if kind.ffn == "moe" and shape.moe is not None:
        return MixtureOfExperts(shape, shape.moe, routing)
    return FeedForward(shape, shape.ffn_hidden, bias=shape.mlp_bias)
