"""The executor's own program on one rank of a world that is not there: fake collectives and, traced, fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage

from strategist.document.plan import Plan
from strategist.executor.build import bring_to_life, lay_out
from strategist.executor.job import Instruments, Job
from strategist.executor.mesh import build_mesh
from strategist.executor.models import model_from_shape
from strategist.executor.precision import DTYPES
from strategist.executor.session import Session


class SilentStage(PipelineStage):
    """A stage that knows its shapes and does not ask its peers, who are fake."""

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Any:
        return torch.ones(1, dtype=torch.int32, device="meta")

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Any:
        return _Yes()


class _Yes:
    """What the stages would answer together."""

    def item(self) -> int:
        """Agreement."""
        return 1


@contextmanager
def fake_world(plan: Plan, rank: int) -> Iterator[None]:
    """A process group of the plan's size in which this process is `rank` and nobody else exists. One per process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=plan.mesh.world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def job_for(plan: Plan, device: torch.device) -> Job:
    """The job of this rank, with the parts exchanged that need real peers or real numbers."""
    instruments = Instruments(read=lambda _value: 1.0, make_stage=lambda *a, **k: _stage(plan, *a, **k))
    return Job(plan=plan, mesh=build_mesh(plan, device.type), device=device, instruments=instruments)


def _stage(plan: Plan, model: Any, index: int, count: int, device: torch.device, **options: Any) -> PipelineStage:
    """The stage with its boundary shapes: tokens in, hidden states between (cut by sequence parallelism), logits out."""
    rows, seq = plan.strategy.micro_batch, plan.workload.seq_len
    dtype = DTYPES[plan.strategy.formats.compute]
    width = seq // plan.mesh.tp if plan.strategy.sequence_parallel else seq
    hidden = torch.empty(rows, width, plan.model.hidden, dtype=dtype, requires_grad=True)
    tokens = torch.zeros(rows, seq, dtype=torch.long)
    logits = torch.empty(rows, seq, plan.model.vocab, dtype=dtype, requires_grad=True)
    inputs, outputs = tokens if index == 0 else hidden, logits if index == count - 1 else hidden
    return SilentStage(model, index, count, device, input_args=(inputs,), output_args=(outputs,), **options)
