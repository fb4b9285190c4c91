"""Full recompute of the first layers of every chunk, or of every n-th: a choice that somebody must ask for, between none and all of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from strategist import Plan, predict, recommend
from strategist.errors import ImpossibleError, InputError
from strategist.planner.exhaustive import recheck
from strategist.planner.predict import layout_of, predict_plan
from strategist.reports.brief import option_words
from strategist.space.grammar import parse_pins

JOB: dict[str, Any] = {"seq_len": 4096, "global_batch": 64}
LAYOUTS = (
    "dp_shard=8,zero=3,micro_batch=2",
    "dp_replicate=8,micro_batch=1",
    "pp=4,dp_shard=2,zero=2,micro_batch=2",
    "pp=2,vp=2,dp_replicate=4,micro_batch=1",
    "tp=4,dp_shard=2,sequence_parallel=1,zero=1,micro_batch=4",
)


def predicted(layout: str, recompute: str, **more: Any) -> Any:
    """A prediction for a model of 32 equal layers."""
    return predict("llama-2-7b", "dgx-h100", strategy=f"{layout},recompute={recompute}", **JOB | more)


def chunk_of(layout: str) -> int:
    """Layers of one chunk."""
    degrees = {pin.key: pin.value for pin in parse_pins(layout)}
    return 32 // (degrees.get("pp", 1) * degrees.get("virtual_stages", 1))


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["strategist", "megatron-core"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layer_more_holds_no_more_and_takes_longer(layout: str, framework: str) -> None:
    """From none over each number to all: memory never rises, the step always does, and all layers are full recompute."""
    chunk = chunk_of(layout)
    words = ["none", *map(str, (1, 2, chunk // 2, chunk - 1, chunk))]
    found = [predicted(layout, word, framework=framework) for word in words]
    assert all(less.memory.peak.value <= more.memory.peak.value for more, less in pairwise(found))
    assert all(slower.time.step_ns > faster.time.step_ns for faster, slower in pairwise(found))
    full = predicted(layout, "full", framework=framework)
    assert (found[-1].memory, found[-1].time) == (full.memory, full.time)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["strategist", "megatron-core"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_oftener_a_layer_runs_again_the_less_is_held_and_the_longer_it_takes(layout: str, framework: str) -> None:
    """From none over every eighth layer to every second and all; every n-th takes as long as equally many from the first on."""
    chunk = chunk_of(layout)
    numbers = [number for number in (8, 4, 2) if number <= chunk]
    words = ["none", *(f"every-{number}" for number in numbers), "full"]
    found = [predicted(layout, word, framework=framework) for word in words]
    assert all(less.memory.peak.value <= more.memory.peak.value for more, less in pairwise(found))
    assert all(slower.time.step_ns > faster.time.step_ns for faster, slower in pairwise(found))
    firsts = [predicted(layout, str(chunk // number), framework=framework) for number in numbers]
    assert [one.time for one in firsts] == [one.time for one in found[1:-1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "says", "words"),
    [
        ("5", (5, 0), "recompute of 5 layers"),
        ("every-2", (0, 2), "recompute of one layer in 2"),
    ],
)
def test_some_layers_are_chosen_by_those_alone_who_ask_for_them(word: str, says: tuple[int, int], words: str) -> None:
    """Unasked no plan says a number; asked for, it stands in the plan, its layout and its explanation."""
    unasked = recommend("llama-2-7b", "dgx-h100", **JOB).strategy
    plan = recommend("llama-2-7b", "dgx-h100", pin=f"recompute={word}", **JOB)
    assert (unasked.recompute_layers, unasked.recompute_every) == (0, 0)
    assert (plan.strategy.recompute_layers, plan.strategy.recompute_every) == says
    assert plan.strategy.recompute == "full"
    assert f"recompute={word}" in layout_of(plan)
    assert words in option_words(plan)
    again = predict_plan(plan)
    assert (again.memory.worst, again.time.step_ns) == (plan.memory.worst, plan.time.step_ns)


@pytest.mark.nightly
@pytest.mark.parametrize("word", ["3", "every-2"])
def test_every_layout_with_some_layers_is_found_and_tried(word: str) -> None:
    """The layouts one at a time are those of the search, and none of them is better than the chosen one."""
    plan: Plan = recommend("llama-3.2-1b", "dgx-h100", pin=f"recompute={word}", certificate=True, **JOB)
    again = recheck(plan)
    assert plan.certificate is not None
    assert (again.enumerated, again.holds) == (plan.certificate.enumerated, True)


def test_both_ways_to_say_it_are_one() -> None:
    """A number is full recompute of so many layers; said twice it is refused."""
    assert [(pin.key, pin.word) for pin in parse_pins("recompute=5")] == [
        ("recompute", "full"),
        ("recompute_layers", "5"),
    ]
    assert parse_pins("recompute=full,recompute_layers=5") == parse_pins("recompute=5")
    assert parse_pins("recompute=full,recompute_every=2") == parse_pins("recompute=every-2")
    with pytest.raises(InputError, match="recompute twice"):
        parse_pins("recompute=5,recompute=full")
    with pytest.raises(InputError, match="between 1 and"):
        parse_pins("recompute=0")
    with pytest.raises(InputError, match="between 2 and"):
        parse_pins("recompute=every-1")


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        ("pp=4,dp_shard=2,zero=2,micro_batch=2,recompute=9", "LEG741"),
        ("dp_shard=8,zero=3,micro_batch=2,recompute=33", "LEG741"),
        ("dp_shard=8,zero=3,micro_batch=2,tiling=4,recompute=8", "LEG742"),
        ("pp=4,dp_shard=2,zero=2,micro_batch=2,recompute=every-9", "LEG743"),
        ("dp_shard=8,zero=3,micro_batch=2,tiling=4,recompute=every-2", "LEG744"),
        ("dp_shard=8,zero=3,micro_batch=2,recompute=every-2,recompute_layers=4", "LEG744"),
    ],
)
def test_numbers_that_mean_nothing_are_faults(layout: str, rule: str) -> None:
    """More layers than a chunk has, none of a chunk, and what no formula weighs."""
    found = predict("llama-2-7b", "dgx-h100", strategy=layout, **JOB)
    assert rule in {violation.rule for violation in found.violations}


def test_layers_with_experts_beside_others_are_no_case_of_it() -> None:
    """Every second layer of a model whose first has no experts is refused, of one where all have them it is not."""
    for model, rules in (("deepseek-moe-16b", {"LEG745"}), ("olmoe-1b-7b", set())):
        found = predict(model, "dgx-h100", strategy="dp_shard=8,zero=3,recompute=every-2", **JOB)
        assert {violation.rule for violation in found.violations} == rules


def test_a_number_beside_another_policy_is_refused() -> None:
    """It is full recompute whose layers are counted."""
    with pytest.raises(ImpossibleError, match="full recompute"):
        predict("llama-2-7b", "dgx-h100", strategy="dp_shard=8,recompute=selective,recompute_layers=4", **JOB)
    with pytest.raises(ImpossibleError, match="full recompute"):
        predict("llama-2-7b", "dgx-h100", strategy="dp_shard=8,recompute=selective,recompute_every=4", **JOB)
    for word in ("4", "every-4"):
        with pytest.raises(ImpossibleError):
            recommend("llama-2-7b", "dgx-h100", pin=f"recompute={word}", frontend="deepspeed", **JOB)
