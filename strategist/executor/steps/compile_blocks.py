"""Compile each block on its own: like blocks share one compiled graph, and collectives stay between them."""

from __future__ import annotations

from torch import nn

from strategist.executor.blocks import find_blocks
from strategist.executor.job import Job


def compile_blocks(model: nn.Module, job: Job) -> nn.Module:
    """`model` with every block compiled in place, so that parameter names stay as they are."""
    if job.plan.strategy.compile:
        for block in find_blocks(model).blocks.values() or (model,):
            block.compile(backend=job.instruments.compile_backend)
    return model
