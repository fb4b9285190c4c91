"""What an allocator really handed out: the profiler's events on the CPU, CUDA's own statistics on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

COUNTED = "the step that counts"

MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"})


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


class Change(NamedTuple):
    """Bytes that came (or went, below zero) at an address, at a moment in ns, inside which operators, outermost first."""

    when: int
    address: int
    nbytes: int
    operators: tuple[str, ...]


def changes_of_program(nodes: Iterable[Any], operators: tuple[str, ...] = ()) -> Iterator[Change]:
    """What the program itself allocates and frees, of the profiler's tree of events.

    What a matrix product gives back before it ends is its kernel's own and left out: how much oneDNN asks for to rearrange
    operands in depends on the CPU's instruction set. It is no tensor of the program; workspaces are the runtime's term.
    """
    for node in nodes:
        if node.name == "[memory]":
            fields = node.extra_fields
            yield Change(node.start_time_ns, fields.ptr, fields.alloc_size, operators)
            continue
        inside = changes_of_program(node.children, (*operators, node.name))
        yield from _outlasting(inside) if node.name in MATRIX_PRODUCTS else inside


def _outlasting(changes: Iterable[Change]) -> list[Change]:
    """The changes without those that take each other back."""
    kept: list[Change] = []
    for change in sorted(changes):
        came = next((earlier for earlier in kept if earlier.address == change.address), None)
        if came is not None and came.nbytes == -change.nbytes > 0:
            kept.remove(came)
        else:
            kept.append(change)
    return kept


def profiled(prepare: Callable[[], Callable[[], object]]) -> tuple[int, int]:
    """`prepare` makes everything and gives the step that counts: bytes held before it and at its peak, on the CPU.

    Workspaces of matrix products are left out (`changes_of_program`).
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = prepare()
        with record_function(COUNTED):
            step()
    begin, changes = recorded(profiler)
    return highest_bytes(((change.when, change.nbytes) for change in changes), begin)


def recorded(profiler: profile) -> tuple[int, list[Change]]:
    """(the moment in ns at which what COUNTED marks begins, all changes in order) of a profile of memory that has ended."""
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    begin = next(event.start_ns() for event in results.events() if event.name() == COUNTED)
    return begin, sorted(changes_of_program(results.experimental_event_tree()))


def cuda_peak(device: torch.device, step: Callable[[], object]) -> tuple[int, int]:
    """(allocated, reserved): the most bytes during `step`, as CUDA's caching allocator counts them."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
