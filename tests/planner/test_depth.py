"""Recompute of other layers on each stage: as many as somebody says, or the fewest with which each stage fits."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from strategist import Plan, predict, recommend
from strategist.document.write import as_document
from strategist.emitters import find_emitter
from strategist.errors import ImpossibleError, InputError
from strategist.facts.job import Job
from strategist.facts.models import load_model
from strategist.facts.profile import find_profile
from strategist.facts.workload import Workload
from strategist.memory.estimate import device_bytes_CS
from strategist.planner.check import faults
from strategist.planner.depth import fewest_layers_CS
from strategist.planner.exhaustive import recheck
from strategist.planner.predict import filled, layout_of, predict_plan
from strategist.planner.situation import one
from strategist.records import replace
from strategist.reports.brief import option_words
from strategist.space.candidates import Candidates, joined
from strategist.space.grammar import parse_pins
from tests.strategies import machine

NODE: dict[str, Any] = {"seq_len": 4096, "global_batch": 64}
TIGHT = "pp=4,tp=2,zero=1,micro_batch=1,sequence_parallel=1"


def on_a100(recompute: str, layout: str = TIGHT, **more: Any) -> Any:
    """Llama-2 13B on eight A100 of 40 GB."""
    return predict("llama-2-13b", "aws-p4d.24xlarge", strategy=f"{layout},recompute={recompute}", **NODE | more)


@pytest.mark.slow
def test_each_stage_with_its_own_number_beats_one_number_for_all() -> None:
    """Where nothing computed again does not fit, every stage computes what it needs and no more: faster than all layers, and than the
    fewest layers that fit on every stage alike."""
    assert not on_a100("none").fits
    own, full = on_a100("by-stage"), on_a100("full")
    assert own.fits and full.fits
    numbers = own.strategy.recompute_stages
    assert list(numbers) == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[-1]
    alike = next(found for number in range(1, 10) if (found := on_a100(str(number))).fits)
    assert own.time.step_ns < alike.time.step_ns < full.time.step_ns
    for stage, number in enumerate(numbers):
        if number:
            fewer = "/".join(str(each - (place == stage)) for place, each in enumerate(numbers))
            assert not on_a100(fewer).fits


def small_job(layers: int, global_batch: int, **more: Any) -> Job:
    """A few layers of Llama-2 7B on four devices of 24 GB."""
    shape = replace(load_model("llama-2-7b"), layers=layers, parameters_stated=None)
    work = Workload(seq_len=4096, global_batch=global_batch, precision="bf16")
    return Job(cluster=machine("ws-4x-4090"), model=shape, workload=work, profile=find_profile(), **more)


@pytest.mark.slow
def test_no_other_numbers_that_fit_are_faster() -> None:
    """Of all numbers of layers of four stages of two each those that the rule finds make the shortest step that fits."""
    from strategist.planner.predict import predict as predict_pins

    job = small_job(8, 16, headroom=0.42)
    said = "pp=4,micro_batch=1"
    own = predict_pins(job, parse_pins(f"{said},recompute=by-stage"))
    others = [
        predict_pins(job, parse_pins(f"{said},recompute={'/'.join(map(str, numbers))}"))
        for numbers in product(range(3), repeat=4)
    ]
    fitting = [other for other in others if other.fits]
    assert 0 < len(fitting) < len(others)
    assert own.fits and len(set(own.strategy.recompute_stages)) > 1
    assert own.time.step_ns == min(other.time.step_ns for other in fitting)


LAYOUTS = (
    "pp=4,micro_batch=1",
    "pp=2,dp_shard=2,zero=3,micro_batch=1",
    "pp=2,vp=2,tp=2,sequence_parallel=1,micro_batch=2",
    "pp=4,schedule=gpipe,micro_batch=1",
    "pp=2,tp=2,micro_batch=1,stage_split=weighted",
)


def layout_of_words(job: Job, words: str, **more: int) -> Candidates:
    """One layout in the columns of the search."""
    return one(**filled(job, {pin.key: pin.value for pin in parse_pins(words)}) | more)


@pytest.mark.parametrize("words", LAYOUTS)
def test_a_stage_holds_the_same_whatever_the_others_run_again(words: str) -> None:
    """So the rule may ask about all stages at once: a stage holds what it holds where all have its number."""
    job = small_job(16, 16)
    pp = parse_pins(words)[0].value
    alike = [device_bytes_CS(job, layout_of_words(job, f"{words},recompute={n}"), pp)[0] for n in range(1, 5)]
    for numbers in ((1, 2, 3, 4), (4, 3, 2, 1), (2, 2, 4, 1)):
        text = "/".join(map(str, numbers[:pp]))
        held = device_bytes_CS(job, layout_of_words(job, f"{words},recompute={text}"), pp)[0]
        assert held == pytest.approx([alike[number - 1][stage] for stage, number in enumerate(numbers[:pp])], abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("words", LAYOUTS)
def test_none_of_every_stage_is_none_and_all_are_all(words: str) -> None:
    """With 0 on every stage a layout holds and takes what it does without recomputation, with an equal number what it does with one for
    all, and with all layers of every stage what full recompute does."""
    plain = predict("llama-2-7b", "ws-4x-4090", strategy=words, seq_len=2048, global_batch=16)
    own = [max(end - first for first, end in stage.layers) for stage in plain.strategy.stages]
    for numbers, word in (([0] * len(own), "none"), ([3] * len(own), "3"), (own, "full")):
        said, alike = (
            predict("llama-2-7b", "ws-4x-4090", strategy=f"{words},recompute={text}", seq_len=2048, global_batch=16)
            for text in ("/".join(map(str, numbers)), word)
        )
        assert (said.memory, said.time) == (alike.memory, alike.time)
        assert said.legal


def test_the_rule_is_the_same_for_many_layouts_and_for_each() -> None:
    """Layouts of different numbers of stages are numbered together as alone."""
    job = small_job(16, 16)
    rows = [layout_of_words(job, f"{words},recompute=by-stage") for words in (LAYOUTS[0], LAYOUTS[1], LAYOUTS[3])]
    together = fewest_layers_CS(job, joined(rows))
    for row, numbers in zip(rows, together, strict=True):
        alone = fewest_layers_CS(job, row)[0]
        assert numbers.tolist() == [*alone.tolist(), *[0] * (len(numbers) - len(alone))]


def test_less_room_means_no_fewer_layers() -> None:
    """The less of the devices may be used the more layers of every stage run again."""
    words = "pp=4,micro_batch=1,recompute=by-stage"
    numbers = [
        fewest_layers_CS(small_job(12, 16, headroom=room), layout_of_words(small_job(12, 16), words))[0]
        for room in (0.0, 0.2, 0.4)
    ]
    assert all(np.all(less <= more) for less, more in pairwise(numbers))
    assert numbers[0].tolist() != numbers[-1].tolist()


def test_numbers_by_stage_stand_in_the_plan_of_those_who_ask() -> None:
    """Asked for they stand in the plan, its layout and its explanation, and price the same again; unasked the plan has no word of them."""
    assert "recompute_stages" not in as_document(recommend("llama-2-7b", "dgx-h100", **NODE))["strategy"]
    plan = recommend("llama-2-13b", "aws-p4d.24xlarge", pin="pp=4,tp=2,recompute=by-stage", **NODE)
    numbers = "/".join(map(str, plan.strategy.recompute_stages))
    assert plan.strategy.recompute == "full"
    assert len(plan.strategy.recompute_stages) == 4
    assert f"recompute={numbers}" in layout_of(plan)
    assert f"recompute of {numbers} layers of a stage" in option_words(plan)
    again = predict_plan(plan)
    assert (again.memory.worst, again.time.step_ns) == (plan.memory.worst, plan.time.step_ns)
    said = recommend("llama-2-13b", "aws-p4d.24xlarge", pin=f"pp=4,tp=2,recompute={numbers}", **NODE)
    assert said.time.step_ns <= plan.time.step_ns


@pytest.mark.slow
def test_a_search_asked_to_look_at_them_finds_no_worse() -> None:
    """With numbers by stage, and of layers for all, among the layouts the best is no slower; of 13B in pipelines alone it is faster."""
    pipelines: dict[str, Any] = NODE | {"policy": "fastest", "forbid": "zero,cp"}
    steps = [
        recommend("llama-2-13b", "aws-p4d.24xlarge", **pipelines, **also).time.step_ns
        for also in (
            {},
            {"also": "recompute_layers"},
            {"also": "recompute_by_stage"},
            {"also": "recompute_layers,recompute_by_stage"},
        )
    ]
    assert steps[0] >= steps[1] >= steps[3]
    assert steps[0] > steps[2] >= steps[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"pin": "tp=1,cp=1,recompute=by-stage", "forbid": "zero"},
        pytest.param({"also": "recompute_by_stage", "forbid": "tp,cp"}, marks=pytest.mark.nightly),
        {"also": "recompute_layers", "forbid": "tp,cp,pp"},
        {"pin": "tp=1,cp=1,recompute=by-stage,stage_split=balanced", "forbid": "zero"},
        pytest.param({"also": "balanced_stages", "forbid": "tp,cp"}, marks=pytest.mark.nightly),
        pytest.param(
            {"also": "recompute_by_stage,balanced_stages,recompute_layers", "forbid": "tp,cp"},
            marks=pytest.mark.nightly,
        ),
        {"pin": "pp=2,stage_split=7/9,recompute=7/6", "forbid": "tp,cp"},
    ],
)
def test_every_layout_with_numbers_of_stages_is_found_and_tried(more: dict[str, str]) -> None:
    """The layouts one at a time are those of the search, and none of them is better than the chosen one."""
    plan: Plan = recommend("llama-3.2-1b", "ws-4x-4090", seq_len=4096, global_batch=8, certificate=True, **more)
    again = recheck(plan)
    assert plan.certificate is not None
    assert (again.enumerated, again.holds) == (plan.certificate.enumerated, True)


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        (f"{TIGHT},recompute=14/1/1/1", "LEG746"),
        ("pp=4,tp=2,vp=2,recompute=7/0/0/0", "LEG746"),
        (f"{TIGHT},recompute=1/1/0/0,recompute_layers=2", "LEG747"),
        (f"{TIGHT},recompute=by-stage,recompute_every=2", "LEG747"),
        (f"{TIGHT},schedule=zb_h1,recompute=1/1/0/0", "LEG"),
    ],
)
def test_numbers_that_mean_nothing_are_faults(layout: str, rule: str) -> None:
    """More layers than a chunk has, another number beside, and schedules that run nothing again."""
    found = predict("llama-2-13b", "aws-p4d.24xlarge", strategy=layout, **NODE)
    assert any(violation.rule.startswith(rule) for violation in found.violations)


def test_numbers_are_those_of_all_stages() -> None:
    """As many as there are stages, of full recompute, in a pipeline; what is no number is refused."""
    for layout in (
        "pp=4,tp=2,recompute=2/1/0",
        "pp=2,tp=4,recompute=2/1/0",
        "tp=8,recompute=by-stage",
        "tp=8,recompute=1/0",
    ):
        with pytest.raises(ImpossibleError, match="numbers of layers by stage"):
            predict("llama-2-13b", "aws-p4d.24xlarge", strategy=layout, **NODE)
    with pytest.raises(ImpossibleError, match="full recompute"):
        predict(
            "llama-2-13b", "aws-p4d.24xlarge", strategy="pp=2,tp=4,recompute=selective,recompute_depth=by-stage", **NODE
        )
    for text in ("recompute=2/", "recompute=2/-1", "recompute=/", "recompute=2/x"):
        with pytest.raises(InputError):
            parse_pins(text)
    with pytest.raises(InputError, match="recompute twice"):
        parse_pins("recompute=2/1,recompute=full")
    with pytest.raises(InputError, match="not a choice"):
        parse_pins("recompute_stage_12345=1")
    with pytest.raises(InputError, match="contradict"):
        recommend("llama-2-7b", "dgx-h100", also="recompute_by_stage", pin="recompute=full", **NODE)
    with pytest.raises(InputError, match="contradict"):
        recommend("llama-2-7b", "dgx-h100", also="recompute_layers", forbid="recompute", **NODE)


def planned() -> Plan:
    """A plan with a number for each of two stages."""
    return recommend("llama-2-7b", "dgx-h100", pin="pp=2,dp_shard=4,recompute=3/1", **NODE)


def test_a_plan_with_too_few_numbers_is_not_sound() -> None:
    """A number is missing, or one too many: said before anything runs; too large ones are what the executor lacks."""
    plan = planned()
    for numbers in ((3,), (3, 1, 1)):
        broken = replace(plan, strategy=replace(plan.strategy, recompute_stages=numbers))
        assert any("recompute_stages" in fault for fault in faults(broken))
    assert not faults(plan)


@pytest.mark.slow
def test_our_launchers_say_it_and_others_say_why_not() -> None:
    """torchrun's files run the plan; Megatron-LM's block method counts as many layers on every stage."""
    plan = planned()
    assert not list(find_emitter("torchrun").obstacles(plan))
    for target, word in (
        ("megatron", "on every stage"),
        ("torchtitan", "all layers or none"),
        ("deepspeed", "all layers or none"),
    ):
        assert any("recompute_stages" in said and word in said for said in find_emitter(target).obstacles(plan))
    with pytest.raises(ImpossibleError):
        recommend("llama-2-7b", "dgx-h100", pin="pp=2,recompute=by-stage", frontend="megatron", **NODE)
