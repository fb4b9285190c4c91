"""What the ranks of the overhead benchmark do: the same model in turn under `Session.step` and in a loop written by hand."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from strategist.document.plan import Plan
from strategist.executor.build import build
from strategist.executor.initialise import initialise
from strategist.executor.loss import IGNORED
from strategist.executor.models import model_from_shape, splittable
from strategist.executor.optimizers import default_optimizer
from strategist.executor.train import CLIP_NORM

Batch = dict[str, Tensor]
Step = Callable[[Batch], float]
Times = list[tuple[float, float]]
"""(seconds on the clock, seconds of CPU) of each block of steps."""


def ours(plan: Plan) -> Step:
    """`Session.step`."""
    session = build(plan, model_from_shape(plan.model), clip_norm=CLIP_NORM)
    return lambda batch: session.step(batch).loss


def by_hand(plan: Plan) -> Step:
    """Forward, backward, clip, update, and the loss as a number: what people write, with the same wrapping, optimizer and mathematics
    (each counted token of the global batch weighs as much, the loss is that of all ranks)."""
    model = model_from_shape(plan.model, "cpu")
    initialise(model, 0)
    model.train()
    wrapped = (
        _sharded(model) if plan.strategy.zero == 3 else DistributedDataParallel(model, gradient_as_bucket_view=True)
    )
    optimizer = default_optimizer(plan)([{"params": list(wrapped.parameters())}])

    def step(batch: Batch) -> float:
        tokens = (batch["labels"] != IGNORED).sum()
        dist.all_reduce(tokens)
        logits = wrapped(batch["input_ids"])
        total = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        loss = total * dist.get_world_size() / tokens
        loss.backward()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return mean.item()

    return step


def _sharded(model: nn.Module) -> nn.Module:
    """Units as in pytorch/torchtitan (torchtitan/models/llama3/parallelize.py): embedding, each block, last norm with head."""
    cuts = splittable(model)
    fully_shard(cuts.embedding_parts())
    for block in model.layers.values():
        fully_shard(block)
    fully_shard(cuts.head_parts(), reshard_after_forward=False)
    return fully_shard(model)


def timed(plan: Plan, pairs: int, steps: int) -> tuple[Times, Times]:
    """Blocks of ours and of the loop by hand, in turn; who begins changes with every pair."""
    sequences = plan.strategy.micro_batch
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(plan.model.vocab, (sequences, plan.workload.seq_len + 1), generator=generator)
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    both = ours(plan), by_hand(plan)
    for step in both:
        _block(step, batch, 2)
    seen: tuple[Times, Times] = ([], [])
    for pair in range(pairs):
        for which in (pair % 2, 1 - pair % 2):
            seen[which].append(_block(both[which], batch, steps))
    return seen


def _block(step: Step, batch: Batch, steps: int) -> tuple[float, float]:
    dist.barrier()
    begin, busy = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step(batch)
    dist.barrier()
    return time.perf_counter() - begin, time.process_time() - busy
