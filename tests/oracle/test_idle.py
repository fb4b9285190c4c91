"""How long a pipeline idles, against a clock that runs torch's own order of work."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strategist.space.candidates import Candidates, code
from strategist.timing.estimate import bubble, waited_for
from tests.oracle.torch_orders import torch_order

pytestmark = pytest.mark.slow

FORWARD, BACKWARD, WEIGHTS = 3, 5, 2
"""Seconds of a pass through one chunk; those of the gradients of weights are part of the backward pass."""
SHAPES = ((2, 2, 2), (2, 3, 6), (4, 2, 4), (4, 2, 12), (8, 4, 8))
"""Stages, virtual stages, micro-batches."""
UNEVEN = ((2, 2, 3), (4, 2, 5), (4, 3, 7))
WHOLE = ((2, 1, 2), (2, 1, 6), (4, 1, 4), (4, 1, 12), (8, 1, 8), (8, 1, 16))
IN_A_V = ((2, 2, 3), (2, 2, 8), (4, 2, 7), (4, 2, 16), (8, 2, 15), (8, 2, 17))
CASES = (
    *product(("interleaved", "looped_bfs"), SHAPES),
    *product(("looped_bfs",), UNEVEN),
    *product(("zb_h1",), WHOLE),
    *product(("zbv",), IN_A_V),
)


def _seconds(word: str, pp: int, virtual: int, count: int) -> int:
    """When the last rank is done, if every rank works in torch's order and begins as soon as what it needs is there."""
    waiting = [torch_order(word, pp, virtual, count, rank) for rank in range(pp)]
    free, done = [0] * pp, dict[tuple[str, int, int], int]()
    last = pp * virtual - 1
    for _ in range(3 * pp * virtual * count):  # each round something can be done
        for rank, orders in enumerate(waiting):
            while orders and (ready := _ready(orders[0], last, done)) is not None:
                free[rank] = max(free[rank], ready) + _lasts(*orders[0][:2])
                done[orders.pop(0)] = free[rank]
    assert not any(waiting), waiting
    return max(free)


def _lasts(kind: str, stage: int) -> int:
    """Seconds of a pass. The first stage's inputs need no gradient: torch does everything there in the second part."""
    split = {
        "BACKWARD_INPUT": 0 if stage == 0 else BACKWARD - WEIGHTS,
        "BACKWARD_WEIGHT": BACKWARD if stage == 0 else WEIGHTS,
    }
    return ({"FORWARD": FORWARD, "FULL_BACKWARD": BACKWARD} | split)[kind]


def _ready(work: tuple[str, int, int], last: int, done: dict[tuple[str, int, int], int]) -> int | None:
    """When what a pass needs is there; None while it is not."""
    kind, stage, micro = work
    if kind == "FORWARD":
        return 0 if stage == 0 else done.get((kind, stage - 1, micro))
    if kind == "BACKWARD_WEIGHT":
        return done.get(("BACKWARD_INPUT", stage, micro))
    return done.get(("FORWARD", last, micro) if stage == last else (kind, stage + 1, micro))


@pytest.mark.parametrize(("word", "shape"), CASES)
def test_stages_idle_as_long_as_a_clock_says(word: str, shape: tuple[int, int, int]) -> None:
    """With equal stages the predicted idle time and the work make the time after which torch's order is through."""
    pp, virtual, count = shape
    of_one = virtual * (FORWARD + BACKWARD)
    columns = {"virtual_stages": np.array([virtual]), "schedule": np.array([code("schedule", word)])}
    group: Any = SimpleNamespace(pp=pp, stands_for=np.ones(pp), candidates=Candidates(columns))
    whole, forward, weights = (np.full((1, pp), float(size)) for size in (of_one, virtual * FORWARD, virtual * WEIGHTS))
    idle = bubble(group, waited_for(group, whole, forward, weights))
    assert _seconds(word, pp, virtual, count) == pytest.approx(count * of_one + idle.item())
