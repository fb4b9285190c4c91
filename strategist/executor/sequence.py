"""Which tokens of each sequence a rank of context parallelism holds, and where those stand."""

from __future__ import annotations

import torch
from torch import Tensor

from strategist.document.plan import Plan
from strategist.errors import ImpossibleError
from strategist.records import dataclass


@dataclass(frozen=True, slots=True)
class TokenShare:
    """Some of `of` equal pieces of every sequence, by number and in order."""

    pieces: tuple[int, ...] = (0,)
    of: int = 1

    def part(self, name: str, tokens: Tensor) -> Tensor:
        """The tokens held here of tokens (B, T). Raises ImpossibleError DIVISIBILITY when T has no equal pieces."""
        if tokens.shape[1] % self.of:
            raise ImpossibleError(
                "DIVISIBILITY",
                f"{name} has sequences of {tokens.shape[1]} tokens, which make no {self.of} equal pieces.",
                flag=name,
                value=tokens.shape[1],
                hint=f"Pad sequences to a multiple of {self.of} tokens.",
            )
        if self.of == 1:
            return tokens
        every = tokens.chunk(self.of, dim=1)
        return torch.cat([every[number] for number in self.pieces], dim=1)

    def places(self, here: int, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
        """Where the `here` tokens that are held stand in their sequence, (here,)."""
        size = here // len(self.pieces)
        runs = [torch.arange(p * size, (p + 1) * size, device=device, dtype=dtype) for p in self.pieces]
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def whole(self, here: int) -> int:
        """Tokens of a sequence of which `here` are held."""
        return here // len(self.pieces) * self.of


def token_share(plan: Plan, index: int) -> TokenShare:
    """What the `index`-th rank of the cp axis holds.

    A ring takes one piece from the front and its mirror image from the back, so that all ranks have equally much to look
    at (NVIDIA/Megatron-LM: docs/user-guide/features/context_parallel.md). An all-to-all puts neighbours side by side. Hierarchical
    ones do both: the groups that exchange heads are the ring, and in each of them neighbours lie side by side in what it holds.
    """
    ranks, inner = plan.mesh.cp, plan.strategy.cp_inner
    if plan.strategy.context_parallel == "all-to-all":
        return TokenShare((index,), ranks)
    group, here = divmod(index, inner)
    front, back = group * inner, 2 * ranks - (group + 1) * inner
    together = (*range(front, front + inner), *range(back, back + inner))
    return TokenShare(together[2 * here : 2 * here + 2], 2 * ranks)
