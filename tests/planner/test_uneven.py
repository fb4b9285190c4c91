"""Uneven batches: faster nodes run more micro-batches, and the plan says so where somebody asks."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist import Plan, emit, recommend
from strategist.ask import Given, complete
from strategist.document.load import plan_from
from strategist.document.plan import Share, sequences_of, sequences_per_step
from strategist.document.write import digest, dump
from strategist.errors import ImpossibleError, InputError
from strategist.facts.clusters import cluster_from_flags
from strategist.facts.hardware import Cluster
from strategist.facts.job import Job
from strategist.memory.estimate import peak_memory
from strategist.planner.check import faults
from strategist.planner.exhaustive import recheck
from strategist.planner.predict import layout_of, predict_plan
from strategist.planner.search import Question
from strategist.planner.uneven import (
    ROUNDING_NS,
    Speed,
    _least_ns,
    _running,
    _Speeds,
    balanced,
    best_split,
    jobs_of_kinds,
    layouts,
    priced,
)
from strategist.planner.weigh import lacking
from strategist.timing.estimate import step_times
from strategist.units import format_seconds
from tests.cli.harness import call
from tests.examples import examples
from tests.oracle import uneven as oracle

FAST, SLOW, SMALL = "h100-sxm-80gb", "a100-sxm-80gb", "rtx-4090"
JOB: dict[str, Any] = {"model": "llama-3.2-1b", "seq_len": 2048, "global_batch": 64}


def mixed(*kinds: tuple[str, int], gpus: int = 8, inter_Bps: float = 1e11) -> Cluster:
    """Nodes of so many devices, so many nodes of each kind, on one fabric."""
    found = [cluster_from_flags(name, gpus, count).cluster for name, count in kinds]
    way_out: dict[str, Any] = {"inter_Bps": inter_Bps, "fabric": "infiniband", "rdma": True}
    groups = (replace(group, node=replace(group.node, **way_out)) for one in found for group in one.groups)
    return replace(found[0], groups=tuple(groups))


def asked(hardware: Cluster, **more: Any) -> Question:
    """The question about some machines, for the formulas alone."""
    return complete(Given(hardware=hardware, uncalibrated=True, **(JOB | more))).question


def planned(hardware: Cluster, **more: Any) -> Plan:
    """The plan that may have an uneven batch."""
    return recommend(hardware=hardware, **(JOB | {"also": "uneven_batch"} | more))


@examples(200)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 90), st.integers(1, 60)), min_size=1, max_size=3),
    st.integers(1, 40),
)
def test_no_way_to_hand_out_micro_batches_ends_sooner(kinds: list[tuple[int, int, int]], total: int) -> None:
    """The numbers add up, each is at least one, and of all ways to do that none is through sooner; None where there is none."""
    speeds = [Speed(replicas, float(once + each), float(each)) for replicas, once, each in kinds]

    def end(numbers: tuple[int, ...]) -> float:
        return max(float(own.finish_ns(np.array(n))) for own, n in zip(speeds, numbers, strict=True))

    every = list(oracle.ways([own.replicas for own in speeds], total))
    found = balanced(speeds, total)
    if found is None:
        assert every == []
        return
    assert found in every
    assert end(found) == min(map(end, every))
    ends = {end(best) for order in permutations(speeds) if (best := _in_order(order, speeds, total)) is not None}
    assert ends == {end(found)}


def _in_order(order: tuple[Speed, ...], speeds: list[Speed], total: int) -> tuple[int, ...] | None:
    """What the kinds get that are asked in another order, in their own."""
    places = sorted(range(len(order)), key=lambda place: [own is order[place] for own in speeds].index(True))
    found = balanced(order, total)
    return None if found is None else tuple(found[place] for place in places)


HARDWARE = (
    mixed((FAST, 1), (SLOW, 1), gpus=2),
    mixed((FAST, 2), (SLOW, 1), gpus=2, inter_Bps=1e10),
    mixed((SMALL, 1), (FAST, 1), gpus=4),
    mixed((FAST, 1), (SLOW, 1), (SMALL, 1), gpus=2),
)


def test_what_layouts_are_tried_by_is_what_they_cost() -> None:
    """No uneven batch is through sooner than its bound, and each kind has room for a number of micro-batches where they fit it: one fits where
    two do not."""
    question = asked(HARDWARE[0], global_batch=24)
    every = layouts(question)
    some = every.where(np.arange(0, len(every), -(-len(every) // 4)))
    totals = 24 // some["micro_batch"]
    held = [peak_memory(question.job, _running(some, np.full_like(totals, number))).device for number in (1, 2, 4)]
    row = int((held[1] - held[0]).argmax())
    assert held[0][row] < held[1][row]
    between = (int(held[0][row]) + int(held[1][row])) / 2
    job = replace(question.job, headroom=1 - between / question.job.cluster.smallest.memory_bytes)
    kinds = [_Speeds(kind, some, totals) for kind in jobs_of_kinds(job)]
    for number, bytes_ in zip((1, 2, 4), held, strict=True):
        for place in range(len(some)):
            assert all(kind.has_room(place, number) == (bytes_[place] <= job.usable_bytes) for kind in kinds)
    bound = _least_ns(kinds, totals)
    for place, total in enumerate(totals.tolist()):
        shares = balanced([kind.of(place) for kind in kinds], total)
        if shares is not None:
            assert bound[place] <= priced(job, some.where(np.array([place])), shares).step_ns + ROUNDING_NS


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("number", range(len(HARDWARE)))
def test_every_layout_costs_what_an_independent_derivation_says(number: int, zero: int) -> None:
    """Nanoseconds of each kind's end, and whether each kind has room, are those of the scalar oracle."""
    question = asked(HARDWARE[number], global_batch=24)
    job = question.job
    everything = layouts(question)
    some = everything.where(np.flatnonzero(everything["zero"] == zero))
    assert len(some)
    for row in range(0, len(some), 7):
        alone = some.where(np.array([row]))
        layout = alone.row(0)
        counts = oracle.replicas_of(job, layout)
        numbers = next(oracle.ways(counts, 24 // int(layout["micro_batch"])), None)
        if numbers is None:
            continue
        split = priced(job, alone, numbers)
        assert split.step_ns == pytest.approx(oracle.step_of(job, layout, numbers), abs=40)
        assert (not lacking(*split.tightest)) == oracle.fits(job, layout, numbers)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(HARDWARE)))
def test_the_best_split_is_the_best_of_all(number: int) -> None:
    """Every layout with every way to hand out micro-batches, each by the oracle: none that fits ends sooner."""
    question = asked(HARDWARE[number], global_batch=12, forbid="recompute")
    job, found = question.job, best_split(question).split
    best = None
    everything = layouts(question)
    for row in np.flatnonzero(everything["zero"] <= 1).tolist():
        layout = everything.where(np.array([row])).row(0)
        for numbers in oracle.ways(oracle.replicas_of(job, layout), 12 // int(layout["micro_batch"])):
            if oracle.fits(job, layout, numbers):
                step = oracle.step_of(job, layout, numbers)
                best = step if best is None else min(best, step)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.step_ns == pytest.approx(best, abs=100)


@pytest.mark.slow
@examples(15)
@given(st.sampled_from(HARDWARE), st.sampled_from((16, 24, 48, 96)), st.randoms())
def test_the_order_of_kinds_does_not_matter(hardware: Cluster, batch: int, random: Any) -> None:
    """The same nodes named in another order take the same time, kind by kind."""
    groups = list(hardware.groups)
    random.shuffle(groups)
    one, other = (
        best_split(asked(cluster, global_batch=batch)).split
        for cluster in (hardware, replace(hardware, groups=tuple(groups)))
    )
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert other.step_ns == one.step_ns
        assert other.layout.partition("accumulation")[0] == one.layout.partition("accumulation")[0]


@examples(15)
@given(st.sampled_from(HARDWARE), st.integers(1, 6), st.sampled_from((1, 2)), st.sampled_from((0, 1)))
def test_no_even_batch_in_the_same_layout_is_sooner(hardware: Cluster, each: int, tp: int, zero: int) -> None:
    """With the best numbers a layout is through no later than with equal ones, and its step is linear in them."""
    dp = hardware.world // tp
    question = asked(hardware, global_batch=each * dp, pin=f"tp={tp},micro_batch=1,zero={zero}", forbid="recompute")
    job = question.job
    row = layouts(question).where(np.array([0]))
    own = jobs_of_kinds(job)
    ends = [_ends(kind, row, each * dp) for kind in own]
    speeds = [
        Speed(kind.cluster.world // tp, float(e[0]), float(e[1] - e[0])) for kind, e in zip(own, ends, strict=True)
    ]
    for found, speed in zip(ends, speeds, strict=True):
        assert found == pytest.approx(speed.finish_ns(np.arange(1, len(found) + 1)), abs=12 * len(found))
    numbers = balanced(speeds, each * dp)
    assert numbers is not None
    assert priced(job, row, numbers).step_ns <= priced(job, row, [each] * len(own)).step_ns + 12 * each * dp


def _ends(job: Job, row: Any, most: int) -> Any:
    """Nanoseconds of a step of one kind, with 1 to `most` micro-batches and one more."""
    numbers = np.arange(1, most + 2)
    many = row.where(np.zeros(len(numbers), np.int64))
    return step_times(job, type(row)({**many.columns, "accumulation": numbers})).step


def test_equal_kinds_take_what_one_kind_takes() -> None:
    """Where all nodes are of one design, each kind ends as the whole cluster does when it is priced as one."""
    hardware = mixed((FAST, 1), (FAST, 1), gpus=4)
    question = asked(hardware, global_batch=32, pin="zero=0,micro_batch=2,tp=1", forbid="recompute")
    row = layouts(question).where(np.array([0]))
    split = priced(question.job, row, (2, 2))
    whole = step_times(question.job, type(row)({**row.columns, "accumulation": np.array([2])}))
    assert split.step_ns == int(whole.step[0])
    assert {name: int(c[0]) for name, c in split.times.exposed.items()} == {
        n: int(c[0]) for n, c in whole.exposed.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["hf", "fastest"])
def test_it_is_taken_where_it_is_asked_for_and_wins(policy: str) -> None:
    """With the word the plan has it and all three numbers; without, the plan is what it was and says how to ask."""
    hardware = mixed((FAST, 1), (SLOW, 1))
    even, uneven = planned(hardware, also=None, policy=policy), planned(hardware, policy=policy)
    assert even.strategy.uneven_batch == ()
    (advice,) = [hint.sentence for hint in even.hints if hint.code == "W_UNEVEN"]
    (said,) = [hint.sentence for hint in uneven.hints if hint.code == "W_UNEVEN"]
    (alone,) = [hint.sentence for hint in even.hints if hint.code == "W_ONE_KIND"]
    assert uneven.time.step_ns < even.time.step_ns
    for plan in (even, uneven):
        assert format_seconds(plan.time.step_ns / 1e9) in said
        assert format_seconds(plan.time.step_ns / 1e9) in advice
    assert alone.partition("alone predicted at ")[2].partition(" per step")[0] in said
    assert "Ask again with --also uneven_batch" in advice
    assert sequences_per_step(uneven.mesh, uneven.strategy) == JOB["global_batch"]
    assert [share.replicas * uneven.mesh.tp for share in uneven.strategy.uneven_batch] == [8, 8]
    assert uneven.alternatives[0].layout == layout_of(even)
    assert uneven.decision.difference == pytest.approx(uneven.decision.other_step_s / uneven.time.step.value)
    assert faults(uneven) == ()


@pytest.mark.slow
def test_the_plan_can_be_read_priced_and_checked_again(tmp_path: Any) -> None:
    """The document reads back equal, prices to what it says, and trying everything finds nothing better."""
    plan = planned(mixed((FAST, 1), (SLOW, 1), gpus=2), global_batch=16, certificate=True, forbid="cp,pp,recompute")
    assert plan.strategy.uneven_batch
    again = plan_from(json.loads(dump(plan)), "plan.json")
    assert again == plan
    judged = predict_plan(again)
    assert (judged.time, judged.memory, judged.strategy) == (plan.time, plan.memory, plan.strategy)
    assert (judged.legal, judged.fits, judged.layout) == (True, True, layout_of(plan))
    claims = recheck(plan).claims
    assert all(claim.holds for claim in claims), [claim.sentence for claim in claims if not claim.holds]
    assert any("uneven" in claim.sentence for claim in claims)


@pytest.mark.slow
def test_a_plan_that_is_not_the_best_is_found_out() -> None:
    """Numbers that add up but end later are a claim that does not hold."""
    plan = planned(mixed((FAST, 1), (SLOW, 1), gpus=2), global_batch=16, forbid="cp,pp,recompute")
    first, second = plan.strategy.uneven_batch
    total = sum(share.replicas * share.micro_batches for share in (first, second))
    worse = (replace(first, micro_batches=1), replace(second, micro_batches=(total - 2) // 2))
    spoilt = replace(
        plan, strategy=replace(plan.strategy, uneven_batch=worse, accumulation=max(s.micro_batches for s in worse))
    )
    judged = predict_plan(spoilt)
    spoilt = replace(spoilt, time=judged.time, memory=judged.memory)
    assert faults(spoilt) == ()
    assert not recheck(spoilt).holds


def test_plans_without_one_do_not_name_it() -> None:
    """The field is written where it says something alone, so that other plans and their seals stay what they were."""
    plan = recommend(hardware="dgx-h100", **JOB)
    assert "uneven_batch" not in dump(plan)
    assert digest(plan) != digest(planned(mixed((FAST, 1), (SLOW, 1), gpus=2)))


def test_one_kind_is_planned_as_ever_and_told_so() -> None:
    """On equal nodes the word changes nothing but what is said."""
    plain, asked_for = (
        recommend(hardware="dgx-h100:2", **JOB),
        recommend(hardware="dgx-h100:2", also="uneven_batch", **JOB),
    )
    assert (asked_for.mesh, asked_for.strategy, asked_for.time) == (plain.mesh, plain.strategy, plain.time)
    assert [hint.sentence for hint in asked_for.hints if hint.code == "W_UNEVEN"] == [
        "No uneven batch is possible: all nodes are of one kind."
    ]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["time", "cost"])
def test_idle_devices_and_uneven_batches_compete(objective: str) -> None:
    """Where both are allowed, the plan is no worse than either alone."""
    hardware = mixed((FAST, 1), (SLOW, 2), gpus=2)
    plans = [
        planned(hardware, objective=objective, policy="fastest", **more)
        for more in ({"allow_idle": True}, {}, {"allow_idle": True, "also": None})
    ]
    both, *one = [plan.time.step_ns * (plan.mesh.world if objective == "cost" else 1) for plan in plans]
    assert both <= min(one)
    assert faults(plans[0]) == ()


@pytest.mark.parametrize(
    ("pin", "words"),
    [
        ("zero=3", "meets in every micro-batch"),
        ("compression=bf16", "was not tried beside"),
    ],
)
def test_what_cannot_be_uneven_is_said(pin: str, words: str) -> None:
    """A rule names the reason where every layout is refused."""
    plan = planned(mixed((FAST, 1), (SLOW, 1), gpus=2), pin=pin, precision="bf16")
    (hint,) = [hint for hint in plan.hints if hint.code == "W_UNEVEN"]
    assert words in hint.sentence


def test_words_that_do_not_go_together_are_refused() -> None:
    """Each contradiction is an InputError that names both."""
    hardware = mixed((FAST, 1), (SLOW, 1), gpus=2)
    for more in (
        {"pin": "accumulation=2"},
        {"grad_accum": 2},
        {"sensitivity": True},
        {"objective": "memory"},
        {"verify": True},
    ):
        with pytest.raises(InputError) as caught:
            planned(hardware, **more)
        assert caught.value.code == "CONFLICT"


PLAN = planned(mixed((FAST, 1), (SLOW, 1), gpus=2), pin="tp=1,zero=0")
A, B = PLAN.strategy.uneven_batch


@pytest.mark.parametrize(
    ("shares", "more", "words"),
    [
        ((A,), {}, "1 shares and the cluster 2 kinds"),
        ((A, replace(B, micro_batches=B.micro_batches + 1)), {}, "but the global batch is"),
        ((replace(A, replicas=A.replicas + 1), B), {}, "has 3 replicas of tp 1"),
        ((A, replace(B, micro_batches=0)), {}, "it is at least 1"),
        ((A, B), {"accumulation": 99}, "accumulation is 99"),
        ((A, B), {"zero": 3}, "meet once a step"),
    ],
)
def test_a_plan_whose_shares_do_not_add_up_is_not_sound(shares: tuple[Share, ...], more: Any, words: str) -> None:
    """Counts, sums and what an uneven batch cannot stand beside are invariants of a plan."""
    broken = replace(PLAN, strategy=replace(PLAN.strategy, uneven_batch=shares, **more))
    assert any(words in fault for fault in faults(broken)), faults(broken)
    if len(shares) == 2 and not more and words.startswith("has"):
        with pytest.raises(ImpossibleError) as caught:
            predict_plan(broken)
        assert caught.value.code == "BATCH_SPLIT"


@examples(100)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=4), st.integers(1, 4), st.integers(1, 5))
def test_replicas_share_each_global_batch_without_gaps(shares: list[tuple[int, int]], micro: int, even: int) -> None:
    """The sequences of all replicas, one behind the other, are the global batch."""
    uneven = tuple(Share(replicas=r, micro_batches=m) for r, m in shares)
    replicas = sum(r for r, _ in shares) or even
    mesh = replace(PLAN.mesh, dp_replicate=replicas)
    strategy = replace(PLAN.strategy, micro_batch=micro, accumulation=even, uneven_batch=uneven)
    taken = [number for replica in range(replicas) for number in sequences_of(mesh, strategy, replica)]
    assert taken == list(range(sequences_per_step(mesh, strategy)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "says"),
    [("torchrun", True), ("slurm", True), ("kubernetes", False), ("ray", False), ("accelerate", False)],
)
def test_a_front_end_that_cannot_say_it_is_not_given_one(target: str, says: bool) -> None:
    """Whatever is planned for a target can be emitted to it; where it cannot be an uneven batch, the plan says why."""
    plan = planned(mixed((FAST, 1), (SLOW, 1), gpus=2), frontend=target, policy="fastest", forbid="cp,pp,recompute")
    assert bool(plan.strategy.uneven_batch) == says
    assert emit(plan, target)
    (hint,) = [hint for hint in plan.hints if hint.code == "W_UNEVEN"]
    assert hint.sentence.startswith("No uneven batch is possible") != says


def test_an_uneven_batch_is_asked_for_by_a_word(tmp_path: Any) -> None:
    """On the command line the word makes the plan uneven, which is then checked, shown and emitted like any other."""
    hardware, plan = tmp_path / "mixed.json", tmp_path / "plan.json"
    nodes = [{"gpu": gpu, "gpu_count": 2, "inter_bw": "100GB/s"} for gpu in (FAST, SLOW)]
    hardware.write_text(json.dumps({"nodes": nodes}))
    asked_for = ("--model", "llama-3.2-1b", "--seq-len", "2048", "--global-batch", "64", "--hardware", str(hardware))
    made = call("plan", *asked_for, "--also", "uneven_batch", "--policy", "fastest", "--out", str(plan))
    assert made.code == 0
    assert "accumulation" in made.out
    assert json.loads(plan.read_text())["strategy"]["uneven_batch"]
    assert call("check", str(plan)).code == 0
    assert "x dp 2 + accumulation" in call("explain", str(plan)).out
    emitted = call("emit", str(plan), "--to", "torchrun", "--out", str(tmp_path / "job"))
    assert emitted.code == 0
    assert "Nodes are numbered in this order" in (tmp_path / "job" / "launch.sh").read_text()


def test_sizes_are_searched_without_it() -> None:
    """Machines of one kind at a time have nothing to hand out unevenly, and that is said."""
    words = ("size", "--model-size", "7B", "--tokens", "1T", "--also", "uneven_batch", "--json")
    refused = call(*words)
    assert refused.code == 2
    assert json.loads(refused.out)["error"]["code"] == "E_CONFLICT"
