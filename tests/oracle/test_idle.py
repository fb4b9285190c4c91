"""How long a pipeline idles, against a clock that runs torch's own order of work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strategist.space.candidates import Candidates, code
from strategist.timing.estimate import bubble, waited_for
from tests.oracle.torch_orders import Work, torch_pairs

pytestmark = pytest.mark.slow

FORWARD, BACKWARD, WEIGHTS = 3, 5, 2
"""Seconds of a pass through one chunk; those of the gradients of weights are part of the backward pass."""
SHAPES = ((2, 2, 2), (2, 3, 6), (4, 2, 4), (4, 2, 12), (8, 4, 8))
"""Stages, virtual stages, micro-batches."""
UNEVEN = ((2, 2, 3), (4, 2, 5), (4, 3, 7))
WHOLE = ((2, 1, 2), (2, 1, 6), (4, 1, 4), (4, 1, 12), (8, 1, 8), (8, 1, 16))
IN_A_V = ((2, 2, 3), (2, 2, 8), (4, 2, 7), (4, 2, 16), (8, 2, 15), (8, 2, 17))
IN_PAIRS = ((2, 2, 4), (2, 2, 9), (4, 2, 8), (4, 2, 13), (8, 2, 16), (8, 2, 24))
CASES = (
    *product(("interleaved", "looped_bfs"), SHAPES),
    *product(("looped_bfs",), UNEVEN),
    *product(("zb_h1",), WHOLE),
    *product(("zbv",), IN_A_V),
    *product(("dualpipev",), IN_PAIRS),
)


def _seconds(lasts: Callable[[str, int], int], word: str, pp: int, virtual: int, count: int) -> int:
    """When the last rank is done, if every rank works in torch's order and begins as soon as what it needs is there: of its own results at
    once, of another rank's when the pair that they belong to is over."""
    waiting = [deque(torch_pairs(word, pp, virtual, count, rank)) for rank in range(pp)]
    free, sent, last = [0] * pp, dict[Work, int](), pp * virtual - 1
    own: list[dict[Work, int]] = [{} for _ in range(pp)]
    for _ in range(3 * pp * virtual * count):  # each round something can be done
        for rank, pairs in enumerate(waiting):
            while pairs:
                works = [work for work in pairs[0] if _said(work) not in own[rank]]
                for work in works:
                    ready = _ready(work, last, sent | own[rank])
                    if ready is None:
                        break
                    free[rank] = max(free[rank], ready) + lasts(*work[:2])
                    own[rank][_said(work)] = free[rank]
                else:
                    sent |= {_said(work): free[rank] for work in pairs.popleft()}
                    continue
                break
    assert not any(waiting), waiting
    return max(free)


def _said(work: Work) -> Work:
    """A pass by what it gives others: a gradient of its input, whichever part of backward that comes from."""
    kind, stage, micro = work
    return ("BACKWARD_INPUT" if kind == "FULL_BACKWARD" else kind), stage, micro


def _lasting(forward: int, backward: int, weights: int) -> Callable[[str, int], int]:
    """Seconds of a pass. The first stage's inputs need no gradient: torch does everything there in the second part."""

    def lasts(kind: str, stage: int) -> int:
        split = {
            "BACKWARD_INPUT": 0 if stage == 0 else backward - weights,
            "BACKWARD_WEIGHT": backward if stage == 0 else weights,
        }
        return ({"FORWARD": forward, "FULL_BACKWARD": backward} | split)[kind]

    return lasts


def _ready(work: Work, last: int, done: Mapping[Work, int]) -> int | None:
    """When what a pass needs is there; None while it is not."""
    kind, stage, micro = work
    if kind == "FORWARD":
        return 0 if stage == 0 else done.get((kind, stage - 1, micro))
    if kind == "BACKWARD_WEIGHT":
        return done.get(("BACKWARD_INPUT", stage, micro))
    return done.get(("FORWARD", last, micro) if stage == last else ("BACKWARD_INPUT", stage + 1, micro))


@pytest.mark.parametrize(("word", "shape"), CASES)
def test_stages_idle_as_long_as_a_clock_says(word: str, shape: tuple[int, int, int]) -> None:
    """With equal stages the predicted idle time and the work make the time after which torch's order is through."""
    _assert_idles(word, shape, FORWARD, BACKWARD, WEIGHTS)


@pytest.mark.parametrize("shape", IN_PAIRS)
@pytest.mark.parametrize("seconds", ((10, 22, 10), (10, 21, 9), (10, 30, 5)))
def test_pairs_idle_as_long_as_a_clock_says(shape: tuple[int, int, int], seconds: tuple[int, int, int]) -> None:
    """So they do under DualPipeV where gradients of inputs take longer than forward, by little or by much."""
    _assert_idles("dualpipev", shape, *seconds)


def _assert_idles(word: str, shape: tuple[int, int, int], forward: int, backward: int, weights: int) -> None:
    pp, virtual, count = shape
    of_one = virtual * (forward + backward)
    columns = {"virtual_stages": np.array([virtual]), "schedule": np.array([code("schedule", word)])}
    group: Any = SimpleNamespace(pp=pp, stands_for=np.ones(pp), candidates=Candidates(columns))
    parts = (np.full((1, pp), float(size)) for size in (of_one, virtual * forward, virtual * weights))
    idle = bubble(group, waited_for(group, *parts))
    assert _seconds(_lasting(forward, backward, weights), word, pp, virtual, count) == pytest.approx(
        count * of_one + idle.item()
    )
