"""How far a rank is in its schedule, against the order that torch's own schedules work in."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strategist.memory.early import EarlySchedule
from strategist.memory.situations import Schedule, Situation
from strategist.memory.vee import ORDERS, turns
from strategist.memory.weight_passes import Turns
from strategist.space.candidates import code
from tests.oracle.torch_orders import torch_order

pytestmark = pytest.mark.slow

SHAPES = ((2, 2, 2), (2, 2, 4), (4, 2, 4), (4, 2, 8), (4, 3, 12), (2, 3, 2), (8, 4, 8))
UNEVEN = ((2, 2, 3), (4, 2, 5), (4, 3, 7), (2, 4, 6))
CASES = (*(("interleaved", *shape) for shape in SHAPES), *(("looped_bfs", *shape) for shape in (*SHAPES, *UNEVEN)))
"""Schedules, stages, virtual stages, micro-batches."""


def _group(word: str, pp: int, virtual: int, count: int, rank: int) -> Any:
    columns = {
        "accumulation": np.array([count]),
        "virtual_stages": np.array([virtual]),
        "schedule": np.array([code("schedule", word)]),
    }
    return SimpleNamespace(candidates=columns, pp=pp, stages=np.array([rank]))


@pytest.mark.parametrize(("pp", "count"), ((2, 2), (2, 6), (4, 4), (4, 12), (8, 8), (8, 16)))
def test_a_stage_with_backward_in_two_parts_holds_most_in_the_turns_looked_at(pp: int, count: int) -> None:
    """Every turn that is looked at is one of torch's order of work, and in none of torch's are more micro-batches held: pp, of
    which as many as the stage's number wait for their second part."""
    columns = {
        name: np.array([value]) for name, value in (("accumulation", count), ("schedule", code("schedule", "zb_h1")))
    }
    for rank in range(1, pp):
        group: Any = SimpleNamespace(candidates=columns, pp=pp, stages=np.array([rank]))
        looked_at = Turns(group, np.array([[True]]))
        seen = _progress(torch_order("zb_h1", pp, 1, count, rank))
        for kind, at in (("BACKWARD_INPUT", looked_at.first_parts()), ("BACKWARD_WEIGHT", looked_at.second_parts())):
            held, stands = at.situation.others + 1.0, at.situation.stands
            said = (part.ravel().tolist() for part in (held, at.waiting, at.sent, stands))
            assert set(zip(*said, strict=True)) <= {(*row[:3], row[3] > 0) for row in seen[kind]}
            assert held.max() == max(held for held, *_ in seen[kind]) == pp
        assert looked_at.first_parts().waiting.max() == rank


IN_A_V = (
    *(("zbv", *shape) for shape in ((2, 1), (2, 3), (2, 8), (4, 5), (4, 7), (4, 16), (8, 15), (8, 17))),
    *(("dualpipev", *shape) for shape in ((2, 4), (2, 7), (4, 8), (4, 9), (4, 16), (8, 16), (8, 21))),
)
"""Schedules, stages, micro-batches."""


@pytest.mark.parametrize(("word", "pp", "count"), IN_A_V)
def test_a_v_is_walked_in_torchs_order_and_holds_most_in_the_turns_looked_at(word: str, pp: int, count: int) -> None:
    """Ranks do backward, whole or in two parts, in the order of torch's schedule; none ever holds more of everything than in some turn that is
    looked at, nor more than two runs of layers of as many micro-batches as there are ranks, and one more where a forward pass is paired
    with a whole backward pass, behind none of whose runs something waits."""
    words = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
    for rank in range(pp):
        works = [(words[kind], int(place >= pp)) for kind, place, _ in torch_order(word, pp, 2, count, rank)]
        assert works == list(ORDERS[word](pp, count, rank))
        ran: Counter[tuple[str, int]] = Counter()
        for kind, run in works:
            whole = rank == run == 0 or kind == "B"
            if kind in "WB" or (kind == "I" and not whole):
                held = [ran["F", place] - ran["W", place] for place in (0, 1)]
                waiting = [ran["I", place] - ran["W", place] for place in (0, 1)]
                assert sum(held) <= 2 * pp + (word == "dualpipev")
                assert kind != "B" or not waiting[run]
                if rank == 0:
                    waiting[0] = 0
                seen = [(turn.held, turn.waiting) for turn in turns(word, pp, count, rank, "B" if whole else kind)]
                assert any(_covers((*most, *waits), (*held, *waiting)) for most, waits in seen)
            for part in "IW" if kind == "B" else kind:
                ran[part, run] += 1


def _covers(most: tuple[int, ...], held: tuple[int, ...]) -> bool:
    return all(own <= theirs for own, theirs in zip(held, most, strict=True))


def _progress(works: list[tuple[str, int, int]]) -> dict[str, set[tuple[int, ...]]]:
    """Before each pass of a kind: micro-batches held, waiting for the second part, through with the first, with the second."""
    ran: Counter[str] = Counter()
    seen: dict[str, set[tuple[int, ...]]] = {}
    for kind, _, _ in works:
        forwards, sent, done = (ran[name] for name in ("FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"))
        seen.setdefault(kind, set()).add((forwards - done, sent - done, sent, done))
        ran[kind] += 1
    return seen


@pytest.mark.parametrize(("word", "pp", "virtual", "count"), CASES)
def test_situations_are_those_of_torchs_schedule(word: str, pp: int, virtual: int, count: int) -> None:
    """At every backward pass of every rank the passes in flight, the chunks with gradients and the reduced chunks are
    those that torch's order of work gives."""
    for rank in range(pp):
        schedule = Schedule(_group(word, pp, virtual, count, rank))
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


@pytest.mark.parametrize(("pp", "virtual", "count"), (*SHAPES, (4, 3, 16), (2, 4, 8)))
def test_units_gathered_too_early_are_those_of_the_stacks_of_fully_shard(pp: int, virtual: int, count: int) -> None:
    """fully_shard numbers a chunk's forward passes, each backward pass takes the number that came last, and gathers the end of the
    pass before it unless there is none (FSDPParamGroup, _backward_prefetch); what is gathered lies until the chunk's next pass, or until
    its last one is reduced. So it is beside every backward and forward pass of torch's order of work."""
    for rank in range(pp):
        schedule = EarlySchedule(_group("interleaved", pp, virtual, count, rank))
        numbers = np.arange(count * virtual)[:, None, None]
        both = schedule.of_both(numbers, numbers)
        said = {"BACKWARD": both.of(slice(len(numbers))), "FORWARD": both.of(slice(len(numbers), None))}
        stacks: list[list[int]] = [[] for _ in range(virtual)]
        there, back, lies = [0] * virtual, [0] * virtual, [False] * virtual
        pending: tuple[int, list[bool]] | None = None
        for kind, place, _ in torch_order("interleaved", pp, virtual, count, rank):
            chunk = place // pp
            if kind == "FORWARD":
                pending = chunk, list(lies)
                stacks[chunk].append(there[chunk])
                there[chunk] += 1
                lies[chunk] = False
                continue
            k = sum(back)
            if pending is not None:
                assert _early(said["FORWARD"], k) == _beside(*pending, finds=pending[1][pending[0]]), (rank, k)
            assert _early(said["BACKWARD"], k) == _beside(chunk, lies, finds=False), (rank, k)
            back[chunk] += 1
            lies[chunk] = stacks[chunk].pop() > 0 and back[chunk] < count
            pending = None


def _early(situation: Situation, k: int) -> tuple[float, ...]:
    names = "early", "early_first", "early_last", "finds_early"
    return tuple(
        float(np.ravel(getattr(situation, name))[k if getattr(situation, name).size > 1 else 0]) for name in names
    )


def _beside(chunk: int, lies: list[bool], *, finds: bool) -> tuple[float, ...]:
    others = [own and number != chunk for number, own in enumerate(lies)]
    return float(sum(others)), float(others[0]), float(others[-1]), float(finds)
