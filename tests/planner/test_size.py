"""The inverse question: how much of a run is progress, and which machines end it in time."""

from __future__ import annotations

import math
import random
import re
from functools import cache
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategist import NoPlanError, load_model, recommend
from strategist.ask import Given
from strategist.cli.arguments import Command
from strategist.document.sizing import Machines, Sizing
from strategist.facts.adapters import as_trained, usual_targets, with_adapters
from strategist.facts.job import Job
from strategist.facts.profile import find_profile
from strategist.facts.workload import Optimizer, Workload
from strategist.memory.estimate import peak_memory
from strategist.planner.goodput import best_interval, checkpoint_bytes, goodput, progress
from strategist.planner.largest import halved
from strategist.planner.predict import filled
from strategist.planner.search import Found, Question
from strategist.planner.situation import one
from strategist.planner.size import Kind, _described, answers, evenly, sizes
from strategist.records import replace
from strategist.sizing import Wanted, largest_that_fits, sized
from strategist.units import LONGEST, as_flag, format_duration, parse_duration
from tests.cli.harness import call
from tests.strategies import machine

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_intervals_are_those_of_dalys_paper(hours: float, minutes: float) -> None:
    """For checkpoints of 5 minutes the paper's figures 3 to 5 name these best intervals."""
    found = best_interval(5 * MINUTE, hours * HOUR) / MINUTE
    assert found == pytest.approx(minutes, abs=0.05 if minutes < 10 else 0.5)


@settings(max_examples=60, deadline=None)
@given(st.floats(1, 600), st.floats(1, 3), st.floats(0, 1200))
def test_no_other_interval_makes_more_progress(write: float, exponent: float, restart: float) -> None:
    """Over intervals from a tenth to ten times the best one, none gains more than one part in a thousand."""
    between = write * 10**exponent
    best = progress(best_interval(write, between), write, between, restart)
    others = (best_interval(write, between) * 10 ** (k / 20) for k in range(-20, 21))
    assert max(progress(t, write, between, restart) for t in others) <= best * 1.001
    assert 0 < best < 1


@pytest.mark.parametrize(("write", "between", "restart"), [(30, 4 * HOUR, 600), (300, HOUR, 600), (60, DAY, 60)])
def test_progress_is_what_a_run_with_failures_makes(write: float, between: float, restart: float) -> None:
    """A run that is played second by second, with failures at random moments and restarts that may fail too, makes the
    progress of the formula within two per cent."""
    dice, clock, done = random.Random(7), 0.0, 0
    interval = best_interval(write, between)
    for _ in range(30_000):
        left = dice.expovariate(1 / between)
        while left < interval + write:  # lost: everything since the last checkpoint, and then the restart
            clock += left
            left = dice.expovariate(1 / between)
            while left < restart:
                clock += left
                left = dice.expovariate(1 / between)
            clock += restart
            left = dice.expovariate(1 / between)
        clock += interval + write
        done += 1
    assert done * interval / clock == pytest.approx(progress(interval, write, between, restart), rel=0.02)


def job(hardware: str, model: str = "llama-3.1-405b") -> Job:
    """A job on some machines."""
    return Job(cluster=machine(hardware), model=load_model(model), workload=Workload(), profile=find_profile())


def test_more_devices_fail_more_often() -> None:
    """Twice the devices halve the time between failures, shorten the interval and lower the share of progress."""
    shares = [goodput(job(f"dgx-h100:{nodes}")) for nodes in (64, 128, 256, 1024)]
    assert shares[0].seconds_between_failures == pytest.approx(2 * shares[1].seconds_between_failures)
    for fewer, more in pairwise(shares):
        assert fewer.interval_s > more.interval_s
        assert fewer.share > more.share


def test_the_run_that_the_failures_are_from_was_as_effective_as_it_said() -> None:
    """Llama 3 405B on 16,384 H100 reports more than 90 % effective training time; failures alone leave more than that."""
    share = goodput(job("dgx-h100:2048"))
    assert 0.9 < share.share < 1
    assert 54 * DAY / share.seconds_between_failures == pytest.approx(419)


@pytest.mark.parametrize(
    ("framework", "optimizer", "frozen"),
    [("strategist", "adamw", 0), ("strategist", "adamw", 50_000_000), ("strategist", "sgd", 0), ("strategist", "adamw8bit", 0), ("strategist", "muon", 0), ("deepspeed", "adamw", 0), ("torchtune", "adamw", 0)],
)  # fmt: skip
def test_a_checkpoint_holds_what_a_whole_replica_keeps(framework: str, optimizer: Optimizer, frozen: int) -> None:
    """Its weights, frozen ones too, and its optimizer's state, as the ledger of memory counts both."""
    work = Workload(seq_len=1024, global_batch=8, optimizer=optimizer)
    shape = replace(load_model("gpt2"), frozen=frozen)
    asked = as_trained(Job(cluster=machine("dgx-h100"), model=shape, workload=work, profile=find_profile(framework)))
    kept = peak_memory(asked, one(**filled(asked, {"dp": 8}))).terms
    assert checkpoint_bytes(asked) == pytest.approx(kept["parameters"][0] + kept["optimizer"][0], abs=1)


@pytest.mark.parametrize("model", ["llama-3.2-1b", "olmoe-1b-7b"])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_checkpoint_of_adapters_holds_frozen_weights_as_they_rest(model: str, method: str) -> None:
    """In sixteen bits or in four, and adapters in the format of their gradients, as the ledger of memory counts them."""
    shape = load_model(model)
    shape = with_adapters(shape, method, 8, usual_targets(shape))
    work = Workload(seq_len=512, global_batch=8, optimizer="adamw")
    asked = as_trained(Job(cluster=machine("dgx-h100"), model=shape, workload=work, profile=find_profile()))
    kept = peak_memory(asked, one(**filled(asked, {"dp": 8}))).terms
    assert checkpoint_bytes(asked) == pytest.approx(kept["parameters"][0] + kept["optimizer"][0], abs=1)


def described(tokens: int, deadline_s: float | None = None) -> Machines:
    """What `size` says of 16 devices on which a step takes two seconds, at three an hour for each."""
    asked = Question(job=replace(job("dgx-h100:2", "gpt2"), workload=Workload(tokens=tokens)))
    alone = {"candidates": one(**filled(asked.job, {})), "device_bytes": [7], "families": {}}
    found = cast(Found, SimpleNamespace(question=asked, step_seconds=lambda _row: 2.0, **alone))
    kind = Kind(gpu="h100-sxm", ask=lambda *_: asked, sizes=(), price_per_gpu_hour=3.0)
    return _described(kind, found, 0, deadline_s)


def test_a_run_ends_with_its_last_step() -> None:
    """One token more than whole steps is a step more; failures lengthen the run, devices and hours make its price, and it is in time to the
    second."""
    each = Workload().tokens_per_step
    for tokens, steps in ((1000 * each, 1000), (1000 * each + 1, 1001), (1, 1)):
        found = described(tokens)
        assert found.run_seconds == pytest.approx(2.0 * steps / found.goodput.share)
        assert found.run_seconds > 2.0 * steps
        assert found.gpu_hours == pytest.approx(16 * found.run_seconds / 3600)
        assert found.cost == pytest.approx(3.0 * found.gpu_hours)
    took = described(1000 * each).run_seconds
    assert [described(1000 * each, limit).in_time for limit in (took - 1, took + 1, None)] == [False, True, True]


@pytest.mark.parametrize("price", [None, 3.0])
def test_least_cheapest_and_fastest_are_three_answers(price: float | None) -> None:
    """Of 4 devices that take 300 s, 8 that take 100 s and 16 that take 60 s: the fewest, those with the fewest device-seconds, and the fastest,
    with prices as without; what is not in time is the fastest alone."""
    plain = described(1)
    found = [
        replace(
            plain,
            gpus=gpus,
            run_seconds=took,
            gpu_hours=gpus * took,
            cost=price and price * gpus * took,
            in_time=took > 50,
        )
        for gpus, took in ((4, 300.0), (8, 100.0), (16, 60.0), (64, 40.0))
    ]
    best = answers(found, 1000.0)
    assert best.cheapest is not None
    assert (best.least.gpus, best.cheapest.gpus, best.fastest.gpus) == (4, 8, 64)
    others = [replace(each, gpu="l40s") if each.gpus == 4 else each for each in found]
    cheapest = answers(others, 1000.0).cheapest
    assert (cheapest is None) is (price is None)


PLAIN = "offload,recompute,cp"
"""What the small model needs on none of its machines."""


@cache
def answer(deadline_days: float | None = None, **more: Any) -> Sizing:
    """A small model on two kinds of devices."""
    given_ = Given(
        model="llama-3.2-1b", tokens=20 * 10**9, seq_len=2048, global_batch=32, nodes=more.pop("nodes", 4), forbid=PLAIN
    )
    deadline = None if deadline_days is None else deadline_days * DAY
    return sized(Wanted(given=given_, deadline_s=deadline, gpus=more.pop("gpus", ("h100-sxm", "l40s")), **more))


@pytest.mark.slow
def test_the_answers_are_the_extremes_of_what_was_looked_at() -> None:
    """Least has the fewest devices in time, cheapest costs no more than any in time, fastest is fastest of all."""
    found = answer(1.0, prices=(2.5, 0.9))
    timely = [m for m in found.looked_at if m.run_seconds <= DAY]
    assert [m for m in found.looked_at if m.in_time] == timely
    assert 0 < len(timely) < len(found.looked_at)
    assert found.least.gpus == min(m.gpus for m in timely)
    assert found.cheapest is not None
    assert found.cheapest.cost == min(m.cost or math.inf for m in timely)
    assert found.fastest.run_seconds == min(m.run_seconds for m in found.looked_at)
    assert {found.least, found.cheapest} <= set(timely)


@pytest.mark.slow
def test_a_row_is_the_plan_for_its_machines() -> None:
    """Step and layout are those that `plan --policy fastest` has for the same machines; the run is steps over goodput."""
    for machines in answer().looked_at[::3]:
        hardware = {"gpu": machines.gpu, "gpus_per_node": machines.gpus // machines.nodes, "nodes": machines.nodes}
        plan = recommend("llama-3.2-1b", hardware, seq_len=2048, global_batch=32, policy="fastest", forbid=PLAIN)
        assert machines.step_s == pytest.approx(plan.time.step.value, rel=1e-6)
        steps = math.ceil(20 * 10**9 / (2048 * 32))
        assert machines.run_seconds == pytest.approx(steps * machines.step_s / machines.goodput.share)
        assert machines.gpu_hours == pytest.approx(machines.run_seconds * machines.gpus / HOUR)


def sizes_in_time(found: Sizing, days: float) -> set[tuple[str, int]]:
    """Kinds and powers of two of devices that end within some days."""
    return {(m.gpu, m.gpus) for m in found.looked_at if m.run_seconds <= days * DAY and m.gpus & (m.gpus - 1) == 0}


@pytest.mark.slow
@pytest.mark.parametrize("days", [0.5, 1.0, 4.0])
def test_what_is_left_out_unsearched_would_have_been_too_late(days: float) -> None:
    """A deadline loses no machines that are in time when everything is searched without one."""
    assert sizes_in_time(answer(days), days) == sizes_in_time(answer(), days)


@pytest.mark.slow
def test_more_time_needs_no_more_machines() -> None:
    """Least falls or stays as the deadline moves out, and its answer is in time."""
    least = [answer(days).least for days in (0.4, 0.5, 0.7, 1.0, 2.0, 4.0)]
    assert [m.gpus for m in least] == sorted((m.gpus for m in least), reverse=True)
    assert least[0].gpus > least[-1].gpus


@pytest.mark.parametrize("most", [1, 2, 3, 6, 7, 47, 48, 56, 64, 100])
def test_the_most_nodes_that_may_be_had_are_a_size(most: int) -> None:
    """Powers of two up to the most nodes, then some of those between, and at last the most."""
    nodes = [nodes for per_node, nodes in sizes(8, most, parts=True) if per_node == 8]
    assert nodes == sorted(set(nodes))
    assert nodes[-1] == most
    assert {2**k for k in range(most.bit_length()) if 2**k <= most} <= set(nodes)
    assert len(nodes) <= most.bit_length() + 4


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 99), st.integers(1, 99), st.integers(2, 9))
def test_parts_of_a_way_lie_between_its_ends(low: int, way: int, parts: int) -> None:
    """Whole numbers in order, none of them an end, and no two neighbours further apart than a part rounded up."""
    between = evenly(low, low + way, parts)
    assert len(between) <= parts - 1
    steps = [after - before for before, after in pairwise([low, *between, low + way])]
    assert min(steps) > 0
    assert max(steps) <= -(-way // parts)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "share"), [(4, 0.5), (8, 0.1), (8, 0.5), (8, 0.9)])
def test_one_node_less_than_the_least_is_too_late(nodes: int, share: float) -> None:
    """Where so many nodes are in time and half of them are not, all between are looked at: with one node less than the least no
    layout that `plan` finds is in time."""
    alone: dict[str, Any] = {"gpus": ("l40s",), "nodes": 8}
    slow, fast = (next(m.run_seconds for m in answer(**alone).looked_at if m.nodes == n) for n in (nodes // 2, nodes))
    assert fast < slow
    deadline = (fast + share * (slow - fast)) / DAY
    least, steps = answer(deadline, **alone).least, math.ceil(20 * 10**9 / (2048 * 32))
    fewer = {"gpu": "l40s", "gpus_per_node": least.gpus // least.nodes, "nodes": least.nodes - 1}
    plan = recommend("llama-3.2-1b", fewer, seq_len=2048, global_batch=32, policy="fastest", forbid=PLAIN)
    assert nodes // 2 < least.nodes <= nodes
    assert plan.time.step.value * steps > 0.99 * deadline * DAY  # the rest is goodput


@pytest.mark.slow
def test_as_many_nodes_as_may_be_had_are_asked() -> None:
    """Three nodes that are in time are found where at most three may be had, although no power of two is."""
    alone = {"gpus": ("a10g",)}
    two, three = (next(m for m in answer(**alone, nodes=n).looked_at if m.nodes == n) for n in (2, 3))
    between = (two.run_seconds + three.run_seconds) / 2 / DAY
    assert three.run_seconds < two.run_seconds
    assert answer(between, **alone, nodes=3).least.nodes == 3


@pytest.mark.slow
def test_prices() -> None:
    """Cost is device-hours times the price of their own kind; without prices kinds in time are not compared in money, and
    devices of one kind are compared by their hours."""
    prices = {"h100-sxm-80gb": 2.5, "l40s": 0.9}
    priced = answer(1.0, prices=tuple(prices.values()))
    assert {m.gpu for m in priced.looked_at} == set(prices)
    assert [m.cost for m in priced.looked_at] == [pytest.approx(m.gpu_hours * prices[m.gpu]) for m in priced.looked_at]
    assert answer().cheapest is None
    alone = answer(1.0, gpus=("h100-sxm",))
    assert isinstance(alone.cheapest, Machines)
    assert alone.cheapest.gpu_hours == min(m.gpu_hours for m in alone.looked_at if m.in_time)
    assert alone.cheapest.cost is None


WORDS = ("size", "--model", "llama-3.2-1b", "--tokens", "20B", "--nodes", "1")


@pytest.mark.parametrize(
    ("words", "exit_code", "code", "flag"),
    [
        (("size", "--model", "gpt2"), 2, "E_MISSING", "--tokens"),
        (("size", "--model", "gpt2", "--tokens", "1B", "--hardware", "cpu:2"), 2, "E_CONFLICT", "--hardware"),
        (("size", "--model", "gpt2", "--max", "seq-len", "--deadline", "3d"), 2, "E_CONFLICT", "--deadline"),
        (("size", "--model", "gpt2", "--max", "seq-len", "--gpu", "h100,h200"), 2, "E_CONFLICT", "--gpu"),
        (("size", "--model", "gpt2", "--max", "model-size"), 2, "E_CONFLICT", "--max"),
        (("size", "--model", "gpt2", "--max", "seq-len", "--seq-len", "1024"), 2, "E_CONFLICT", "--max"),
        (("size", "--model", "gpt2", "--max", "layers"), 2, "E_CHOICE", "--max"),
        (("size", "--model", "405B", "--gpu", "rtx-4090", "--gpus-per-node", "1", "--max", "seq-len"), 3, "E_NO_PLAN", "--max"),
        ((*WORDS, "--deadline", "30"), 2, "E_UNIT", "--deadline"),
        ((*WORDS, "--deadline", "soon"), 2, "E_PARSE", "--deadline"),
        ((*WORDS, "--gpu", "h100,h1000-sxm-9"), 2, "E_UNKNOWN_GPU", "--gpu"),
        ((*WORDS, "--gpu", "h100-sxm,h100-sxm-80gb"), 2, "E_CONFLICT", "--gpu"),
        ((*WORDS, "--gpu", "h100,h200,b200", "--price-per-gpu-hour", "1,2"), 2, "E_CONFLICT", "--price-per-gpu-hour"),
        ((*WORDS, "--price-per-gpu-hour", "cheap"), 2, "E_PARSE", "--price-per-gpu-hour"),
        ((*WORDS, "--deadline", "1h"), 3, "E_NO_PLAN", "--deadline"),
        (("size", "--model", "llama-3.1-405b", "--tokens", "1B", "--gpu", "rtx-4090", "--gpus-per-node", "1", "--nodes", "1"), 3, "E_NO_PLAN", "--gpu"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals(words: tuple[str, ...], exit_code: int, code: str, flag: str) -> None:
    """What is missing, misread, in conflict or impossible ends with its code, its flag and a hint."""
    ran = call(*words, "--json")
    assert (ran.code, ran.error["code"], ran.error["flag"]) == (exit_code, code, flag)
    assert ran.error["hint"]


def test_a_deadline_that_nothing_meets_is_answered_with_the_fastest_that_was_seen() -> None:
    """Where no size could be in time by the bound alone, the largest machines are searched, and the refusal says how long they take:
    as long as without a deadline."""
    question = ("size", "--model", "gpt2", "--tokens", "100B", "--gpu", "l4", "--nodes", "2")
    refused = call(*question, "--deadline", "1min")
    assert refused.code == 3
    without = call(*question, "--json").document
    largest_of_all = max(without["looked_at"], key=lambda machines: machines["gpus"])
    told = " ".join(refused.err.split())
    assert f"{format_duration(largest_of_all['run_seconds'])} on {largest_of_all['gpus']} x l4" in told


@pytest.mark.parametrize("deadline", ["1min", "6d"])
def test_a_deadline_that_would_do_is_named(deadline: str) -> None:
    """The refusal names a deadline that is met when it is given, and that is no more than a tenth beyond the run."""
    question = ("size", "--model", "gpt2", "--tokens", "100B", "--gpu", "l4", "--nodes", "2", "--json")
    refused = call(*question, "--deadline", deadline)
    assert refused.code == 3
    named = re.search(r"--deadline (\w+) would do", refused.error["hint"])
    assert named is not None
    done = call(*question, "--deadline", named[1])
    assert done.code == 0
    assert done.document["deadline_s"] < 1.12 * done.document["fastest"]["run_seconds"]


@given(seconds=st.floats(1e-3, LONGEST - DAY))
def test_a_duration_as_a_flag_is_long_enough_and_read(seconds: float) -> None:
    """What is printed is read as no less, and as little more."""
    said = parse_duration(as_flag(seconds), "--deadline")
    assert seconds <= said <= max(seconds + 1, 1.12 * seconds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("plan", ("--model-size", "1.3B", "--gpu", "b200", "--nodes", "2")),
        ("predict", ("--model-size", "1.3B", "--strategy", "dp=8")),
        ("sweep", ("--model-size", "1.3B", "--nodes", "1")),
        ("size", ("--model-size", "1.3B", "--tokens", "1B", "--nodes", "1")),
        ("size", ("--model", "llama-3.2-1b", "--gpu", "b200", "--max", "micro-batch", "--nodes", "2")),
    ],
)
def test_what_was_assumed_can_be_set_by_a_flag_that_is_there(module: str, words: tuple[str, ...]) -> None:
    """Every flag that an answer names beside an assumption is one that its command has, or that `plan` has where it says so."""
    known = {name: {flag.name for flag in command_of(name).flags} for name in (module, "plan")}
    assumed = call(module, *words, "--json").document["assumptions"]
    assert assumed
    for said in assumed:
        owner = "plan" if said["flag"].startswith("plan ") else module
        assert set(re.findall("--[a-z-]+", said["flag"])) <= known[owner], said
    if module in ("size", "sweep"):
        assert call(module, *words, "--intra-bw", "100GB/s", "--uncalibrated", "--json").code == 0


def command_of(name: str) -> Command:
    """A command as its module describes it."""
    return cast("Command", import_module(f"strategist.cli.{name}_command").COMMAND)


def test_the_report_shows_what_the_document_holds() -> None:
    """With --verbose every size that was looked at has a line, and the assumptions stand in front of the answers."""
    document = call(*WORDS, "--gpu", "h100", "--json").document
    text = call(*WORDS, "--gpu", "h100", "--verbose").out
    listed = text[text.index("looked at") :]
    for machines in document["looked_at"]:
        assert re.search(
            rf"^ *{machines['gpus']:,} .*\b{format_duration(machines['run_seconds'])} ", listed, re.MULTILINE
        )
    assert text.index("assumed A1") < text.index("least") < text.index("fastest") < text.index("looked at")


@pytest.mark.slow
def test_sizes_that_end_no_earlier_than_fewer_devices_are_counted_and_not_listed() -> None:
    """The short report has a line for each kind's devices that fewer of them do not outrun, and says how many it leaves out."""
    words = (
        "size",
        "--model",
        "gpt2",
        "--tokens",
        "10B",
        "--deadline",
        "3h",
        "--global-batch",
        "64",
        "--gpu",
        "h100,a100-sxm-80gb",
        "--nodes",
        "7",
    )
    looked_at = call(*words, "--json").document["looked_at"]
    outrun = [
        one for one in looked_at
        if any(m["gpu"] == one["gpu"] and m["gpus"] < one["gpus"] and m["run_seconds"] <= one["run_seconds"] for m in looked_at)
    ]  # fmt: skip
    assert 0 < len(outrun) < len(looked_at)
    text = call(*words).out
    listed = re.findall(r"^ *([\d,]+)  (\S+) ", text[text.index("looked at") :], re.MULTILINE)
    assert {(int(gpus.replace(",", "")), gpu) for gpus, gpu in listed} == {
        (m["gpus"], m["gpu"]) for m in looked_at if m not in outrun
    }
    assert f"and {len(outrun)} size" in text


LARGEST: dict[str, dict[str, Any]] = {
    "seq-len": {"model": "llama-3.2-1b", "gpu": "h100-sxm", "gpus_per_node": 1, "nodes": 1, "global_batch": 2, "forbid": "offload"},
    "model-size": {"gpu": "h100-sxm", "gpus_per_node": 1, "nodes": 1, "seq_len": 1024, "global_batch": 2, "forbid": "offload"},
    "micro-batch": {"model": "llama-3.2-1b", "gpu": "h100-sxm", "gpus_per_node": 1, "nodes": 1, "global_batch": 96, "forbid": "recompute,offload"},
}  # fmt: skip


def fits(what: str, value: int) -> bool:
    """Whether `plan` finds a layout at a value."""
    said = {"seq-len": "seq_len", "model-size": "model_size", "micro-batch": "micro_batch"}
    told: dict[str, Any] = {said[what]: str(value) if what == "model-size" else value}
    try:
        recommend_from(LARGEST[what] | told)
    except NoPlanError:
        return False
    return True


def recommend_from(question: dict[str, Any]) -> None:
    """Plan a question of the command line."""
    ran = call("plan", *_said(question), "--json", "--policy", "fastest")
    if ran.code == 3:
        raise NoPlanError(ran.error["message"])
    assert ran.code == 0, ran.out


@pytest.mark.slow
@pytest.mark.parametrize("what", LARGEST)
def test_the_largest_fits_and_the_next_does_not(what: Any) -> None:
    """`plan` finds a layout at the value that is named, and none at the one that is said to be too large."""
    found = largest_that_fits(Given(**LARGEST[what]), what)
    assert found.too_large is not None
    assert found.too_large > found.value
    assert fits(what, found.value)
    assert not fits(what, found.too_large)
    assert found.peak_bytes <= found.usable_bytes


@pytest.mark.slow
def test_real_models_further_up_are_tried() -> None:
    """35B stands for a shape with a vocabulary eight times that of LLaMA 65B, which fits: the answer is the last for which there is a plan, and
    for the next there is none."""
    question = {"gpu": "rtx-4090", "gpus_per_node": 3, "nodes": 1, "method": "qlora", "global_batch": 258}
    found = largest_that_fits(Given(**question), "model-size")
    assert found.value >= 65 * 10**9
    for size, code in ((35 * 10**9, 3), (found.value, 0), (found.too_large, 3)):
        assert call("plan", *_said(question | {"model_size": size})).code == code


def test_models_beyond_the_first_that_does_not_fit() -> None:
    """Shapes are those of real models: 9.8B and 9.9B do not fit where 13B does, and the largest is that, with a next that does not fit."""
    question: dict[str, Any] = {"hardware": "ws-2x-4090", "method": "lora"}
    found = largest_that_fits(Given(**question), "model-size")
    assert found.value > 9_800_000_000
    assert found.too_large is not None
    for size, code in ((found.value, 0), (found.too_large, 3), (9_800_000_000, 3)):
        words = _said(question | {"model_size": size, "global_batch": 256})
        assert call("plan", *words, "--policy", "fastest").code == code, size


@pytest.mark.slow
def test_more_memory_takes_longer_sequences() -> None:
    """On the same device with more memory the longest sequence is longer, and on eight devices longer than on one."""

    def longest(**machines: Any) -> int:
        given_ = Given(model="llama-3.2-1b", global_batch=8, forbid="offload", **machines)
        return largest_that_fits(given_, "seq-len").value

    small, large, many = longest(gpu="h100-sxm", gpus_per_node=1), longest(gpu="h200-sxm", gpus_per_node=1), longest(gpu="h100-sxm", gpus_per_node=8)  # fmt: skip
    assert small < large < many


@pytest.mark.parametrize(("model", "positions"), [("gpt2", 1024), ("opt-125m", 2048), ("bert-base-uncased", 512)])
def test_sequences_end_with_the_learned_positions(model: str, positions: int) -> None:
    """Where memory would take longer ones, the longest sequence is that of the model's table, which the report names as the reason; OPT's
    table has two rows more, which are for no token."""
    question = {"model": model, "gpu": "h100-sxm", "gpus_per_node": 1, "nodes": 1, "global_batch": 1}
    found = largest_that_fits(Given(**question), "seq-len")
    assert (found.value, found.too_large, found.positions) == (positions, None, positions)
    assert found.peak_bytes < found.usable_bytes / 2
    assert "no more positions" in call("size", *_said(question), "--max", "seq-len").out
    beyond = call("plan", *_said(question | {"seq_len": positions + 1}), "--json")
    assert (beyond.code, beyond.error["code"], beyond.error["flag"]) == (3, "E_FRAMEWORK_LEGALITY", "--seq-len")


def test_sequences_beyond_the_rotary_positions_are_advised_against() -> None:
    """A rotary model takes sequences beyond its positions, and plan and size say that it was not made for them; a model that only has a
    size was made for no length."""
    question = {"model": "tinyllama-1.1b", "gpu": "h100-sxm", "gpus_per_node": 1, "nodes": 1, "global_batch": 2}
    found = largest_that_fits(Given(**question), "seq-len")
    assert found.positions == load_model("tinyllama-1.1b").max_seq < found.value
    assert f"made for {found.positions:,} positions" in " ".join(
        call("size", *_said(question), "--max", "seq-len").out.split()
    )
    for longer in (0, 1024):
        ran = call("plan", *_said(question | {"seq_len": found.positions + longer}), "--json")
        assert ("W_LONG_SEQUENCE" in [hint["code"] for hint in ran.document["hints"]]) == (longer > 0)


@pytest.mark.parametrize(("size", "model", "positions"), [("124M", "gpt2", 1024), ("1.1B", "", 8192)])
def test_a_size_has_as_many_positions_as_sequences_need(size: str, model: str, positions: int) -> None:
    """Nobody who says a size says how many positions the model has: a table of learned ones grows with the sequences, rotary angles weigh
    nothing, and neither is refused or advised against. The model of that name keeps its own."""
    machine_ = {"gpu": "h100-sxm", "gpus_per_node": 1, "nodes": 1, "global_batch": 2}
    short, long = (
        call("plan", *_said(machine_ | {"model_size": size, "seq_len": tokens}), "--json").document
        for tokens in (positions, 2 * positions)
    )
    assert "W_LONG_SEQUENCE" not in [hint["code"] for hint in long["hints"]]
    rows = [document["model"]["pos_rows"] for document in (short, long)]
    assert rows == ([positions, 2 * positions] if model else [0, 0])
    found = largest_that_fits(Given(**machine_, model_size=size), "seq-len")
    assert found.value > 2 * positions
    assert found.positions is None
    if model:
        assert call("plan", *_said(machine_ | {"model": model, "seq_len": 2 * positions}), "--json").code == 3


def _said(question: dict[str, Any]) -> tuple[str, ...]:
    """A question as flags."""
    return tuple(word for key, value in question.items() for word in (f"--{key.replace('_', '-')}", str(value)))


@given(st.integers(1, 200), st.integers(0, 200))
def test_halving_finds_the_last_that_fits(length: int, fitting: int) -> None:
    """Whatever the ladder's length and wherever it ends to fit, the halving ends there, after few questions."""
    asked: list[int] = []

    def search_for(value: int) -> int | None:
        asked.append(value)
        return value if value < fitting else None

    place, best = halved(range(length), search_for)
    last = min(length, fitting) - 1
    assert (place, best) == (last, last if last >= 0 else None)
    assert len(asked) <= 2 * length.bit_length() + 1


@pytest.mark.parametrize(
    "words",
    [
        ("size", "--model", "gpt2", "--tokens", "1B", "--deadline", "30d", "--gpu", "t4", "--precision", "bf16"),
        (
            "size",
            "--model",
            "gpt2",
            "--gpu",
            "v100-sxm2-32gb",
            "--gpus-per-node",
            "2",
            "--max",
            "micro-batch",
            "--precision",
            "bf16",
        ),
        ("sweep", "--model-size", "1B", "--nodes", "1", "--gpu", "a100-sxm-80gb,t4", "--precision", "bf16"),
        ("plan", "--model", "gpt2", "--gpu", "t4", "--gpus-per-node", "8", "--allow-idle", "--precision", "bf16"),
    ],
    ids=["size", "max", "sweep", "plan"],
)
def test_devices_without_the_number_format_are_named(words: tuple[str, ...]) -> None:
    """Every command that asks for machines says that a device does not multiply in the format, and which it has; none divides by its rate."""
    refused = call(*words)
    assert refused.code == 3
    assert "E_HARDWARE_FEATURE" in refused.err
    assert "fp16" in refused.err


@pytest.mark.parametrize(("gpus", "batch"), [(3, 960), (5, 960), (6, 960), (7, 896), (8, 1024), (1, 1024)])
def test_nodes_of_any_number_of_devices_divide_the_assumed_batch(gpus: int, batch: int) -> None:
    """4.2 M tokens are 1,024 sequences, which no three, five or seven replicas share: there it is the number nearest to it that up to 64 such
    nodes divide."""
    given_ = Given(model="llama-3.2-1b", seq_len=4096, tokens=10**9, gpus_per_node=gpus, nodes=4)
    found = sized(Wanted(given=given_, gpus=("rtx-4090",), deadline_s=90 * 86400.0))
    assert found.workload.global_batch == batch
    assert batch % gpus == 0


def test_a_batch_that_no_machines_divide_is_blamed_and_not_their_memory() -> None:
    """1,000 sequences under adapters, which are cut no other way, on three devices and on six."""
    words = {"model": "llama-3.2-1b", "method": "lora", "global_batch": 1000, "tokens": "1B", "deadline": "90d", "gpu": "rtx-4090", "gpus_per_node": 3, "nodes": 2}  # fmt: skip
    refused = call("size", *_said(words), "--json")
    assert (refused.code, refused.error["code"]) == (3, "E_BATCH_SPLIT")
