"""Predictions of the published runs: what is committed about them is true today."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from benchmarks.bench_accuracy import BARS, figures
from benchmarks.record import read
from strategist.catalog import rows
from tests.accuracy.published import published


@cache
def today() -> dict[str, Any]:
    """The figures of this checkout."""
    return figures(published())


def test_committed_figures_are_todays() -> None:
    """results/accuracy.json, and with it docs/accuracy.md, is what this checkout predicts."""
    for part in ("over_sources", "all", "sources", "intervals", "held_out"):
        assert today()[part] == read("accuracy")[part], f"run `make bench-accuracy docs`: {part}"


def test_shipped_intervals_are_those_of_the_published_runs() -> None:
    """The catalogue's intervals of the step are the middle of the errors, architecture by architecture."""
    shipped = {
        row["arch"]: {"low": row["low"], "high": row["high"]} for row in rows("intervals") if row["name"] == "time"
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
