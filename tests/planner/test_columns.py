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
from strategist.space.candidates import Candidates, distinct, joined
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


@pytest.mark.parametrize("most", (1, 9, 10**5, 10**17), ids=lambda most: f"up to {most}")
def test_sorts_of_columns_are_those_of_their_rows(most: int) -> None:
    """However wide the ranges of three columns are: rows are of one sort if and only if they agree in all, and sorts are in order."""
    seldom, often = DRAWN.integers(0, most + 1, 4), DRAWN.integers(-most, most + 1, 60)
    table = np.stack([seldom[DRAWN.integers(0, 4, 60)], often, DRAWN.integers(3, 5, 60)])
    first, place = Candidates({"pp": table[0]}).sorts(("pp", *table[1:]))
    rows, at, inverse = np.unique(table, axis=1, return_index=True, return_inverse=True)
    assert np.array_equal(first, at)
    assert np.array_equal(place, inverse.ravel())
    assert np.array_equal(table[:, first], rows)


def test_a_column_that_is_left_out_is_zero_and_others_stay() -> None:
    """In a table, in some of its rows, and in rows of those; what was taken before stays as it was."""
    table = Candidates({name: DRAWN.integers(1, 9, 20) for name in ("recompute", "tp")})
    some = table.where(np.arange(0, 20, 2))
    before = some["recompute"]
    for own in (table, some):
        left = own.without("recompute")
        assert not left["recompute"].any()
        assert not left.where(np.array([3, 1]))["recompute"].any()
        assert np.array_equal(left["tp"], own["tp"])
        assert np.array_equal(left.where(np.array([3, 1]))["tp"], own["tp"][[3, 1]])
    assert some["recompute"] is before
    assert before.all()


@pytest.mark.slow
def test_what_is_worked_out_is_given_back_at_once() -> None:
    """Ledgers, bounds and steps leave no circle of objects, which would hold their memory until somebody looks for circles."""
    fields = {"model": "llama-2-7b", "hardware": "dgx-a100-80gb:2", "seq_len": 2048, "global_batch": 64}
    asked = complete(Given(**fields)).question  # type: ignore[arg-type]
    every, formulas = enumerate_candidates(limits_of(asked)), (peak_memory, least_memory, step_times)
    for formula in formulas:
        formula(asked.job, every)  # what is kept for good is there
    while gc.collect():
        pass  # what other tests left may leave more behind when it goes
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for formula in formulas:
            formula(asked.job, joined([every]))
        gc.collect()
        assert not [one for one in gc.garbage if any(isinstance(held, np.ndarray) for held in gc.get_referents(one))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
