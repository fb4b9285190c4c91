"""What DDP does to gradients before it sends them: torch's own hooks, and the largest elements with error feedback.

A hook gets a bucket of this rank's gradients, not yet divided, and gives a future of their mean. DDP alone calls hooks; under
FSDP2 they would be lost without a word, so plans with them are refused there (support.py). What bf16 and fp16 leave out is
gone; PowerSGD (Vogels et al. 2019, arXiv 1905.13727) and top-k (Stich et al. 2018, arXiv 1809.07599, algorithm 1) add what they
left out to the next step's gradients.

DDP compares a hook's annotations with its own types, so that here they are not strings.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from strategist.document.plan import Strategy
from strategist.executor.feedback import OF_PARAMETERS, Feedback
from strategist.facts.compression import sent_of_largest

Hook = Callable[[Any, GradBucket], Future[Tensor]]

FIRST_COMPRESSED_STEP = 2
"""The steps before it are exact under PowerSGD: DDP makes its buckets anew after the first, and what is remembered of a bucket
must not be older. It is the earliest that torch allows."""


def compress(replica: nn.Module, strategy: Strategy, group: dist.ProcessGroup) -> None:
    """Let a DDP module compress its gradients as the plan says."""
    state, hook = _HOOKS[strategy.compression](strategy, group)
    replica.register_comm_hook(state, hook)  # type: ignore[operator]
    memories = {name: getattr(state, slot) for name, slot in _MEMORIES.get(type(state), {}).items()}
    if memories:
        kind = f"{strategy.compression}-{strategy.compression_rank or strategy.compression_share}"
        counter = state if isinstance(state, PowerSGDState) else None
        replica.feedback = Feedback(replica, memories, counter, kind)  # type: ignore[assignment]


def _rounded(hook: Hook) -> Callable[[Strategy, dist.ProcessGroup], tuple[Any, Hook]]:
    """One of torch's two casts. DDP refuses torch's bf16 hook by name where there is no NCCL, although gloo adds up bf16."""

    def rounded(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
        return hook(group, bucket)

    return lambda _strategy, group: (group, rounded)


def _low_rank(strategy: Strategy, group: dist.ProcessGroup) -> tuple[Any, Hook]:
    state = PowerSGDState(
        group, matrix_approximation_rank=strategy.compression_rank, start_powerSGD_iter=FIRST_COMPRESSED_STEP
    )
    return state, _one_at_a_time


def _one_at_a_time(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """torch's PowerSGD, waited for: on gloo its second and third messages are sent by the threads that its first ones end on, so that
    those of two buckets would leave in another order on every rank."""
    sent = powerSGD_hook(state, bucket)
    sent.wait()
    return sent


def _largest(strategy: Strategy, group: dist.ProcessGroup) -> tuple[Any, Hook]:
    return TopK(group, strategy.compression_share), top_k_hook


_HOOKS = {
    "bf16": _rounded(bf16_compress_hook),
    "fp16": _rounded(fp16_compress_hook),
    "powersgd": _low_rank,
    "topk": _largest,
}


class TopK:
    """Which share of a bucket's elements is sent, and what every parameter's gradient still owes to the others, by parameter
    because buckets are made anew after the first step."""

    def __init__(self, group: dist.ProcessGroup, share: float) -> None:
        self.group, self.share = group, share
        self.owed: dict[Tensor, Tensor] = {}


_MEMORIES: dict[type, dict[str, str]] = {
    PowerSGDState: {"error": "error_dict", "p": "p_memory_dict", "q": "q_memory_dict"},
    TopK: {OF_PARAMETERS: "owed"},
}
"""What a hook's state remembers from step to step: names, and its dictionaries."""


def remembered(state: Any) -> Iterator[Tensor]:
    """The tensors that a hook's state keeps from step to step; none where the state is a group alone."""
    slots = _MEMORIES.get(type(state), {}).values()
    return (tensor for slot in slots for tensor in getattr(state, slot).values())


def top_k_hook(state: TopK, bucket: GradBucket) -> Future[Tensor]:
    """Send the elements of a bucket that are largest with what was left out before, and remember the others.

    Every rank sends places and values in one message; all add up what all sent.
    """
    gradients = bucket.buffer()
    parts = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
    for parameter, gradient in parts:
        if parameter in state.owed:
            gradient.add_(state.owed[parameter])
    places = gradients.abs().topk(sent_of_largest(gradients.numel(), state.share), sorted=False).indices
    values = gradients[places]
    gradients[places] = 0.0
    for parameter, gradient in parts:
        state.owed[parameter] = state.owed[parameter].copy_(gradient) if parameter in state.owed else gradient.clone()
    mine = torch.cat([places.to(torch.int32).view(torch.uint8), values.view(torch.uint8)])
    ranks = (
        state.group.size()
    )  # what is called back may outlive all else on gloo's thread, which cannot end its own group
    everybody = mine.new_empty(ranks * mine.numel())
    sent = dist.all_gather_single(everybody, mine, group=state.group, async_op=True)

    def add_up(_arrived: Any) -> Tensor:
        gradients.zero_()
        for theirs in everybody.chunk(ranks):
            where, what = torch.split(theirs, [4 * values.numel(), values.nbytes])
            gradients.index_add_(0, where.view(torch.int32), what.view(values.dtype), alpha=1.0 / ranks)
        return gradients

    return sent.get_future().then(add_up)  # type: ignore[no-any-return]
