"""A trace of a program that others measured reserves what they published."""

from __future__ import annotations

import pytest

from benchmarks.bench_reserved import BAR, RUNS, compared
from tests.examples import by_night

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("run", by_night(RUNS, tuple(RUNS)[1:]))
def test_torchtitans_program_reserves_what_torchtitan_published(run: str) -> None:
    """The allocator's model, fed with the trace of torchtitan's own Llama and policy, ends within the bar, nothing fitted."""
    assert abs(compared(run)["error"]) <= BAR
