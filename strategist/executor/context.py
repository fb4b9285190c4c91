"""Attention over a sequence that several ranks hold together: context parallelism.

Shapes: B sequences, N query heads, K key/value heads, D head width, t tokens of this rank, T = t x ranks of all.

Ring (Liu et al. 2023, arXiv 2310.01889): every rank keeps its queries, and keys with values travel past all of them; each
block is flash attention, merged by its log-sum-exps. A rank holds one piece of the sequence's front and its mirror image of
the back, so every block but its own is half a square: behind pieces that came earlier nothing is masked, and of those
that come later only the back half looks at something.

All-to-all (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv 2309.14509, section 3): each rank gives its tokens and gets all of
them for its share of the heads.

Hierarchical (Fang and Zhao 2024, USP, arXiv 2405.07719, section 3): neighbours exchange, and have the tokens of all of them for
their share of the heads: a piece of the front and its mirror image, in order. Those travel around a ring of the ranks that have the
same heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from strategist.executor.sequence import TokenShare
from strategist.records import dataclass

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Context(ABC):
    """A rank's place among those that share each sequence: its tokens, and the group."""

    share: TokenShare
    group: dist.ProcessGroup

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, band: Tensor | None) -> Tensor:
        """Causal attention of q (B, N, t, D) over all earlier k and v (B, K, t, D), wherever they are: (B, N, t, D).

        `band` (T, T) says how far a layer with a window looks.
        """


class AllToAll(Context):
    """Tokens for heads before attention, heads for tokens behind it."""

    __slots__ = ()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, q: Tensor, k: Tensor, v: Tensor, band: Tensor | None) -> Tensor:
        """See Context."""
        ranks = self.group.size()
        by_rank = [torch.unflatten(x.transpose(1, 2), 2, (ranks, -1)).movedim(2, 0) for x in (q, k, v)]
        heads = [x.shape[3] for x in by_rank]
        together = self._exchanged(torch.cat(by_rank, dim=3)).movedim(0, 1).flatten(1, 2)
        q, k, v = (x.transpose(1, 2) for x in torch.split(together, heads, dim=2))
        mixed = self.attend_together(q, k, v, band).transpose(1, 2)
        parts = self._exchanged(torch.unflatten(mixed, 1, (ranks, -1)).movedim(1, 0))
        return parts.movedim(0, 2).flatten(2, 3).transpose(1, 2)

    def attend_together(self, q: Tensor, k: Tensor, v: Tensor, band: Tensor | None) -> Tensor:
        """Attention of the tokens of the whole group, q (B, N / ranks, T, D), k and v (B, K / ranks, T, D), to all before them."""
        return causal_attention(q, k, v, band)

    def _exchanged(self, parts: Tensor) -> Tensor:
        """parts (ranks, ...), one for each rank, to those that the ranks have for this one."""
        got = functional.all_to_all_single_autograd(parts.contiguous(), None, None, self.group)
        return functional.wait_tensor(got)  # type: ignore[no-any-return, no-untyped-call]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, band: Tensor | None) -> Tensor:
    """Attention of q (B, N, T, D) over k and v (B, K, T, D), as far as `band` lets it look or else to all earlier tokens."""
    return nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=band, is_causal=band is None, enable_gqa=q.shape[1] != k.shape[1]
    )


class Ring(Context):
    """Keys and values travel; windows are not known here."""

    __slots__ = ()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, q: Tensor, k: Tensor, v: Tensor, band: Tensor | None) -> Tensor:
        """See Context."""
        attended: Tensor = RingAttention.apply(q, k, v, self.group)  # type: ignore[no-untyped-call]
        return attended


@dataclass(frozen=True, slots=True)
class Hierarchical(AllToAll):
    """An exchange in `group`, and a ring of the ranks that then have the same heads. Windows are not known here."""

    ring: dist.ProcessGroup

    def attend_together(self, q: Tensor, k: Tensor, v: Tensor, band: Tensor | None) -> Tensor:
        """See AllToAll; the tokens of other groups travel past."""
        attended: Tensor = RingAttention.apply(q, k, v, self.ring)  # type: ignore[no-untyped-call]
        return attended


class Travelling:
    """A tensor on its way to the next rank of a ring while that of the rank before is on its way here."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        index, ranks = group.rank(), group.size()
        after, before = (dist.get_global_rank(group, (index + step) % ranks) for step in (1, -1))
        self._coming = torch.empty_like(sent)
        self._requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, after, group),
                dist.P2POp(dist.irecv, self._coming, before, group),
            ]
        )
        self._sent: Tensor | None = sent

    def arrived(self) -> Tensor:
        """What came. What was sent is let go of."""
        for request in self._requests:
            request.wait()
        self._requests, self._sent = [], None
        return self._coming


class RingAttention(torch.autograd.Function):
    """Exact causal attention in a ring of mirrored halves. Its backward sends keys and values around again, and their
    gradients behind them; the share of a rank's own queries waits at home, so both travel one step less than there are ranks."""

    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        """q (B, N, t, D), k and v (B, K, t, D) to (B, N, t, D)."""
        index, ranks, half = group.rank(), group.size(), q.shape[2] // 2
        travelling = Travelling(torch.stack((k, v)), group)
        mixed, lse = kernel_of(q).forward(q, k, v, True)
        total = mixed.to(torch.promote_types(q.dtype, torch.float32))
        for step in range(1, ranks):
            keys, values = both = travelling.arrived()
            if step < ranks - 1:
                travelling = Travelling(both, group)
            if step <= index:
                # From a rank before this one: its front lies before all tokens here, its back behind them.
                _merge(total, lse, *kernel_of(q).forward(q, keys[:, :, :half], values[:, :, :half], False))
            else:
                _merge(
                    total[:, :, half:],
                    lse[:, :, half:],
                    *kernel_of(q).forward(q[:, :, half:], keys, values, False),
                )
        mixed = total.to(q.dtype)
        context.group = group
        context.save_for_backward(q, k, v, mixed, lse)
        return mixed

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of q, k and v."""
        q, k, v, mixed, lse = context.saved_tensors
        group = context.group
        index, ranks, half = group.rank(), group.size(), q.shape[2] // 2
        back_half = [x[:, :, half:] for x in (gradient, q, mixed)] + [lse[:, :, half:].contiguous()]
        travelling = Travelling(torch.stack((k, v)), group)
        dq, dk, dv = kernel_of(q).backward(gradient, q, k, v, mixed, lse, True)
        sums: Travelling | None = None
        for step in range(1, ranks):
            keys, values = both = travelling.arrived()
            if step < ranks - 1:
                travelling = Travelling(both, group)
            passing = torch.zeros_like(both) if sums is None else sums.arrived()
            if step <= index:
                _add(
                    kernel_of(q).backward(gradient, q, keys[:, :, :half], values[:, :, :half], mixed, lse, False),
                    *(dq, passing[0, :, :, :half], passing[1, :, :, :half]),
                )
            else:
                some_gradient, some_q, some_mixed, some_lse = back_half
                _add(
                    kernel_of(q).backward(some_gradient, some_q, keys, values, some_mixed, some_lse, False),
                    *(dq[:, :, half:], passing[0], passing[1]),
                )
            sums = Travelling(passing, group)
        if sums is not None:
            _add(sums.arrived(), dk, dv)
        return dq, dk, dv, None


def _merge(total: Tensor, lse: Tensor, mixed: Tensor, other: Tensor) -> None:
    """Put a block's result (B, N, t, D) with its log-sum-exps (B, N, t) into the running ones."""
    both = torch.logaddexp(lse, other)
    total.mul_((lse - both).exp_()[..., None]).add_(mixed * (other - both).exp_()[..., None])
    lse.copy_(both)


def _add(parts: Gradients | Tensor, *sums: Tensor) -> None:
    for part, whole in zip(parts, sums, strict=True):
        whole.add_(part)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Flash attention that tells its log-sum-exps, and its backward, which takes those of the whole sequence.

    forward(q, k, v, is_causal) gives (result, log-sum-exps); backward(gradient, q, k, v, result, log-sum-exps, is_causal).
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Gradients]


def kernel_of(q: Tensor) -> Kernel:
    """The kernel of the device that a tensor is on."""
    return CPU if q.device.type == "cpu" else CUDA


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)  # type: ignore[no-any-return]


def _back_on_cpu(*tensors_and_causal: Any) -> Gradients:
    *tensors, is_causal = tensors_and_causal
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, is_causal)  # type: ignore[no-any-return]


def _on_cuda(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    mixed, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    return mixed, lse


def _back_on_cuda(*tensors_and_causal: Any) -> Gradients:
    """No sequences of unequal length (two Nones), and no dropout, so no state of its random numbers is looked at."""
    *tensors, is_causal = tensors_and_causal
    _, q, k, *_ = tensors
    state = torch.empty((), dtype=torch.long, device=q.device)
    back = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return back(*tensors, None, None, q.shape[2], k.shape[2], 0.0, is_causal, state, state)  # type: ignore[no-any-return]


CPU, CUDA = Kernel(_on_cpu, _back_on_cpu), Kernel(_on_cuda, _back_on_cuda)
