"""What must hold of every search: more room and more choices never hurt, pins find what they name, irrelevant facts do not
matter. The same of single layouts stands in test_layout_properties.py, of finished plans in test_plan_properties.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st

from strategist.facts.job import Job
from strategist.memory.estimate import peak_memory
from strategist.planner.rank import best
from strategist.planner.search import Found, Question, limits_of, search
from strategist.space.candidates import WORDS
from strategist.space.grammar import ADDABLE, FORBIDDABLE, Pin
from tests.oracle.enumerate import NAMES, as_key, legal_layouts
from tests.oracle.test_search import ask, complexity
from tests.planner.properties import Properties
from tests.planner.test_layout_properties import FACTORS, on, scaled
from tests.strategies import Draw, legal_candidates, machine, questions, rows_of

PROPERTIES = Properties()

NEVER = float("inf")


def best_ns(found: Found) -> float:
    """T: the step of the best layout that fits; infinite when nothing fits."""
    row = found.best_of()
    return NEVER if row is None else int(found.times.step[row])


def fitting(found: Found) -> set[tuple[Any, ...]]:
    """F: the layouts that fit."""
    return set(rows_of(found.candidates))


def runnable(job: Job, **choices: Any) -> Found:
    """A search."""
    return search(Question(job=job, **choices))


def with_memory(job: Job, memory_bytes: int) -> Job:
    """The same job on devices of another size."""
    groups = (
        replace(g, node=replace(g.node, gpu=replace(g.node.gpu, memory_bytes=memory_bytes))) for g in job.cluster.groups
    )
    return on(job, replace(job.cluster, groups=tuple(groups)))


def _tiles(job: Job) -> bool:
    return limits_of(Question(job=job)).tiled


@PROPERTIES.holds(6, st.data())
def test_p1_larger_devices_fit_everything_that_smaller_ones_do(data: Draw) -> None:
    """P1: with more memory every layout still fits and the best step is no longer. Capacities lie at the peak of a
    random layout, a byte below, and a byte above.

    Jobs that are tiled at one size and not at the other are left out: there the search stops looking at tiles as soon as
    the widest layer fits, and may find nothing on the larger device (docs/decisions/0043).
    """
    job = data.draw(questions())
    peaks = sorted({*peak_memory(job, runnable(job).legal).device.tolist(), job.usable_bytes})
    edge = data.draw(st.sampled_from(peaks)) + data.draw(st.sampled_from((-1, 0, 1)))
    small = with_memory(job, int(edge / (1 - job.headroom)) + 1)
    large = with_memory(job, int(small.cluster.smallest.memory_bytes * data.draw(FACTORS)))
    assume(_tiles(small) == _tiles(large))
    before, after = runnable(small), runnable(large)
    assert fitting(before) <= fitting(after)
    assert best_ns(after) <= best_ns(before)


@PROPERTIES.holds(5, questions(), FACTORS)
def test_p3_faster_links_never_worsen_the_best(job: Job, factor: float) -> None:
    """P3: faster links leave the same layouts fitting and the best step no longer."""
    rates = dict.fromkeys(("intra_Bps", "pair_Bps", "inter_Bps"), factor)
    before, after = runnable(job), runnable(on(job, scaled(job.cluster, node=rates)))
    assert fitting(after) == fitting(before)
    assert best_ns(after) <= best_ns(before) + 1


OPEN = tuple(word for word in FORBIDDABLE if word != "sequence_parallel")
"""Techniques whose loss opens nothing: without sequence parallelism the search looks at layouts that it leaves out else."""


@PROPERTIES.holds(6, questions(), st.lists(st.sampled_from(OPEN), min_size=1, max_size=3, unique=True))
def test_p6_p7_fewer_techniques_never_help(job: Job, words: list[str]) -> None:
    """P6, P7: forbidding techniques only removes layouts and never shortens the best step; allowing one again never
    lengthens it. Sequence parallelism is the exception that docs/decisions/0041 describes."""
    every, some, fewer = (runnable(job, forbids=tuple(words[:number])) for number in (0, 1, len(words)))
    assert fitting(fewer) <= fitting(some) <= fitting(every)
    assert best_ns(every) <= best_ns(some) <= best_ns(fewer)


@PROPERTIES.holds(4, questions(), st.lists(st.sampled_from(ADDABLE), min_size=1, max_size=3, unique=True))
def test_p7_what_is_added_never_hurts(job: Job, words: list[str]) -> None:
    """P7: looking at more techniques keeps every layout that fits and never lengthens the best step."""
    every, more = runnable(job), runnable(job, also=tuple(words))
    assert fitting(every) <= fitting(more)
    assert best_ns(more) <= best_ns(every)


@PROPERTIES.holds(6, st.data())
def test_p7_pins_only_narrow(data: Draw) -> None:
    """P7: pinning choices of a legal layout keeps that layout, adds none, and never shortens the best step. A pinned
    schedule may add GPipe where 1F1B was looked at in its place; it is no faster."""
    job = data.draw(questions())
    every = runnable(job)
    assume(len(every.legal))
    row = _coded(every, data.draw(st.integers(0, len(every.legal) - 1)))
    known = sorted(set(row) - {"sequence_parallel"})
    keys = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=4, unique=True))
    narrowed = runnable(job, pins=_pins({key: row[key] for key in keys}))
    assert tuple(row.values()) in set(rows_of(narrowed.legal))
    assert "schedule" in keys or fitting(narrowed) <= fitting(every)
    assert best_ns(every) <= best_ns(narrowed)


def _coded(found: Found, index: int) -> dict[str, int]:
    return {name: int(column[index]) for name, column in found.legal.columns.items() if name != "mesh"}


def _pins(choices: dict[str, int]) -> tuple[Pin, ...]:
    return tuple(Pin(key, value, str(value)) for key, value in choices.items())


@PROPERTIES.holds(6, questions())
def test_p8_the_winner_pinned_is_the_winner(job: Job) -> None:
    """P8: the winner is the fastest of all that fit, and with every choice of it pinned the search returns it, with the
    same bytes and nanoseconds."""
    every = runnable(job)
    row = every.best_of()
    assume(row is not None)
    assert every.times.step[row] == every.times.step.min()
    place = int(every.fitting[row])
    pinned = runnable(job, pins=_pins(_coded(every, place)))
    assert rows_of(pinned.candidates) == [tuple(_coded(every, place).values())]
    for name, column in every.times.exposed.items():
        assert int(pinned.times.exposed[name][0]) == int(column[row])
    terms = peak_memory(job, pinned.legal).terms
    for name, column in peak_memory(job, every.legal).terms.items():
        assert int(terms[name][0]) == int(column[place])


KEYS: dict[str, tuple[str, ...]] = {
    "time": ("step", "complexity", "bytes"),
    "cost": ("step", "complexity", "bytes"),
    "memory": ("bytes", "step", "complexity"),
    "simplicity": ("complexity", "step", "bytes"),
}
"""What each objective looks at, in order."""


@PROPERTIES.holds(15, st.data())
def test_ties_are_broken_in_a_fixed_order(data: Draw) -> None:
    """The best row is the least by the objective, then by the other measures, then by its columns, however close."""
    job = data.draw(questions())
    everything = legal_candidates(job)
    columns = everything.where(np.linspace(0, len(everything) - 1, min(64, len(everything)), dtype=np.int64))
    assume(len(columns) > 1)
    close = st.lists(st.integers(10**6, 10**6 + 3), min_size=len(columns), max_size=len(columns))
    step, size = np.array(data.draw(close)), np.array(data.draw(close))
    objective: Any = data.draw(st.sampled_from(tuple(KEYS)))
    rows = rows_of(columns)

    def order(i: int) -> tuple[Any, ...]:
        measures = {"step": step[i], "complexity": complexity(columns.row(i)), "bytes": size[i]}
        return (*(measures[name] for name in KEYS[objective]), rows[i])

    assert best(columns, step, size, objective, np.arange(len(columns))) == min(range(len(columns)), key=order)


@pytest.mark.parametrize("objective", tuple(KEYS))
def test_layouts_that_cost_the_same_are_told_apart_by_their_columns(objective: Any) -> None:
    """Among layouts that take as long, hold as much and ask as much of people, the one with the least columns is the best, in
    whatever order they come."""
    job = ask("llama-debug", machine("cpu:4"), 512, 8, "fp32")
    everything = legal_candidates(job)
    asks = np.array([complexity(everything.row(i)) for i in range(len(everything))])
    alike = everything.where(asks == asks.min())
    assert len(alike) > 1
    same = np.ones(len(alike), np.int64)
    for order in (np.arange(len(alike)), np.arange(len(alike))[::-1]):
        turned = alike.where(order)
        row = best(turned, same, same, objective, np.arange(len(alike)))
        assert rows_of(turned)[row] == min(rows_of(alike))


@PROPERTIES.holds(6, st.data())
def test_p13_every_legal_layout_can_be_pinned(data: Draw) -> None:
    """P13: a layout that brute force calls legal is found when it is pinned, also one that a search leaves out."""
    job = data.draw(questions().filter(lambda job: job.cluster.world <= 4))
    every = list(legal_layouts(job))
    assume(every)
    chosen = every[data.draw(st.integers(0, len(every) - 1))]
    coded = {name: WORDS[name].index(chosen[name]) if name in WORDS else chosen[name] for name in NAMES}
    found = runnable(job, pins=_pins(coded))
    assert [as_key(found.legal.row(i)) for i in range(len(found.legal))] == [as_key(chosen)]


@PROPERTIES.holds(5, questions().filter(lambda job: job.cluster.nodes == 1), FACTORS)
def test_p35_one_node_does_not_care_about_the_network(job: Job, factor: float) -> None:
    """P35: what joins a node to others changes nothing in a job of one node."""
    group = job.cluster.groups[0]
    other = replace(group.node, inter_Bps=group.node.inter_Bps * factor, nics=1, fabric="ethernet", rdma=False)
    before, after = runnable(job), runnable(on(job, replace(job.cluster, groups=(replace(group, node=other),))))
    assert rows_of(before.candidates) == rows_of(after.candidates)
    assert (before.times.step == after.times.step).all()


@PROPERTIES.holds(5, questions(), st.sampled_from((0.0, 0.1, 0.3, 0.5)))
def test_p42_more_headroom_fits_less(job: Job, headroom: float) -> None:
    """P42: a larger share that must stay free never lets another layout in. Jobs that it starts to tile are left out
    (docs/decisions/0043)."""
    other = replace(job, headroom=headroom)
    roomy, tight = (job, other) if headroom > job.headroom else (other, job)
    assume(_tiles(roomy) == _tiles(tight))
    assert fitting(runnable(tight)) <= fitting(runnable(roomy))


@pytest.mark.nightly
@pytest.mark.parametrize("check", PROPERTIES.at_length, ids=lambda check: check.__name__)
def test_at_length(check: Any) -> None:
    """Every property above, over hundreds of new examples."""
    check()
