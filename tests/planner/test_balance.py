"""Layers of every stage and how many of them run again, found together."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategist import Plan, predict, recommend
from strategist.document.prediction import Prediction
from strategist.emitters import find_emitter
from strategist.errors import ImpossibleError, InputError
from strategist.facts.job import Job
from strategist.facts.models import load_model
from strategist.facts.profile import find_profile
from strategist.facts.workload import Workload
from strategist.memory.estimate import device_bytes_CS
from strategist.planner.balance import balanced_CS, soonest, stage_tables
from strategist.planner.check import faults
from strategist.planner.exhaustive_balance import balanced_row
from strategist.planner.predict import filled, layout_of, predict_plan
from strategist.planner.predict import predict as predict_pins
from strategist.planner.situation import one
from strategist.records import replace
from strategist.reports.brief import option_words
from strategist.space.candidates import Candidates, joined
from strategist.space.grammar import parse_pins
from strategist.timing.estimate import stage_seconds_CS
from tests.examples import cases_of
from tests.strategies import machine

RULED = "recompute=by-stage,stage_split=balanced"
BEHIND_THE_PIPELINE = ("dp", "optimizer", "straggler")
"""Terms of a step that are no part of what a pipeline takes for its micro-batches."""
NODES: dict[str, Any] = {"seq_len": 4096, "global_batch": 64}
TWO_NODES = "pp=2,cp=2,tp=4,zero=2,micro_batch=4,sequence_parallel=1,context_parallel=all-to-all"


def job_of(layers: int, global_batch: int, room: float, seq_len: int = 4096, vocab: int = 32000) -> Job:
    """A few layers of Llama-2 7B on four devices of 24 GB, of which a share must stay free."""
    shape = replace(load_model("llama-2-7b"), layers=layers, vocab=vocab, parameters_stated=None)
    work = Workload(seq_len=seq_len, global_batch=global_batch, precision="bf16")
    return Job(cluster=machine("ws-4x-4090"), model=shape, workload=work, profile=find_profile(), headroom=room)


def passes_ns(found: Prediction) -> int:
    """What the pipeline takes for all micro-batches."""
    return sum(term.exposed_ns for term in found.time.terms if term.name not in BEHIND_THE_PIPELINE)


def asked(job: Job, words: str) -> Prediction:
    """One layout of a job."""
    return predict_pins(job, parse_pins(words))


def row_of(job: Job, words: str) -> Candidates:
    """One layout in the columns of the search."""
    return one(**filled(job, {pin.key: pin.value for pin in parse_pins(words)}))


def lengths(found: Prediction | Plan) -> list[int]:
    """Layers of every stage."""
    return [stage.layer_count for stage in found.strategy.stages]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "layers", "batch", "room"),
    [
        ("pp=2,tp=2,sequence_parallel=1,micro_batch=4", 5, 16, 0.5),
        pytest.param("pp=4,micro_batch=1", 7, 16, 0.5, marks=pytest.mark.nightly),
        pytest.param("pp=2,dp_shard=2,zero=3,micro_batch=2", 9, 16, 0.1, marks=pytest.mark.slow),
        pytest.param("pp=4,schedule=gpipe,micro_batch=2", 6, 8, 0.35, marks=pytest.mark.nightly),
    ],
)
def test_no_other_split_that_fits_is_sooner_through(words: str, layers: int, batch: int, room: float) -> None:
    """Of all ways to cut the layers, each stage of each with every number of layers again, the rule's is the one whose pipeline is
    through first."""
    job = job_of(layers, batch, room)
    own = asked(job, f"{words},{RULED}")
    best = None
    pp = own.mesh.pp
    for cuts in combinations(range(1, layers), pp - 1):
        split = [end - first for first, end in pairwise((0, *cuts, layers))]
        for again in product(*(range(number + 1) for number in split)):
            text = f"{words},stage_split={'/'.join(map(str, split))},recompute={'/'.join(map(str, again))}"
            other = asked(job, text)
            if other.fits and (best is None or passes_ns(other) < passes_ns(best)):
                best = other
    assert best is not None
    assert own.fits
    assert abs(passes_ns(own) - passes_ns(best)) <= 10  # every term of both is rounded


@pytest.mark.slow
@settings(max_examples=cases_of(25), deadline=None)
@given(
    st.sampled_from(("pp=4,micro_batch=1", "pp=2,dp_shard=2,zero=3,micro_batch=1", "pp=2,tp=2,micro_batch=2", "pp=4,schedule=gpipe,micro_batch=1")),
    st.integers(4, 24),
    st.sampled_from((8, 16, 32)),
    st.floats(0.0, 0.8),
    st.sampled_from((1024, 4096)),
    st.sampled_from((2048, 32000, 128256)),
)  # fmt: skip
def test_neither_number_alone_is_better(
    words: str, layers: int, batch: int, room: float, seq_len: int, vocab: int
) -> None:
    """Equal stages, or stages weighted by the head, with as many layers again as each needs, are never through sooner, and where they fit so
    do balanced ones."""
    job = job_of(layers, batch, room, seq_len, vocab)
    own = asked(job, f"{words},{RULED}")
    for split in ("even", "weighted"):
        other = asked(job, f"{words},recompute=by-stage,stage_split={split}")
        assert own.fits or not other.fits
        assert not other.fits or passes_ns(own) <= passes_ns(other) + 10


@settings(max_examples=cases_of(60), deadline=None)
@given(st.data())
def test_the_programme_finds_what_trying_everything_finds(data: st.DataObject) -> None:
    """Of any times that grow with the layers of a stage, where some stages have room for few layers: the least (m - 1) max + sum, then the
    least max, then the fewest layers on the first stages."""
    stages, layers = data.draw(st.integers(2, 4)), data.draw(st.integers(4, 8))
    rounds = data.draw(st.integers(1, 9))
    tables = [
        np.cumsum(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=layers - stages + 1)))
        for _ in range(stages)
    ]
    table = np.full((1, stages, layers - stages + 1), np.inf)
    for stage, own in enumerate(tables):
        table[0, stage, : len(own)] = own
    found = []
    for split in product(*(range(1, len(own) + 1) for own in tables)):
        if sum(split) == layers:
            times = [int(own[number - 1]) for own, number in zip(tables, split, strict=True)]
            found.append(((rounds - 1) * max(times) + sum(times), max(times), split))
    expected = min(found, default=(0, 0, (0,) * stages))[2]
    assert tuple(soonest(table, np.array([rounds]), layers)[0].tolist()) == expected


def test_one_micro_batch_wants_the_least_sum_and_many_the_least_maximum() -> None:
    """Of 3 stages with 8 layers, 200 times, all at once: one micro-batch takes the least sum, very many the least of the slowest stage, and of
    those with that the least sum; with more micro-batches the slowest stage is never slower."""
    taken = np.cumsum(np.random.default_rng(0).integers(1, 10, (200, 3, 6)), axis=2).astype(float)
    splits = np.array([split for split in product(range(1, 7), repeat=3) if sum(split) == 8])
    times = taken[:, np.arange(3), splits - 1]
    sums, slowest = times.sum(axis=2), times.max(axis=2)
    found = []
    for rounds in (1, 2, 4, 10**6):
        own = soonest(taken, np.full(200, rounds), 8)
        here = np.take_along_axis(taken, own[:, :, None] - 1, axis=2)[:, :, 0]
        found.append((here.sum(axis=1), here.max(axis=1)))
    least = slowest.min(axis=1)
    assert np.array_equal(found[0][0], sums.min(axis=1))
    assert np.array_equal(found[-1][1], least)
    assert np.array_equal(found[-1][0], np.where(slowest == least[:, None], sums, np.inf).min(axis=1))
    assert all(np.all(more <= fewer) for (_, fewer), (_, more) in pairwise(found))
    assert np.any(found[0][1] > least)


@pytest.mark.parametrize(
    "words",
    [
        "pp=4,micro_batch=1",
        "pp=2,dp_shard=2,zero=3,micro_batch=1",
        "pp=4,schedule=gpipe,micro_batch=1",
        "pp=2,tp=2,micro_batch=1",
    ],
)
def test_a_stage_is_the_same_whatever_the_others_own(words: str) -> None:
    """So tables of one stage with so many layers are enough: it holds and takes what it does where all own as many."""
    job = job_of(16, 16, 0.05)
    pp = parse_pins(words)[0].value
    for split in ((3, 6, 2, 5), (1, 4, 9, 2)) if pp == 4 else ((5, 11), (9, 7)):
        again = [own // 2 for own in split]
        text = f"{words},stage_split={'/'.join(map(str, split))},recompute={'/'.join(map(str, again))}"
        row = row_of(job, text)
        held, takes = device_bytes_CS(job, row, pp)[0], stage_seconds_CS(job, row, pp)[0]
        for stage, (own, number) in enumerate(zip(split, again, strict=True)):
            alike, plain = replace(job, split=(own,) * pp), row_of(job, f"{words},recompute={max(1, number)}")
            plain = plain if number else row_of(job, words)
            assert held[stage] == pytest.approx(device_bytes_CS(alike, plain, pp)[0][stage], abs=1)
            assert takes[stage] == pytest.approx(stage_seconds_CS(alike, plain, pp)[0][stage], rel=1e-12)


@pytest.mark.slow
def test_many_layouts_are_found_as_each_alone_and_as_one_by_one() -> None:
    """Pipelines of different lengths together, each alone, and by the other way that `check --exhaustive` takes."""
    job = job_of(16, 16, 0.3)
    words = (
        "pp=4,micro_batch=1",
        "pp=2,tp=2,micro_batch=2",
        "pp=4,schedule=gpipe,micro_batch=1",
        "pp=2,dp_shard=2,zero=1,micro_batch=4",
    )
    rows = [row_of(job, f"{each},{RULED}") for each in words]
    layers, again = balanced_CS(job, joined(rows))
    assert len({tuple(own) for own in layers.tolist()}) > 1
    for row, own, number in zip(rows, layers.tolist(), again.tolist(), strict=True):
        pp = int(row["pp"][0])
        alone = [part[0].tolist() for part in balanced_CS(job, row)]
        assert [own[:pp], number[:pp]] == alone
        one_by_one = balanced_row(job, {name: int(column[0]) for name, column in row.columns.items()})
        assert [one_by_one[f"stage_layers_{stage}"] for stage in range(pp)] == own[:pp]
        assert [one_by_one[f"recompute_stage_{stage}"] for stage in range(pp)] == number[:pp]


def test_a_table_has_what_may_be_of_use() -> None:
    """A stage has no fewer layers than the others leave it, the last one, which has the head, room for fewer than the one before it."""
    job = job_of(16, 16, 0.3)
    nanoseconds, again = stage_tables(job, row_of(job, f"pp=4,micro_batch=1,{RULED}"), 4)
    there = np.isfinite(nanoseconds[0])
    least, most = there.argmax(axis=1) + 1, there.shape[1] - there[:, ::-1].argmax(axis=1)
    assert all(least[stage] >= 16 - (most.sum() - most[stage]) for stage in range(4))
    assert all(np.all(np.diff(own[is_there]) > 0) for own, is_there in zip(nanoseconds[0], there, strict=True))
    assert np.all(again[0] <= 1 + np.arange(there.shape[1]))


@pytest.mark.slow
def test_balanced_stages_are_faster_where_early_ones_run_much_again() -> None:
    """Llama-2 13B on two nodes of A100 of 40 GB: one layer less on the first stage saves it two that run again."""
    even, own = (
        predict(
            "llama-2-13b", "aws-p4d.24xlarge:2", strategy=f"{TWO_NODES},recompute=by-stage,stage_split={split}", **NODES
        )
        for split in ("even", "balanced")
    )
    assert even.fits
    assert own.fits
    assert lengths(even) == [20, 20]
    assert lengths(own) == [19, 21]
    assert own.time.step_ns < 0.98 * even.time.step_ns


def test_balanced_stages_stand_in_the_plan_of_those_who_ask() -> None:
    """Asked for they stand in the plan, its layout and its explanation, and price the same again, from the plan and from its layout."""
    plan = recommend("llama-2-13b", "aws-p4d.24xlarge:2", pin=f"{TWO_NODES},{RULED}", **NODES)
    numbers = "/".join(map(str, lengths(plan)))
    assert (plan.strategy.stage_split, numbers) == ("balanced", "19/21")
    assert not faults(plan)
    assert f"stage_split={numbers}" in layout_of(plan)
    assert "19/21 layers a stage" in option_words(plan)
    again = predict_plan(plan)
    assert (again.memory.worst, again.time.step_ns, again.layout) == (
        plan.memory.worst,
        plan.time.step_ns,
        layout_of(plan),
    )
    said = predict("llama-2-13b", "aws-p4d.24xlarge:2", strategy=layout_of(plan).replace(" ", ""), **NODES)
    assert (said.time.step_ns, said.legal, lengths(said)) == (plan.time.step_ns, True, [19, 21])
    pinned = recommend("llama-2-13b", "aws-p4d.24xlarge:2", pin=layout_of(plan).replace(" ", ""), **NODES)
    assert lengths(pinned) == [19, 21]
    assert not list(find_emitter("torchrun").obstacles(plan))
    for target in ("megatron", "torchtitan", "deepspeed"):
        assert any("stage_split" in said for said in find_emitter(target).obstacles(plan))


@pytest.mark.slow
def test_a_search_asked_to_look_at_them_finds_no_worse() -> None:
    """With balanced stages among the layouts the best is no slower, and there are more layouts."""
    pipelines: dict[str, Any] = {
        "seq_len": 4096,
        "global_batch": 16,
        "policy": "fastest",
        "forbid": "tp,cp,zero",
        "certificate": True,
    }
    plans = [
        recommend("llama-3.2-1b", "ws-4x-4090", **pipelines, also=also)
        for also in ("recompute_by_stage", "recompute_by_stage,balanced_stages", "balanced_stages")
    ]
    counts = [plan.certificate.enumerated for plan in plans if plan.certificate is not None]
    assert plans[1].time.step_ns <= plans[0].time.step_ns
    assert counts[1] > max(counts[0], counts[2])


@pytest.mark.parametrize(
    "layout",
    [
        "pp=4,tp=2,stage_split=balanced",
        "pp=4,tp=2,stage_split=balanced,recompute=full",
        "pp=4,tp=2,stage_split=balanced,recompute=3/2/1/0",
        "pp=4,tp=2,stage_split=9/10/10/11",
        "pp=4,tp=2,stage_split=9/10/10/11,recompute=by-stage",
        "pp=4,tp=2,stage_split=9/10/10/10,recompute=3/2/1/0",
        "pp=4,tp=2,stage_split=19/10/11,recompute=3/2/1/0",
        "pp=4,tp=2,stage_split=1/10/10/19,recompute=3/2/1/0",
        "pp=4,tp=2,stage_layers_0=3,recompute=3/2/1/0",
        "pp=4,tp=2,vp=2,stage_split=balanced,recompute=by-stage",
        "tp=8,stage_split=balanced",
    ],
)
def test_splits_that_mean_nothing_are_refused(layout: str) -> None:
    """Both numbers are left to the rule or both are said, of every stage, of stages of one chunk, with no more again than a stage owns."""
    with pytest.raises(ImpossibleError):
        predict("llama-2-13b", "aws-p4d.24xlarge", strategy=layout, **NODES)


def test_words_that_are_no_splits_are_refused() -> None:
    """What is no number, or none for a layer; and the rule knows layers that are all alike."""
    for text in ("stage_split=2/", "stage_split=0/40", "stage_split=2/x", "stage_split=2/3,stage_split=even"):
        with pytest.raises(InputError):
            parse_pins(text)
    with pytest.raises(ImpossibleError, match="layers are alike"):
        predict("gemma-2-9b", "dgx-h100", strategy=f"pp=2,tp=4,{RULED}", **NODES)
    with pytest.raises(ImpossibleError, match="has stage_split=balanced and recompute=3/1 together"):
        recommend("llama-2-7b", "dgx-h100", pin="pp=2,stage_split=balanced,recompute=3/1", **NODES)
