"""Tokens on their way to experts that other ranks hold: expert parallelism (GShard: Lepikhin et al. 2020, arXiv 2006.16668).

Every rank of the group holds as many experts, in rank order. Tokens are exchanged without a capacity, so none is dropped: each
rank first says how many it sends to every expert, then sends exactly those, and gets back as many results.
Shapes: r rows, each a token's copy for one expert; H model width; e experts of a rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from strategist.records import dataclass

Work = Callable[[Tensor, list[int]], Tensor]


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The ranks that share the experts of a layer. With `is_even` all ranks send alike, so nobody asks how many, and this one gets
    `crowding` times its part of them, as a plan assumes of the busiest; `are_cut` says that tp ranks hold parts of the same experts
    and send the same tokens, otherwise each of them sends its own."""

    group: dist.ProcessGroup
    is_even: bool
    are_cut: bool
    crowding: float = 1.0

    def work(self, rows: Tensor, counts: list[int], experts: Work) -> Tensor:
        """What all experts give for `rows` (r, H), sorted by expert; `counts` of them go to each expert of all ranks.
        `experts` works on rows sorted by expert of this rank, and their counts."""
        sent = _per_rank(counts, self.group.size())
        coming = self._coming(sent, rows)
        here = [sum(column) for column in zip(*coming, strict=True)]
        sizes = [sum(own) for own in coming], [sum(own) for own in sent]
        arrived = _exchanged(rows, *sizes, self.group)
        order = _by_expert(coming, rows.device)
        given = experts(arrived[order], here)
        return _exchanged(given[order.argsort()], *sizes[::-1], self.group)

    def _coming(self, sent: list[list[int]], like: Tensor) -> list[list[int]]:
        """How many rows each rank sends to each expert here. Waits for the device once."""
        if self.is_even:
            return [[round(self.crowding * count) for count in sent[self.group.rank()]]] * self.group.size()
        asked = torch.tensor(sent, device=like.device)
        told = torch.empty_like(asked)
        dist.all_to_all_single(told, asked, group=self.group)
        counts: list[list[int]] = told.tolist()
        return counts


def _per_rank(counts: list[int], ranks: int) -> list[list[int]]:
    own = len(counts) // ranks
    return [counts[first : first + own] for first in range(0, len(counts), own)]


def _exchanged(rows: Tensor, coming: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    got = functional.all_to_all_single_autograd(rows.contiguous(), coming, sent, group)
    return functional.wait_tensor(got)  # type: ignore[no-any-return, no-untyped-call]


def _by_expert(coming: list[list[int]], device: torch.device) -> Tensor:
    """The order that sorts rows, which lie by rank and then by expert, by expert and then by rank."""
    sizes = [count for own in coming for count in own]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    experts = len(coming[0])
    runs = [
        torch.arange(starts[rank * experts + expert], starts[rank * experts + expert] + own[expert], device=device)
        for expert in range(experts)
        for rank, own in enumerate(coming)
    ]
    return torch.cat(runs)
