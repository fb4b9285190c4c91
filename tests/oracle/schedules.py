"""The order in which one pipeline stage works: every forward and backward pass, one at a time (docs/memory_model.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.oracle.stages import Layout


@dataclass(frozen=True)
class Around:
    """A pass: its chunk, passes in flight of each chunk (its own included), whose gradients stand, whose are
    reduced, whether some backward pass has ended, whether a forward pass ran just before, and one of the first chunk since its last
    backward pass, which chunks have a unit that was gathered before its time and not used, and whether it is a forward pass itself."""

    chunk: int
    flight: tuple[int, ...]
    stands: tuple[bool, ...]
    reduced: tuple[bool, ...]
    begun: bool
    alternates: bool
    holds_first: bool
    early: tuple[bool, ...] = (False,)
    is_forward: bool = False


def around(layout: Layout, stage: int, number: int) -> Around:
    """Backward pass `number` of a stage, from 0; the last when there are fewer."""
    found = _passes_of(layout, stage)[0]
    return found[min(number, len(found) - 1)]


def around_forward(layout: Layout, stage: int, number: int) -> Around:
    """The forward pass that runs just before; that backward pass where none does."""
    found = _passes_of(layout, stage)[1]
    return found[min(number, len(found) - 1)]


def in_vain(layout: Layout, stage: int) -> list[int]:
    """Chunks of a stage in turn whose last backward pass gathers a unit before its time, though no pass of theirs follows."""
    v, m = layout["virtual_stages"], layout["accumulation"]
    waiting: list[list[int]] = [[] for _ in range(v)]
    forwards, found = [0] * v, dict.fromkeys(range(v), 0)
    for kind, chunk in _order(layout["schedule"], layout["pp"], v, m, stage):
        if kind == "F":
            waiting[chunk].append(forwards[chunk])
            forwards[chunk] += 1
        else:
            found[chunk] = waiting[chunk].pop()
    return [chunk for chunk, number in found.items() if number > 0]


def _passes_of(layout: Layout, stage: int) -> tuple[list[Around], list[Around]]:
    return _around(layout["schedule"], layout["pp"], layout["virtual_stages"], layout["accumulation"], stage)


@cache
def _around(schedule: str, pp: int, v: int, m: int, stage: int) -> tuple[list[Around], list[Around]]:
    forwards, backwards = [0] * v, [0] * v
    waiting: list[list[int]] = [
        [] for _ in range(v)
    ]  # forward passes of a chunk by number that wait for their backward pass
    early = [False] * v
    found, before = [], []
    fed, held = None, True  # the forward since the last backward; one of the first chunk ran since its own
    for kind, chunk in _order(schedule, pp, v, m, stage):
        if kind == "F":
            waiting[chunk].append(forwards[chunk])
            forwards[chunk] += 1
        here = Around(
            chunk=chunk,
            flight=tuple(f - b for f, b in zip(forwards, backwards, strict=True)),
            stands=tuple(0 < b < m for b in backwards),
            reduced=tuple(b == m for b in backwards),
            begun=any(backwards),
            alternates=kind == "F" or fed is not None,
            holds_first=held,
            early=tuple(early),
            is_forward=kind == "F",
        )
        if kind == "F":
            fed, held, early[chunk] = here, held or chunk == 0, False
            continue
        found.append(here)
        before.append(fed or here)
        backwards[chunk] += 1
        early[chunk] = waiting[chunk].pop() > 0 and backwards[chunk] < m  # the last to come is the first to go
        fed, held = None, held and chunk != 0
    return found, before


def _order(schedule: str, pp: int, v: int, m: int, stage: int) -> Iterator[tuple[str, int]]:
    """Passes as ("F" or "B", chunk)."""
    turn = m if schedule == "looped_bfs" else pp
    if schedule == "interleaved":
        warm = min((v - 1) * pp + 2 * (pp - 1 - stage), v * m)
    else:
        warm = {"1f1b": min(m, pp - stage), "zb_h1": min(m, pp)}.get(schedule, v * m)
    there = [("F", step // turn % v) for step in range(v * m)]
    back = [("B", v - 1 - step // turn % v) for step in range(v * m)]
    yield from there[:warm]
    waiting = there[warm:]
    for backward in back:
        if schedule == "interleaved" and waiting:
            yield waiting.pop(0)
        yield backward
        if schedule != "interleaved" and waiting:
            yield waiting.pop(0)
