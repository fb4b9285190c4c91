"""What an allocator really handed out: the profiler's events on the CPU, CUDA's own statistics on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile, record_function

COUNTED = "the step that counts"


def highest_bytes(changes: Iterable[tuple[int, int]], begin: int) -> tuple[int, int]:
    """(bytes held when the part that counts begins, most bytes held from there on), counted from the first change.

    `changes` are moments in ns and the bytes that came or went, `begin` is the moment in ns at which that part begins.
    """
    ordered = sorted(changes)
    before = sum(change for when, change in ordered if when < begin)
    held = peak = before
    for _, change in ((when, change) for when, change in ordered if when >= begin):
        held += change
        peak = max(peak, held)
    return before, peak


def profiled(prepare: Callable[[], Callable[[], object]]) -> tuple[int, int]:
    """`prepare` makes everything and gives the step that counts: bytes held before it and at its peak, on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = prepare()
        with record_function(COUNTED):
            step()
    events = profiler.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == COUNTED)
    return highest_bytes(((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"), begin)


def cuda_peak(device: torch.device, step: Callable[[], object]) -> tuple[int, int]:
    """(allocated, reserved): the most bytes during `step`, as CUDA's caching allocator counts them."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
