"""A weight that two pipeline stages share: the embedding on the first, the head on the last.

Each keeps a copy. After backward both add the other's gradient to their own, so both take the same update for ever
(Megatron-LM, arXiv 2104.04473, section 5.1, all-reduces the same two). Two messages instead of a collective need no
further process group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from strategist.executor.chunks import chunks_of
from strategist.executor.initialise import local_part
from strategist.executor.job import Job
from strategist.executor.models import require_splittable


class TiedEnds:
    """This rank's copy of the shared weight; nothing at all when there is no pipeline or no tie."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        self.job = job
        self.weight = _shared_weight(model) if job.plan.mesh.pp > 1 else None

    @property
    def duplicate(self) -> nn.Parameter | None:
        """The copy that must not be counted a second time in a norm over all stages."""
        return self.weight if self.job.stage.head else None

    def add_gradients(self) -> None:
        """Make both copies' gradients the sum of the two."""
        if self.weight is None or self.weight.grad is None:
            return
        group = self.job.mesh["pp"].get_group()
        other = 0 if self.job.stage.head else self.job.plan.mesh.pp - 1
        mine = local_part(self.weight.grad)
        theirs = torch.empty_like(mine)
        peer = dist.get_global_rank(group, other)
        messages = [dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]
        for request in dist.batch_isend_irecv(messages):
            request.wait()
        mine += theirs


def _shared_weight(model: nn.Module) -> nn.Parameter | None:
    for chunk in chunks_of(model):
        cuts = require_splittable(chunk, "pp")
        embedding = cuts.embedding() if cuts.tied else None
        if embedding is not None:
            return embedding.get_parameter("weight")
    return None
