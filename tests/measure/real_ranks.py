"""What real CPU ranks allocate, as torch's own profiler tells it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

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


class _Allocation(NamedTuple):
    """Bytes that came (or went, below zero) at an address, at a moment in ns; whether a collective asked for them."""

    when: int
    address: int
    change: int
    of_collective: bool


def _rise(session: Any, batch: dict[str, torch.Tensor]) -> int:
    """The highest sum of the allocator's own events during the second of two steps, from where the first left it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        session.step(batch)
        with record_function(COUNTED):
            session.step(batch)
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    begin = next(event.start_ns() for event in results.events() if event.name() == COUNTED)
    before, peak = highest_bytes(_of_program(_allocations(results.experimental_event_tree())), begin)
    return peak - before


def _allocations(nodes: Iterable[Any], of_collective: bool = False) -> Iterator[_Allocation]:
    for node in nodes:
        if node.name == "[memory]":
            fields = node.extra_fields
            yield _Allocation(node.start_time_ns, fields.ptr, fields.alloc_size, of_collective)
        yield from _allocations(node.children, of_collective or node.name.startswith("c10d::"))


def _of_program(allocations: Iterable[_Allocation]) -> Iterator[tuple[int, int]]:
    """Moments and bytes of what the program itself holds: an address belongs to whom got it last."""
    of_collectives: set[int] = set()
    for when, address, change, of_collective in sorted(allocations):
        if change > 0:
            (of_collectives.add if of_collective else of_collectives.discard)(address)
        if address not in of_collectives:
            yield when, change
