"""Trade memory for computation: forget activations in forward and compute them again in backward.

`full` forgets everything inside a block but its input (Chen et al. 2016, arXiv 1604.06174). `selective` keeps what is
dear to compute, namely the results of matrix products and convolutions, of attention and of tensor-parallel reductions, and computes the
rest again: norms, rotations, activations, products of elements. That is the op policy of pytorch/torchtitan
(torchtitan/distributed/activation_checkpoint.py), except that all matrix products are kept, not every second one.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    create_selective_checkpoint_contexts,
)

from strategist.errors import ImpossibleError
from strategist.executor.blocks import find_blocks
from strategist.executor.chance import draws
from strategist.executor.job import Job


def recompute(model: nn.Module, job: Job) -> nn.Module:
    """`model` with each block wrapped as the plan says, or of this chunk only the first ones, as many as the plan says of every stage or
    of this one, to which backward comes when what the others kept is gone, or only every so-many-th.

    Raises ImpossibleError UNSUPPORTED for a module without blocks.
    """
    kind = job.plan.strategy.recompute
    if kind == "none":
        return model
    found = find_blocks(model)
    if not found.blocks:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"Recomputation works block by block, and {type(model).__name__} has no list of like blocks.",
            flag="$.strategy.recompute",
            value=kind,
            hint="Plan with --pin recompute=none.",
        )
    every = job.plan.strategy.recompute_every or 1
    for name, block in list(found.blocks.items())[every - 1 : _most(job, len(found.blocks)) : every]:
        found.exchange(name, _wrapped(block, selective=kind == "selective"))
    return model


def _most(job: Job, blocks: int) -> int:
    """How many of a chunk's blocks may be wrapped, the first ones."""
    s = job.plan.strategy
    return s.recompute_stages[job.stage.index] if s.recompute_stages else s.recompute_layers or blocks


def _wrapped(block: nn.Module, *, selective: bool) -> nn.Module:
    keeps = draws(block)  # a block that drops something must drop the same again
    if selective:
        return checkpoint_wrapper(block, context_fn=_selective_contexts, preserve_rng_state=keeps)
    return checkpoint_wrapper(block, preserve_rng_state=keeps)


def _selective_contexts() -> tuple[Any, Any]:
    forward, again = create_selective_checkpoint_contexts(partial(_policy, kept_operators()))  # type: ignore[no-untyped-call]
    return forward, _Again(None, again.storage)  # the policy was asked in forward


class _Again(_CachedTorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recomputation that counts no marks of the profiler: a unit of FSDP2 inside a block, as experts are one, sets others in backward
    than in forward, where torch asks for the same number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def _policy(
    kept: frozenset[Any], _context: object, operator: Any, *_args: object, **_kwargs: object
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def kept_operators() -> frozenset[Any]:
    """Operators whose results selective recomputation keeps; which attention runs depends on the device."""
    aten, functional = torch.ops.aten, torch.ops._c10d_functional
    return frozenset(
        {
            aten.mm.default,
            aten.addmm.default,
            aten.bmm.default,
            aten.convolution.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            functional.all_reduce.default,
            functional.reduce_scatter_tensor.default,
        }
    )
