"""A mixture of experts in place of a feed-forward part (Shazeer et al. 2017, arXiv 1701.06538; Jiang et al. 2024, Mixtral,
arXiv 2401.04088, section 2.1), with shared experts where the shape has them (DeepSeekMoE, arXiv 2401.06066, section 3.2).

Shapes: n tokens of a micro-batch, H model width, E experts, k experts per token, F hidden width of an expert. No token is
dropped and no capacity is set, so an expert gets as many tokens as chose it. There is no loss for balance: no shape asks
for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from strategist.executor.experts_apart import ExpertGroup
from strategist.executor.models.feed_forward import ACTIVATIONS, FeedForward
from strategist.executor.models.four_bits import Levels, Packed, PackedStack
from strategist.executor.tensor_styles import Linear, part_here
from strategist.facts.model import ModelShape, Moe

Routing = Literal["scored", "balanced", "crowded"]
"""How experts are chosen. `scored`: the k with the highest scores, the only one to train with.

The others choose by the token's number alone, so that shapes are known without values, as under fake tensors: `balanced`
gives every expert n k / E tokens (give or take one), `crowded` gives the first k experts all n. Scores still weigh what
the experts give, so everything is computed and kept as in training with such counts.
"""


class Choice(NamedTuple):
    """Who works on what: `experts` (n, k) and their weights (n, k); `counts`, how many tokens each expert gets."""

    experts: Tensor
    weights: Tensor
    counts: list[int]


class Router(Linear):
    """Scores of the experts, and the choice among them."""

    def __init__(self, shape: ModelShape, moe: Moe, routing: Routing) -> None:
        super().__init__(shape.hidden, moe.experts, bias=False)
        self.top_k, self.routing = moe.top_k, routing

    def choose(self, x: Tensor) -> Choice:
        """Experts for x (n, H); weights are the softmax over the chosen, in at least float32, in the type of x."""
        scores = self(x)
        experts, counts = self._by_score(scores) if self.routing == "scored" else self._by_number(scores)
        chosen = scores.gather(1, experts)
        weights = chosen.softmax(dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
        return Choice(experts, weights.to(x.dtype), counts)

    def _by_score(self, scores: Tensor) -> tuple[Tensor, list[int]]:
        """Waits for the device once: how many tokens an expert gets decides the shapes of what follows."""
        experts = scores.detach().topk(self.top_k, dim=-1).indices
        return experts, experts.flatten().bincount(minlength=self.out_features).tolist()

    def _by_number(self, scores: Tensor) -> tuple[Tensor, list[int]]:
        places = torch.arange(len(scores) * self.top_k, device=scores.device).view(-1, self.top_k)
        among = self.out_features if self.routing == "balanced" else self.top_k
        each, rest = divmod(places.numel(), among)
        counts = [each + (index < rest) for index in range(among)] + [0] * (self.out_features - among)
        return places % among, counts


class Experts(nn.Module):
    """The matrices of all experts, each stored F x E x H, or frozen in four bits, one expert after the other.

    The hidden width comes first because both tensor parallelism and FSDP2 cut there: FSDP2 shards dim 0 and pads it, and
    experts are often fewer than ranks.
    """

    def __init__(self, shape: ModelShape, moe: Moe) -> None:
        super().__init__()
        size = (moe.ffn, moe.experts, shape.hidden)
        self.gate: Stack | None = nn.Parameter(torch.empty(size)) if shape.mlp_gated else None
        self.up: Stack = nn.Parameter(torch.empty(size))
        self.down: Stack = nn.Parameter(torch.empty(size))
        self.act = ACTIVATIONS[shape.mlp_act]

    def pack(self, levels: Levels) -> None:
        """Keep every matrix of every expert in four bits."""
        for name, whole in list(self.named_parameters(recurse=False)):
            delattr(self, name)
            setattr(self, name, PackedStack(whole.shape, levels, lie=name == "down"))

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """x (n k, H), sorted by expert, to the same shape; `counts` rows for each expert."""
        gates = [None] * len(counts) if self.gate is None else _each(self.gate)
        groups = torch.split(x, counts)
        return torch.cat(
            [self._one(*group) for group in zip(groups, gates, _each(self.up), _each(self.down), strict=True)]
        )

    def _one(self, x: Tensor, gate: Tensor | Packed | None, up: Tensor | Packed, down: Tensor | Packed) -> Tensor:
        raised = _raised(x, up)
        inner = self.act(raised) if gate is None else self.act(_raised(x, gate)) * raised
        return down(inner) if isinstance(down, Packed) else inner @ down


Stack = nn.Parameter | PackedStack
"""One matrix of every expert."""


def _each(stack: Stack) -> Sequence[Tensor | Packed]:
    """The matrices of the experts that lie here."""
    return stack.each() if isinstance(stack, PackedStack) else part_here(stack).unbind(1)


def _raised(x: Tensor, matrix: Tensor | Packed) -> Tensor:
    return matrix(x) if isinstance(matrix, Packed) else nn.functional.linear(x, matrix)


class MixtureOfExperts(nn.Module):
    """The weighted sum of what the chosen experts give, and of the shared experts, which every token uses. `apart` are the
    ranks that share the experts, where one alone does not hold them all."""

    apart: ExpertGroup | None = None

    def __init__(self, shape: ModelShape, moe: Moe, routing: Routing) -> None:
        super().__init__()
        self.router = Router(shape, moe, routing)
        self.experts = Experts(shape, moe)
        self.shared = FeedForward(shape, moe.shared_ffn, bias=False) if moe.shared_ffn else None
        self.shared_gate = Linear(shape.hidden, 1, bias=False) if moe.shared_ffn and moe.shared_gate else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, H) to (B, T, H); where tensor parallelism cuts the experts, a term of a sum over ranks.

        Not compiled: counts of tokens differ from step to step, and each would be compiled anew.
        """
        tokens = x.flatten(0, -2)
        y = self._routed(tokens, self.router.choose(tokens)).view_as(x)
        return y if self.shared is None else y + self._shared(x, self.shared)

    def _shared(self, x: Tensor, shared: FeedForward) -> Tensor:
        y: Tensor = shared(x)
        if self.shared_gate is not None:
            y = y * self.shared_gate(x).sigmoid()
        return y

    def _routed(self, x: Tensor, choice: Choice) -> Tensor:
        """Sort the (token, expert) pairs by expert, let the experts work, sort back, add up what each token got."""
        order = choice.experts.flatten().argsort(stable=True)
        rows = x[order // choice.experts.shape[1]]
        given = (
            self.experts(rows, choice.counts)
            if self.apart is None
            else self.apart.work(rows, choice.counts, self.experts)
        )
        back: Tensor = given[order.argsort()].view(*choice.experts.shape, -1)
        return (back * choice.weights[..., None]).sum(dim=1)
