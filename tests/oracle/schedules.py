"""The order in which one pipeline stage works: every forward and backward pass, one at a time (docs/memory_model.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.oracle.stages import Layout


@dataclass(frozen=True)
class Around:
    """A backward pass: its chunk, passes in flight of each chunk (its own included), whose gradients stand, whose are
    reduced, whether some backward pass has ended, whether a forward pass ran just before, and one of the first chunk since its last
    backward pass."""

    chunk: int
    flight: tuple[int, ...]
    stands: tuple[bool, ...]
    reduced: tuple[bool, ...]
    begun: bool
    alternates: bool
    holds_first: bool


def around(layout: Layout, stage: int, number: int) -> Around:
    """Backward pass `number` of a stage, from 0; the last when there are fewer."""
    found = _around(layout["schedule"], layout["pp"], layout["virtual_stages"], layout["accumulation"], stage)
    return found[min(number, len(found) - 1)]


@cache
def _around(schedule: str, pp: int, v: int, m: int, stage: int) -> list[Around]:
    forwards, backwards = [0] * v, [0] * v
    found = []
    fed, held = True, True  # a forward ran since the last backward; one of the first chunk since its own
    for kind, chunk in _order(schedule, pp, v, m, stage):
        if kind == "F":
            forwards[chunk] += 1
            fed = True
            held = held or chunk == 0
            continue
        found.append(
            Around(
                chunk=chunk,
                flight=tuple(f - b for f, b in zip(forwards, backwards, strict=True)),
                stands=tuple(0 < b < m for b in backwards),
                reduced=tuple(b == m for b in backwards),
                begun=any(backwards),
                alternates=fed,
                holds_first=held,
            )
        )
        backwards[chunk] += 1
        fed, held = False, held and chunk != 0
    return found


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
