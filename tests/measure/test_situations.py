"""How far a rank is in its schedule, against the order that torch's own schedules work in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strategist.memory.situations import Schedule
from strategist.space.candidates import code
from tests.oracle.torch_orders import torch_order

pytestmark = pytest.mark.slow

SHAPES = ((2, 2, 2), (2, 2, 4), (4, 2, 4), (4, 2, 8), (4, 3, 12), (2, 3, 2), (8, 4, 8))
UNEVEN = ((2, 2, 3), (4, 2, 5), (4, 3, 7), (2, 4, 6))
CASES = (*(("interleaved", *shape) for shape in SHAPES), *(("looped_bfs", *shape) for shape in (*SHAPES, *UNEVEN)))
"""Schedules, stages, virtual stages, micro-batches."""


def _schedule(word: str, pp: int, virtual: int, count: int, rank: int) -> Schedule:
    columns = {
        "accumulation": np.array([count]),
        "virtual_stages": np.array([virtual]),
        "schedule": np.array([code("schedule", word)]),
    }
    group: Any = SimpleNamespace(candidates=columns, pp=pp, stages=np.array([rank]))
    return Schedule(group)


@pytest.mark.parametrize(("word", "pp", "virtual", "count"), CASES)
def test_situations_are_those_of_torchs_schedule(word: str, pp: int, virtual: int, count: int) -> None:
    """At every backward pass of every rank the passes in flight, the chunks with gradients and the reduced chunks are
    those that torch's order of work gives."""
    for rank in range(pp):
        schedule = _schedule(word, pp, virtual, count, rank)
        there, back = [0] * virtual, [0] * virtual
        for kind, place, _ in torch_order(word, pp, virtual, count, rank):
            chunk = place // pp
            if kind == "FORWARD":
                there[chunk] += 1
                continue
            found = schedule.at(np.array([[sum(back)]]))
            flight = [f - b for f, b in zip(there, back, strict=True)]
            reduced = [b == count for b in back]
            stands = [b > 0 and not done for b, done in zip(back, reduced, strict=True)]
            expected = {
                "others": sum(flight) - 1,
                "others_first": flight[0] - (chunk == 0),
                "others_last": flight[-1] - (chunk == virtual - 1),
                "is_first": chunk == 0,
                "is_last": chunk == virtual - 1,
                "stands": stands[chunk],
                "standing": sum(stands) / virtual,
                "first_stands": back[0] > 0,
                "last_stands": stands[-1],
                "reduced": sum(reduced) / virtual,
                "last_reduced": reduced[-1],
            }
            said = {name: getattr(found, name).item() for name in expected}
            assert said == pytest.approx(expected), (rank, sum(back))
            back[chunk] += 1
