"""The published runs, judged once for all tests."""

from __future__ import annotations

from functools import cache

from benchmarks.held_out import RUNS
from strategist.accuracy.judge import Judged, judge
from strategist.accuracy.table import read_runs
from strategist.facts.calibration import shipped_factors


@cache
def shipped() -> tuple[Judged, ...]:
    """Every row under the factors that ship."""
    return judge(read_runs(str(RUNS)), shipped_factors())


@cache
def published() -> tuple[Judged, ...]:
    """Every row of the published tables by the formulas alone: predicted, or skipped with its reason."""
    return judge(read_runs(str(RUNS)))
