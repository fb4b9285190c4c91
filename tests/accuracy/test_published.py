"""Predictions of the published runs: what is committed about them is true today."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from benchmarks.bench_accuracy import BARS, FALSE_OOM, MEMORY_BARS, figures
from benchmarks.record import read
from strategist.catalog import rows
from tests.accuracy.published import published


@cache
def today() -> dict[str, Any]:
    """The figures of this checkout."""
    return figures(published())


def test_committed_figures_are_todays() -> None:
    """results/accuracy.json, and with it docs/accuracy.md, is what this checkout predicts."""
    for part in ("over_sources", "all", "sources", "memory", "verdicts", "intervals", "held_out", "flagged"):
        assert today()[part] == read("accuracy")[part], f"run `make bench-accuracy docs`: {part}"


def test_shipped_intervals_are_those_of_the_published_runs() -> None:
    """The catalogue's intervals of the step are the middle of the errors, chip by chip."""
    shipped = {
        row["chip"]: {"low": row["low"], "high": row["high"]} for row in rows("intervals") if row["name"] == "time"
    }
    assert shipped == today()["intervals"]


@pytest.mark.parametrize("name", BARS)
def test_what_was_reached_is_kept(name: str) -> None:
    """Averaged over sources, the factor and the shares of near predictions do not get worse than the bars of the page."""
    value, bar = today()["over_sources"][name], BARS[name]
    assert value <= bar if name == "factor" else value >= bar


def test_intervals_made_without_a_source_hold_on_it() -> None:
    """With bounds from all other sources, between 75 and 90 % of the runs lie inside their 80 % interval."""
    assert 0.75 <= today()["held_out"]["coverage"] <= 0.90


def test_intervals_are_not_wide() -> None:
    """Half of the runs have an interval made without their source that is no wider than 20 % to either side."""
    assert today()["held_out"]["median_half_width"] <= 0.20


@pytest.mark.parametrize("source", MEMORY_BARS)
def test_peak_memory_stays_within_its_bars(source: str) -> None:
    """Every published memory figure of the source together: mean, median and largest error, and bias, are within the bars."""
    found = [own for own in today()["memory"] if own["source"] == source]
    assert found
    for own in found:
        bars = MEMORY_BARS[source] if own["runs"] >= 5 else {}
        assert all(abs(own[name]) <= bar for name, bar in bars.items()), own


def test_verdicts_miss_no_run_that_went_out_of_memory() -> None:
    """No run that went out of memory is predicted to fit, and at most one in twenty that ran is predicted not to."""
    oom = today()["verdicts"]
    assert oom["fits_but_oom"] == 0
    assert oom["refused_but_ran"] <= FALSE_OOM * (oom["fits_and_ran"] + oom["refused_but_ran"])
