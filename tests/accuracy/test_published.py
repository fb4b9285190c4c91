"""Predictions of the published runs: what is committed about them is true today."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest

from benchmarks.bench_accuracy import BARS, FALSE_OOM, MEMORY_BARS, alone, figures
from benchmarks.record import read
from docs.accuracy_bars import bars
from strategist.catalog import rows
from tests.accuracy.published import published


@cache
def today() -> dict[str, Any]:
    """The figures of this checkout."""
    return figures(published())


@pytest.mark.slow
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


def test_a_bar_that_is_missed_is_said_to_be_missed() -> None:
    """A figure beyond its bar turns that bar of the page to no, names the source that misses it, and turns no other."""
    result = read("accuracy")
    foundry = next(own for own in result["sources"] if own["source"] == "mosaicml-llm-foundry")
    worse = deepcopy(result) | {"over_sources": {**result["over_sources"], "within_25": 0.7}}
    worse["held_out"]["sources"]["vtrain"] = 0.5
    worse["sources"] = [
        own if own != foundry else {**own, "time": {**own["time"], "median": 0.2}} for own in worse["sources"]
    ]
    pairs = list(zip(bars(result), bars(worse), strict=True))
    turned = [after for before, after in pairs if before.measured != after.measured]
    assert not any(bar.is_met for bar in turned)
    assert [bar.words.split(":")[0].split(",")[0] for bar in turned] == [
        "llm-foundry",
        "runs within 25 %",
        "the same by source of 20 runs or more",
    ]
    assert "vtrain 50 %" in turned[-1].measured


def test_a_source_is_alone_where_no_other_has_its_devices_or_framework() -> None:
    """InternEvo's framework and the RTX 3090 Ti appear in one source each; BLOOM shares its card and framework with vTrain."""
    lonely = alone(published())
    assert {"internlm-internevo", "mli-transformers-benchmarks"} <= lonely
    assert not lonely & {"bigscience-bloom-prequel", "vtrain"}


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
