"""Start every rank from the same values when the model came with values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from strategist.executor.job import Job


@torch.no_grad()
def share_values(model: nn.Module, job: Job) -> nn.Module:
    """`model` with rank 0's parameters and buffers on every rank, as DDP does it; a model on meta has none yet.

    One tensor at a time passes through the device, so a model larger than the device may come from the CPU.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if job.plan.mesh.world > 1 and not any(tensor.is_meta for tensor in tensors):
        for tensor in tensors:
            value = tensor.detach().to(job.device)
            dist.broadcast(value, src=0)
            tensor.copy_(value)
    return model
