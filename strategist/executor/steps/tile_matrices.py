"""Put the matrices of each block into slices, where the plan says so."""

from __future__ import annotations

from torch import nn

from strategist.errors import ImpossibleError
from strategist.executor.blocks import find_blocks
from strategist.executor.job import Job
from strategist.executor.tiled_linear import tile


def tile_matrices(model: nn.Module, job: Job) -> nn.Module:
    """`model` with the linear layers of its blocks in slices; embedding and head stay whole.

    Raises ImpossibleError UNSUPPORTED for a module without blocks, or whose blocks have no linear layers.
    """
    tiling = job.plan.strategy.tiling
    if tiling == 1:
        return model
    if not sum(tile(block, tiling) for block in find_blocks(model).blocks.values()):
        raise ImpossibleError(
            "UNSUPPORTED",
            f"Tiling goes through the linear layers of like blocks, and {type(model).__name__} has none.",
            flag="$.strategy.tiling",
            value=tiling,
            hint="Plan with --pin tiling=1.",
        )
    return model
