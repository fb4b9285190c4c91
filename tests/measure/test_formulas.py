"""The planner's formulas against the executor's program: what must agree, and how nearly.

`make bench-memory` prints every figure of the whole grid; here stand the bars that each figure has to keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

import pytest

from tests.measure.grid import PEAK, Difference, Scenario, differences, plan_of, scenarios
from tests.measure.recordings import traced

SAMPLE = tuple(scenarios()[number] for number in range(0, 280, 7))
BARS = {
    ("memory", PEAK, "allocated"): 2e-2,
    ("memory", PEAK, "bucket_buffers"): 1e-3,
    ("memory", PEAK, "pipeline_buffers"): 1e-3,
    ("memory", "loss", "parameters"): 1e-3,
    ("memory", "optimizer step", "parameters"): 1e-3,
    ("memory", "optimizer step", "optimizer"): 1e-3,
    ("memory", "optimizer step", "gradients"): 1e-3,
    ("memory", "optimizer step", "pipeline_buffers"): 1e-3,
    ("sent", "dp", "all_reduce"): 1e-3,
    ("sent", "dp", "broadcast"): 1e-3,
    ("sent", "dp", "all_gather"): 1e-3,
    ("sent", "dp", "reduce_scatter"): 1e-3,
    ("sent", "pp", "send"): 1e-3,
    ("sent", "tp", "all_reduce"): 1e-3,
    ("sent", "tp", "all_gather"): 1e-3,
    ("sent", "tp", "reduce_scatter"): 1e-3,
}
"""The largest |predicted / traced - 1| of a figure; what is not here yet is in benchmarks/results/memory.json."""
MEAN_OF_PEAKS = 5e-3
SLICES = 20
"""Parts of the grid, every twentieth scenario each, so that several workers share two thirds of an hour."""
SMALL = 1 << 20
"""Bytes below which figures are not held against each other: one counter in four bytes is much of a small shard."""


def _found(scenario: Scenario) -> Iterator[Difference]:
    """Every figure of the first and the last stage."""
    plan = plan_of(scenario)
    for rank in sorted({0, (plan.mesh.pp - 1) * plan.mesh.stride("pp")}):
        yield from differences(scenario, traced(plan, rank))


def _assert_keeps_its_bar(scenario: Scenario, found: Difference) -> None:
    bar = BARS.get((found.kind, found.place, found.name))
    layout = scenario.layout
    deals = (
        layout.get("zero") == 1 and found.name == "optimizer"
    )  # whole tensors; what is said is a bound of the greedy deal
    pads = layout.get("dp_shard") == 24 and found.name in ("all_gather", "reduce_scatter")  # what is padded is sent too
    if bar is not None and not deals and not pads and max(found.predicted, found.traced) > SMALL:
        assert found.ratio == pytest.approx(1.0, abs=bar), found


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SAMPLE, ids=lambda scenario: scenario.name)
def test_formulas_agree_with_the_program(scenario: Scenario) -> None:
    """On the first and the last stage each figure with a bar keeps it."""
    for found in _found(scenario):
        _assert_keeps_its_bar(scenario, found)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(SLICES))
def test_formulas_agree_with_the_program_on_the_whole_grid(first: int) -> None:
    """Every figure with a bar keeps it in all scenarios of a slice, and peaks differ by half a per cent in the mean: what
    holds of the mean of every slice holds of the mean of the grid."""
    peaks = []
    for scenario in scenarios()[first::SLICES]:
        for found in _found(scenario):
            _assert_keeps_its_bar(scenario, found)
            if (found.place, found.name) == (PEAK, "allocated"):
                peaks.append(abs(found.ratio - 1.0))
    assert mean(peaks) <= MEAN_OF_PEAKS
