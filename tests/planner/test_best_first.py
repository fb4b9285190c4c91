"""A search for bests finds what a search of everything finds: the best of all, of every family and of those without cp."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume

from strategist.ask import Given, complete
from strategist.facts.calibration import Factor
from strategist.facts.job import Job
from strategist.memory.estimate import peak_memory
from strategist.planner.best_first import NEVER, BestFirst, Sort, best_first
from strategist.planner.recommend import choice
from strategist.planner.search import Found, Pace, search
from strategist.planner.situation import question
from strategist.planner.weigh import fits
from strategist.records import replace
from strategist.rulebook.apply import family_masks
from strategist.space.candidates import Candidates, Mask
from strategist.timing.estimate import step_times
from tests.planner.properties import Properties
from tests.strategies import legal_candidates, questions

PROPERTIES = Properties()

SPACES: tuple[dict[str, Any], ...] = (
    {"model_size": "7B", "hardware": "dgx-h100"},
    {"model": "llama-3.1-8b", "hardware": "aws-g5.12xlarge"},
    {"model": "llama-3.2-1b", "hardware": "dgx-h100:2", "objective": "cost", "global_batch": 64},
)
"""One where a third of the layouts fits, one where one does, one where most do and a weighted split stands beside an even one."""
LARGER: tuple[dict[str, Any], ...] = (
    {"model": "llama-3.1-405b", "hardware": "dgx-h100:256", "seq_len": 8192, "global_batch": 2048},
    {"model": "mixtral-8x7b", "hardware": "dgx-h100:4", "global_batch": 128},
    {"model": "llama-3.1-8b", "hardware": "dgx-h100:4", "seq_len": 131072, "global_batch": 32},
    {"model": "llama-3.1-70b", "hardware": "aws-p4d.24xlarge:16", "precision": "fp16", "frontend": "deepspeed"},
)
"""Tight and roomy memory, experts, long sequences, another framework."""


def masks(job: Job, legal: Candidates) -> dict[str, Mask]:
    """The families of some layouts."""
    return family_masks(legal, question(job))


def scopes(families: dict[str, Mask], cp: Any) -> dict[str, Mask]:
    """Every set that a rule may choose from: all, each family, and of both those with cp = 1."""
    named = {"all": np.ones(len(cp), np.bool_), **families}
    return named | {f"{name} with cp = 1": members & (cp == 1) for name, members in named.items()}


def bests(found: Found) -> dict[str, tuple[dict[str, int | str], int, int] | None]:
    """The best layout of every scope, with its nanoseconds and bytes."""
    rows = {name: found.best_of(among) for name, among in scopes(dict(found.families), found.candidates["cp"]).items()}
    return {
        name: None if row is None else (found.candidates.row(row), int(found.times.step[row]), int(found.device_bytes[row]))
        for name, row in rows.items()
    }  # fmt: skip


@pytest.mark.parametrize("space", [SPACES[0], *(pytest.param(s, marks=pytest.mark.slow) for s in (*SPACES[1:], *LARGER))], ids=str)  # fmt: skip
def test_the_bests_are_those_of_a_search_of_everything(space: dict[str, Any]) -> None:
    """The best of all, of every family and of their layouts with cp = 1, and what either policy takes, are the same with the same
    nanoseconds and bytes; what is left out, refused and kept is everything."""
    asked = complete(Given(**space)).question
    some, every = search(asked, bests=True), search(asked)
    assert bests(some) == bests(every)
    for policy in ("hf", "fastest"):
        ours, theirs = (choice(found, policy) for found in (some, every))  # type: ignore[arg-type]
        assert some.candidates.row(ours.row) == every.candidates.row(theirs.row)
        assert (ours.family, ours.reasons) == (theirs.family, theirs.reasons)
    assert (some.enumerated, some.refused) == (every.enumerated, every.refused)
    assert len(some.legal) + some.slower == len(every.legal)


@PROPERTIES.holds(6, questions())
def test_what_is_left_out_is_slower_than_the_best_of_its_families(job: Job) -> None:
    """Of any question: the best step of every scope is that of everything that fits, and the step of each layout that was left out
    is longer than the best of every scope it is among."""
    legal = legal_candidates(job)
    peaks, step = peak_memory(job, legal), step_times(job, legal).step
    fits_alone = fits(job, legal, peaks.device, peaks.host)
    assume(fits_alone.any())
    families = masks(job, legal)
    tried = best_first(job, legal, families)
    assert tried.rows is not None
    out = np.ones(len(legal), np.bool_)
    out[tried.rows] = False
    fits_here = np.zeros(len(legal), np.bool_)
    fits_here[tried.rows[tried.fitting]] = True
    assert (fits_alone[~out] == fits_here[~out]).all()
    for name, members in scopes(families, legal["cp"]).items():
        assert step[members & fits_alone].min(initial=2**62) == step[members & fits_here].min(initial=2**62), name
        assert (step[members & out] > step[members & fits_alone].min(initial=2**62)).all(), name
    assert tried.slower == out.sum()


@pytest.mark.parametrize(
    ("best", "left"), [((5, 9), [0, 1, 2]), ((9, 5), [0, 1, 2]), ((5, NEVER), [0, 1, 2, 3]), ((4, 4), [])]
)
def test_a_layout_waits_as_long_as_it_may_be_the_best_of_one_family(best: tuple[int, int], left: list[int]) -> None:
    """Bounds of 5, 6, 9 and 10 in two families: left out is what is behind the best of both, and nothing where one of them has none yet."""
    state = object.__new__(BestFirst)
    state.best, state.least = np.array(best), np.array([5, 6, 9, 10])
    rows = np.arange(4)
    assert state._possibly_best(Sort([0, 1], rows), rows).tolist() == left


def test_nothing_is_left_out_where_nothing_fits() -> None:
    """A question without an answer is searched to its end: why nothing fits is asked of everything."""
    found = search(complete(Given(model="llama-3.1-405b", hardware="dgx-a100-40gb", global_batch=64)).question, bests=True)  # fmt: skip
    assert (len(found.fitting), found.slower, found.untried) == (0, 0, 0)


@pytest.mark.parametrize("objective", ["memory", "simplicity"])
def test_a_bound_of_time_cuts_only_where_time_decides(objective: Any) -> None:
    """Where bytes or simplicity come first every layout is weighed."""
    asked = complete(Given(model_size="7B", hardware="dgx-h100")).question
    assert search(replace(asked, objective=objective), bests=True).slower == 0
    assert search(asked, bests=True).slower > 0


@pytest.mark.parametrize("value", [0.7, 1.4])
def test_a_bound_cuts_nothing_better_under_factors(value: float) -> None:
    """Under a calibration the search that leaves slow layouts out finds the step that the search of everything finds, for less work."""
    asked = complete(Given(model_size="7B", hardware="dgx-h100")).question
    asked = replace(
        asked, job=replace(asked.job, factors=(Factor(part="matmul", value=value), Factor(part="network", value=1.3)))
    )
    some, every = search(asked, bests=True), search(asked)
    assert some.slower > 0
    assert some.times.step.min() == every.times.step.min()


def test_without_time_the_search_for_bests_stops_when_something_fits() -> None:
    """With no time at all there is a layout that fits, the rest is counted as untried, and a budget that is kept changes nothing."""
    asked = complete(Given(model_size="7B", hardware="dgx-h100")).question
    legal = search(asked).legal
    families = masks(asked.job, legal)
    seen: list[tuple[int, int]] = []
    kept = best_first(asked.job, legal, families, Pace(3600.0, lambda _, done, total, best: seen.append((done, total))))
    plain = best_first(asked.job, legal, families)
    assert np.array_equal(kept.times.step, plain.times.step)
    assert seen == sorted(seen)
    hurried = best_first(asked.job, legal, families, Pace(0.0))
    assert len(hurried.fitting)
    assert len(hurried.legal) + hurried.slower + hurried.untried == len(legal)


@pytest.mark.nightly
@pytest.mark.parametrize("check", PROPERTIES.at_length, ids=lambda check: check.__name__)
def test_at_length(check: Any) -> None:
    """Every property above, over hundreds of new examples."""
    check()
