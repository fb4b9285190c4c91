"""The executor's own program at a world size that no test machine has: fake tensors, fake collectives, one process."""

from __future__ import annotations

from contextlib import ExitStack
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
        class Yes:
            def item(self) -> int:
                return 1

        return Yes()


def trace_rank(plan: Plan, rank: int) -> dict[str, int]:
    """Two steps of one rank's program under fake tensors: steps done, and elements of parameters held."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=plan.mesh.world, store=FakeStore())
    instruments = Instruments(read=lambda _value: 1.0, make_stage=lambda *a, **k: _stage(plan, *a, **k))
    job = Job(plan=plan, mesh=build_mesh(plan, "cpu"), device=torch.device("cpu"), instruments=instruments)
    model = lay_out(model_from_shape(plan.model, routing="balanced"), job)
    with FakeTensorMode(allow_non_fake_inputs=True):
        session = Session(job, bring_to_life(model, job), clip_norm=1.0, resources=ExitStack())
        tokens = torch.zeros(session.share.per_rank, plan.workload.seq_len, dtype=torch.long)
        for _ in range(2):
            session.step({"input_ids": tokens, "labels": tokens})
        held = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    return {"steps": session.steps, "held": held}


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
