"""Entries and distinct numbers of columns are what numpy's own slower ways say, and nothing of a ledger stays behind."""

from __future__ import annotations

import gc
from itertools import product

import numpy as np
import pytest

from strategist.ask import Given, complete
from strategist.columns import entries, on_stages_of, stage_by_stage
from strategist.memory.estimate import least_memory, peak_memory
from strategist.planner.search import limits_of
from strategist.space.candidates import distinct, joined
from strategist.space.enumerate import enumerate_candidates
from strategist.timing.estimate import step_times

FRONT, ROWS, STAGES, PICKED = 4, 6, 3, 11
DRAWN = np.random.default_rng(0)


@pytest.mark.parametrize("shape", list(product((1, FRONT), (1, ROWS), (1, STAGES))), ids=str)
@pytest.mark.parametrize("lies", (np.ascontiguousarray, stage_by_stage), ids=("row by row", "stage by stage"))
def test_entries_are_those_of_the_array_that_it_is_broadcast_to(shape: tuple[int, ...], lies: object) -> None:
    """Whatever axis is one entry for all, and however the array lies in memory."""
    values = lies(DRAWN.random(shape))  # type: ignore[operator]
    whole = np.broadcast_to(values, (FRONT, ROWS, STAGES))
    front, rows, stages = (DRAWN.integers(0, size, PICKED) for size in whole.shape)
    assert np.array_equal(np.broadcast_to(entries(values, (front, rows, stages)), PICKED), whole[front, rows, stages])
    found = np.broadcast_to(on_stages_of(values, rows, stages), (FRONT, PICKED))
    assert np.array_equal(found, whole[:, rows, stages])


@pytest.mark.parametrize("most", (3, 1000), ids=("few numbers", "large numbers"))
def test_distinct_numbers_stand_where_they_do_first(most: int) -> None:
    """Counted or sorted, as `unique` has it."""
    numbers = DRAWN.integers(0, most, 50)
    first, place = distinct(numbers)
    values, at, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    assert np.array_equal(first, at)
    assert np.array_equal(place, inverse)
    assert np.array_equal(numbers[first], values)


def test_what_is_worked_out_is_given_back_at_once() -> None:
    """Ledgers, bounds and steps leave no circle of objects, which would hold their memory until somebody looks for circles."""
    fields = {"model": "llama-2-7b", "hardware": "dgx-a100-80gb:2", "seq_len": 2048, "global_batch": 64}
    asked = complete(Given(**fields)).question  # type: ignore[arg-type]
    every, formulas = enumerate_candidates(limits_of(asked)), (peak_memory, least_memory, step_times)
    for formula in formulas:
        formula(asked.job, every)  # what is kept for good is there
    gc.collect()
    gc.disable()
    try:
        for formula in formulas:
            formula(asked.job, joined([every]))
        assert gc.collect() == 0
    finally:
        gc.enable()
