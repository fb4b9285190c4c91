"""What real CPU ranks allocate, as torch's own profiler tells it."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from strategist.document.plan import Plan
from strategist.executor.build import build
from strategist.executor.models import model_from_shape
from strategist.measure.allocator import COUNTED, highest_bytes
from tests.executor.harness import run_ranks

REPEATS = 5


def measured_rises(plan: Plan) -> list[int]:
    """Bytes that rank 0 holds at the peak of a step beyond what it holds before, once per repeated step.

    The profiler sees what the main thread frees; what one of gloo's threads happens to free last stays on its books. So
    a repetition can only measure too much, and the smallest is the one to hold a trace against.
    """
    return list(run_ranks(plan.mesh.world, _rank_rises, plan, timeout_s=300.0)[0])


def _rank_rises(plan: Plan) -> list[int]:
    with build(plan, model_from_shape(plan.model), clip_norm=1.0) as session:
        tokens = torch.zeros(session.share.per_rank, plan.workload.seq_len, dtype=torch.long)
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        session.step(batch)  # makes the optimizer's state
        return [_rise(session, batch) for _ in range(REPEATS)]


def _rise(session: Any, batch: dict[str, torch.Tensor]) -> int:
    """The highest sum of the allocator's own events during the second of two steps, from where the first left it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        session.step(batch)
        with record_function(COUNTED):
            session.step(batch)
    before, peak = highest_bytes(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]
    return peak - before
