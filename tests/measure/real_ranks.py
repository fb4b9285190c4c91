"""What real CPU ranks allocate, as torch's own profiler tells it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from strategist.document.plan import Plan
from strategist.executor.build import build
from strategist.executor.models import model_from_shape
from strategist.measure.allocator import COUNTED, Change, highest_bytes, recorded
from tests.executor.harness import run_ranks

REPEATS = 5


def measured_rises(plan: Plan) -> list[int]:
    """Bytes that rank 0 holds at the peak of a step beyond what it holds before, once per repeated step.

    Gloo reduces and scatters in a copy of its own, which NCCL does without and which whichever thread lets go last frees;
    the profiler sees that only of the main thread. So what a collective allocates for itself is left out.
    """
    return list(run_ranks(plan.mesh.world, _rank_rises, plan, timeout_s=300.0)[0])


def _rank_rises(plan: Plan) -> list[int]:
    with build(plan, model_from_shape(plan.model), clip_norm=1.0) as session:
        tokens = torch.zeros(session.share.size, plan.workload.seq_len, dtype=torch.long)
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        session.step(batch)  # makes the optimizer's state
        return [_rise(session, batch) for _ in range(REPEATS)]


def _rise(session: Any, batch: dict[str, torch.Tensor]) -> int:
    """The highest sum of the allocator's own events during the second of two steps, from where the first left it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        session.step(batch)
        with record_function(COUNTED):
            session.step(batch)
    begin, changes = recorded(profiler)
    before, peak = highest_bytes(_without_collectives(changes), begin)
    return peak - before


def _without_collectives(changes: Iterable[Change]) -> Iterator[tuple[int, int]]:
    """Moments and bytes of what no collective asked for: an address belongs to whom got it last."""
    of_collectives: set[int] = set()
    for when, address, nbytes, operators in changes:
        if nbytes > 0:
            is_collective = any(name.startswith("c10d::") for name in operators)
            (of_collectives.add if is_collective else of_collectives.discard)(address)
        if address not in of_collectives:
            yield when, nbytes
