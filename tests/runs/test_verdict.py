"""The rank that broke is named, not those that lost it."""

from __future__ import annotations

import itertools
import signal
from typing import Any

import pytest

from strategist.runs.beats import PHASES, Beat
from strategist.runs.verdict import Evidence, Failure, judge


def beats(*places: tuple[int, str]) -> dict[int, Beat]:
    """Beats of ranks 0, 1, ... at (step, phase)."""
    return {r: Beat(rank=r, pid=r, step=s, phase=p, at=0.0, resident_bytes=2**30) for r, (s, p) in enumerate(places)}


def lost(rank: int) -> Failure:
    """What a victim says."""
    return Failure(rank=rank, collateral=True, text="Connection reset by peer")


BROKE = Failure(rank=1, collateral=False, text="ValueError: no data")
NAN = tuple(Failure(rank=r, collateral=False, text="loss nan", deterministic=True) for r in range(2))
AT_3 = beats((3, "backward"), (3, "backward"))

CASES: dict[str, tuple[dict[str, Any], int | None, str, str, str]] = {
    "its own words beat a victim's": (
        {"ends": {0: 6, 1: 6}, "failures": {0: lost(0), 1: BROKE}}, 1, "ValueError: no data", "observed", "may succeed"
    ),
    "a killed rank beats a victim": (
        {"ends": {0: 6, 1: -9}, "failures": {0: lost(0)}}, 1, "SIGKILL", "observed", "may succeed"
    ),
    "a killed rank beats one that aborted for want of peers": (
        {"ends": {0: -signal.SIGABRT, 1: -signal.SIGSEGV}}, 1, "SIGSEGV", "observed", "may succeed"
    ),
    "a crash says where": (
        {"ends": {0: 6, 1: -signal.SIGSEGV}, "failures": {0: lost(0)}, "stacks": {1: 'File "/x/torch/a.py", line 7 in wait_tensor'}},
        1, '(SIGSEGV) in backward of step 3: File "/x/torch/a.py", line 7 in wait_tensor.', "observed", "may succeed"
    ),
    "the same error everywhere comes again": (
        {"ends": {0: 6, 1: 6}, "failures": dict(enumerate(NAN))}, 0, "All ranks failed", "observed", "will fail again"
    ),
    "who left early is no victim": (
        {"ends": {0: 6, 1: 0}, "failures": {0: lost(0)}}, 1, "left in backward of step 3", "observed", "may succeed"
    ),
    "a stopped rank": (
        {"ends": {}, "silent_seconds": 9.0, "stopped": (1,)}, 1, "stopped by a signal", "observed", "may succeed"
    ),
    "the rank that is behind": (
        {"ends": {}, "silent_seconds": 9.0, "beats": beats((3, "forward"), (3, "data"))}, 1, "data of step 3", "observed",
        "may succeed",
    ),
    "a rank that never spoke": (
        {"ends": {}, "silent_seconds": 9.0, "beats": beats((0, "start"))}, 1, "never said anything", "observed", "may succeed"
    ),
    "side by side, the one that is not in torch": (
        {"ends": {}, "silent_seconds": 9.0, "stacks": {0: 'File "/x/torch/autograd/graph.py"', 1: 'File "/home/data.py"'}},
        1, "/home/data.py", "inferred", "may succeed",
    ),
    "side by side, both in torch": (
        {"ends": {}, "silent_seconds": 9.0, "stacks": {0: "/x/torch/a.py", 1: "/x/torch/a.py"}}, None, "No rank got further",
        "unknown", "unknown",
    ),
    "only victims": (
        {"ends": {0: 6, 1: 6}, "failures": {0: lost(0), 1: lost(1)}}, None, "lost each other", "unknown", "unknown"
    ),
    "no word and an exit status": ({"ends": {1: 3}, "beats": {}}, 1, "exit status 3", "observed", "may succeed"),
}  # fmt: skip


@pytest.mark.parametrize(("seen", "rank", "words", "evidence", "retry"), CASES.values(), ids=CASES)
def test_the_first_rank_is_named(seen: dict[str, Any], rank: int | None, words: str, evidence: str, retry: str) -> None:
    """Rank, cause, how it is known, and what a retry would bring; the others are victims."""
    verdict = judge(Evidence(**{"world": 2, "beats": AT_3, "failures": {}} | seen), attempt=0)
    assert (verdict.rank, verdict.evidence, verdict.retry) == (rank, evidence, retry)
    assert words in verdict.cause
    assert verdict.cause.endswith((".", "reset by peer.")) or verdict.domain == "workload"
    assert verdict.victims == tuple(r for r in range(2) if r != rank)


def test_phases_are_in_the_order_of_a_step() -> None:
    """A rank one phase further on has made more progress, and one in the next step more than any in this."""
    for before, after in itertools.pairwise(PHASES):
        first, second = beats((4, before), (4, after)).values()
        assert first.progress < second.progress
    last, first = beats((4, PHASES[-1]), (5, PHASES[0])).values()
    assert last.progress < first.progress
