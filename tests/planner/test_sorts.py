"""Formulas of memory and time that are worked out once for each sort of candidates say of every candidate what they say of it alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strategist.ask import Given, complete
from strategist.memory import early, sorts
from strategist.memory.estimate import least_memory, peak_memory
from strategist.memory.situations import Situation
from strategist.planner.search import limits_of, search
from strategist.planner.situation import question
from strategist.rulebook.apply import columns, family_masks
from strategist.rulebook.rule import load_families
from strategist.space.candidates import Candidates, Column, joined
from strategist.space.enumerate import enumerate_candidates
from strategist.space.shares import groups, holds_early_C
from strategist.timing import sorts as timing_sorts
from strategist.timing.estimate import step_times
from strategist.timing.sorts import sorts_between, sorts_within

JOBS: dict[str, dict[str, Any]] = {
    "interleaved": {"model": "llama-2-7b", "hardware": "dgx-a100-80gb", "seq_len": 2048, "global_batch": 64},
    "weighted, a tied table": {"model": "llama-3.2-1b", "hardware": "dgx-h100:3", "seq_len": 1536, "global_batch": 96},
    "one format": {"model": "llama-3.1-8b", "hardware": "dgx-h100", "global_batch": 48, "precision": "fp32"},
    "experts": {"model": "mixtral-8x7b", "hardware": "dgx-h100", "seq_len": 2048, "global_batch": 32, "forbid": "ep"},
    "learned positions": {"model": "gpt3-13b", "hardware": "dgx-a100-80gb:2", "seq_len": 2048, "global_batch": 64},
}
MOST, MOST_PASSES, ALONE = 6000, 100, 24


def layouts(fields: dict[str, Any]) -> tuple[Any, Candidates]:
    """A job and layouts from all over its space, whether a rule forbids them or not."""
    asked = complete(Given(**fields)).question
    every = enumerate_candidates(limits_of(asked))
    return asked.job, every.where(np.arange(0, len(every), -(-len(every) // MOST)))


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_company_changes_no_ledger(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes by term, the worst stage and moment, host memory and the bound of every layout are those that it has where nothing is
    sorted; and sorts were made, each of several candidates."""
    job, every = layouts(JOBS[name])
    monkeypatch.setattr(sorts, "FEW", 2**5)
    found = [sorts.sorts_of(job, group, read) for group in groups(job, every) for read in sorts.NOT_READ]
    assert any(one is not None and len(one.firsts) < len(one.place) for one in found)
    together, bound = peak_memory(job, every), least_memory(job, every)
    monkeypatch.setattr(sorts, "FEW", 2**30)
    alone, alone_bound = (formula(job, joined([every])) for formula in (peak_memory, least_memory))
    for ours, theirs in ((together.terms[term], alone.terms[term]) for term in alone.terms):
        assert np.array_equal(ours, theirs)
    for column in ("device", "stage", "moment", "host", "last_allocated"):
        assert np.array_equal(getattr(together, column), getattr(alone, column))
    assert np.array_equal(bound.device, alone_bound.device)


@pytest.mark.parametrize("name", JOBS)
def test_company_changes_no_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exposed, hidden and recomputed nanoseconds of every term of every layout are those that it has where nothing is sorted; and sorts
    were made of both kinds, each of several candidates."""
    job, every = layouts(JOBS[name])
    monkeypatch.setattr(timing_sorts, "FEW", 2**5)
    for found in (
        [sorts_within(job, group) for group in groups(job, every)],
        [sorts_between(job, group) for group in groups(job, every)],
    ):
        assert any(one is not None and len(one.firsts) < len(one.place) for one in found)
    together = step_times(job, every)
    monkeypatch.setattr(timing_sorts, "FEW", 2**30)
    alone = step_times(job, joined([every]))
    for kind in ("exposed", "hidden", "again"):
        for term, seconds in getattr(alone, kind).items():
            assert np.array_equal(getattr(together, kind)[term], seconds), (kind, term)
    assert np.array_equal(together.step, alone.step)


def test_families_that_are_asked_of_sorts_are_those_of_every_layout() -> None:
    """Whether layouts are numbered by mesh or not."""
    fields = {**JOBS["interleaved"], "also": "tiling"}
    job, numbered = layouts(fields)
    plain = Candidates({name: numbered[name] for name in numbered.columns if name != "mesh"})
    facts = question(job)
    values, size = facts | columns(plain), len(plain)
    expected = {own.name: np.broadcast_to(np.asarray(own.holds(values), np.bool_), size) for own in load_families()}
    assert sum(mask.any() for mask in expected.values()) > len(expected) // 2
    for every in (numbered, plain):
        found = family_masks(every, facts)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_list_changes_no_ledger(name: str) -> None:
    """What is worked out once for a whole list, sizes of meshes and insides of layers, says of a layout what it says of it alone."""
    job, every = layouts(JOBS[name])
    together, times = peak_memory(job, every), step_times(job, every)
    for row in range(0, len(every), len(every) // ALONE):
        one = every.where(np.array([row]))
        peak, step = peak_memory(job, one), step_times(job, one)
        assert {term: int(held[0]) for term, held in peak.terms.items()} == {
            term: int(held[row]) for term, held in together.terms.items()
        }
        assert int(step.step[0]) == int(times.step[row])


@pytest.mark.slow
@pytest.mark.parametrize("model", ("nemotron-3-super-120b-a12b", "deepseek-v2-lite", "mixtral-8x7b", "jamba-v0.1"))
def test_a_list_of_one_sort_changes_no_ledger(model: str) -> None:
    """Where the same happens inside the layers of a whole list, its layouts hold what each holds alone, experts apart or not."""
    job, every = layouts({"model": model, "hardware": "dgx-h100:4", "seq_len": 1024, "global_batch": 64})
    found = sorts.sorts_of_layers(job, every)
    assert found is not None
    apart = np.flatnonzero((every["ep"] > 1)[found[0]])
    alike = [np.flatnonzero(found[1] == sort) for sort in apart[:: max(1, len(apart) // ALONE)]]
    assert max(map(len, alike)) > 1
    for rows in alike:
        together = peak_memory(job, every.where(rows))
        for place, row in enumerate(rows[:2]):
            alone = peak_memory(job, every.where(np.array([row])))
            assert {term: int(held[0]) for term, held in alone.terms.items()} == {
                term: int(held[place]) for term, held in together.terms.items()
            }


@pytest.mark.slow
@pytest.mark.parametrize("name", ("interleaved", "weighted, a tied table", "one format"))
def test_no_pass_that_is_left_out_holds_most(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of passes of chunks that hold units early only those are compared before which no pass holds as much of everything; where all are,
    every layout that rules allow comes to the same."""
    asked = complete(Given(**JOBS[name])).question
    legal = search(asked).legal
    held = legal.where(holds_early_C(legal))
    assert len(held) > MOST_PASSES
    some, left_out = peak_memory(asked.job, held), []

    def every_pass(ends: early.Ends, passes: Situation) -> tuple[Column, ...]:
        others = ~(passes.is_last | passes.is_first)
        sorts = (passes.is_last, passes.is_first, others, others & ~passes.stands)
        every = tuple(early._numbers(sort) for sort in sorts)
        left_out.append(sum(map(len, every)) - sum(map(len, possible(ends, passes))))
        return every

    possible = early._possible
    monkeypatch.setattr(early, "_possible", every_pass)
    monkeypatch.setattr(early, "passes_to_compare", early.passes_to_compare.__wrapped__)
    whole = peak_memory(asked.job, joined([held]))
    assert min(left_out) > 0
    for ours, theirs in ((some.terms[term], whole.terms[term]) for term in whole.terms):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(some.moment, whole.moment)
    assert np.array_equal(some.stage, whole.stage)
