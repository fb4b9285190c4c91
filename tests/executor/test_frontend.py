"""`--frontend strategist` and the executor draw one border: the rules forbid what the executor refuses, and nothing else.

The rules are data that the search applies to columns, the executor judges a finished Plan: two accounts of one thing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import strategies as st

from strategist import load_cluster, load_model, recommend
from strategist.catalog import rows
from strategist.errors import ImpossibleError, NoPlanError, StrategistError
from strategist.executor.support import ASKED, layout_obstacles, obstacles, unsupported
from strategist.facts.job import Job
from strategist.facts.model import ModelShape
from strategist.facts.profile import find_profile
from strategist.facts.workload import Optimizer, Precision, Workload
from strategist.planner.search import Question, search
from strategist.planner.situation import one, question
from strategist.rulebook.apply import columns, fired
from strategist.rulebook.rule import Rule, load_rules
from strategist.rulebook.vocabulary import WORDS
from strategist.space.candidates import Candidates
from tests.executor.matrix import written
from tests.oracle.legality import is_buildable
from tests.planner.properties import Properties
from tests.plans import make_plan
from tests.strategies import (
    Draw,
    candidates,
    catalogued_shapes,
    dense_shapes,
    layouts,
    moe_shapes,
    questions,
    shapes,
    sliding_shapes,
)

PROPERTIES = Properties()

OURS = tuple(rule for rule in load_rules("legality") if "'strategist'" in rule.when_text)
OF_LAYOUTS = {
    "LEG619": "strategy.context_parallel", "LEG620": "strategy.context_parallel", "LEG612": "mesh.e", "LEG613": "strategy.tiling", "LEG614": "strategy.offload",
    "LEG615": "strategy.offload", "LEG617": "model.moe.shared_ffn", "LEG618": "mesh.tp",
}  # fmt: skip
"""Rule -> how the place begins where the executor finds what the rule forbids."""


def judges_layouts(rule: Rule) -> bool:
    """True for rules about a candidate, false for those about the question itself."""
    return any(WORDS[word].scope == "candidate" for word in rule.words)


@st.composite
def executable_jobs(draw: Draw) -> Job:
    """Small questions that some layout of our executor could answer."""
    job = draw(questions())
    shape = draw(st.one_of(dense_shapes(), sliding_shapes(), moe_shapes()).filter(is_buildable))
    work = replace(job.workload, precision=draw(st.sampled_from(("bf16", "fp32"))), optimizer="adamw")
    return replace(job, model=shape, workload=work, frontend="strategist")


def refusing(job: Job, layout: Candidates) -> list[str]:
    """The rules of ours about layouts that forbid the first row of some columns."""
    values = question(job) | {name: np.atleast_1d(column)[:1] for name, column in columns(layout).items()}
    return [rule.id for rule in OURS if judges_layouts(rule) and bool(rule.holds(values).all())]


@PROPERTIES.holds(60, st.data())
def test_rules_and_executor_refuse_the_same_layouts(data: Draw) -> None:
    """A layout that is legal everywhere is forbidden for our frontend exactly when the executor meets an obstacle in its
    Plan, and each rule that forbids it has an obstacle at its own place."""
    job = data.draw(executable_jobs())
    layout = candidates([data.draw(layouts(job))])
    found = layout_obstacles(written(job, layout.row(0)))
    rules = refusing(job, layout)
    assert bool(rules) == bool(found), (rules, found)
    assert all(any(o.place.startswith(OF_LAYOUTS[rule]) for o in found) for rule in rules)


@PROPERTIES.holds(12, executable_jobs())
def test_every_layout_of_a_search_can_run(job: Job) -> None:
    """No layout that a search for our frontend keeps, fitting or not, meets an obstacle in the executor."""
    legal = search(Question(job=job)).legal
    some = range(0, len(legal), max(1, len(legal) // 50))
    assert [found for i in some if (found := layout_obstacles(written(job, legal.row(i))))] == []


@PROPERTIES.holds(15, st.data())
def test_a_plan_for_our_frontend_can_run(data: Draw) -> None:
    """Whatever the model, the machines and the policy: a plan that is written has no obstacle, or none is written and
    the error names a rule of the question or says that nothing fits or that nodes do not reach each other."""
    job = data.draw(questions())
    shape = data.draw(st.one_of(dense_shapes(), shapes(), catalogued_shapes()))
    work: dict[str, Any] = {"seq_len": job.workload.seq_len, "global_batch": job.workload.global_batch}
    kinds: dict[str, Any] = {"precision": job.workload.precision, "optimizer": job.workload.optimizer}
    policy: Any = data.draw(st.sampled_from(("hf", "fastest")))
    try:
        plan = recommend(shape, job.cluster, policy=policy, frontend="strategist", **work, **kinds)
    except ImpossibleError as refused:
        assert refused.code in ("UNSUPPORTED", "NO_PLAN", "NO_PATH")
        return
    assert unsupported(plan) == ()
    assert [hint for hint in plan.hints if hint.code == "W_NOT_EXECUTABLE"] == []


@pytest.mark.parametrize("devices", [3, 8])
def test_what_no_layout_gets_round_is_said_before_what_many_break(devices: int) -> None:
    """Experts in fp8 are refused as such, although more layouts fail at numbers that do not divide."""
    machine = {"gpu": "h100-sxm-80gb", "gpus_per_node": devices, "nodes": 1}
    asked: dict[str, Any] = {"precision": "fp8", "seq_len": 4096, "global_batch": 3}
    with pytest.raises(ImpossibleError, match="experts") as refused:
        recommend("mixtral-8x7b", machine, frontend="strategist", **asked)
    assert (refused.value.code, refused.value.flag) == ("UNSUPPORTED", "--precision")


@pytest.mark.parametrize("name", [row["name"] for row in rows("models") if row["kind"] not in ("cnn", "unet")])
def test_models_are_refused_as_the_executor_refuses_them(name: str) -> None:
    """A model of the catalogue is forbidden for our frontend exactly when the built-in model cannot be it."""
    job = executable("dgx-h100", load_model(name))
    plan = replace(make_plan(), model=job.model, workload=job.workload)
    found = [o for o in obstacles(plan) if o.place in ASKED]
    assert bool(fired(OF_QUESTIONS, question(job))) == bool(found)


OF_QUESTIONS = (
    *(rule for rule in OURS if not judges_layouts(rule)),
    *(rule for rule in load_rules("legality") if "positions" in rule.words),  # a limit of ours as of everybody
)


def executable(machines: str, shape: ModelShape, **work: Any) -> Job:
    """A question for our frontend."""
    workload = Workload(**({"seq_len": 4096, "global_batch": 64} | work))
    cluster = load_cluster(machines)
    return Job(cluster=cluster, model=shape, workload=workload, profile=find_profile(), frontend="strategist")


@pytest.mark.slow
@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_workloads_are_refused_as_the_executor_refuses_them(precision: Any, optimizer: Any) -> None:
    """A precision or optimizer is forbidden for our frontend exactly when the executor lacks it."""
    job = executable("dgx-b200", load_model("llama-3.2-1b"), precision=precision, optimizer=optimizer)
    row = search(Question(job=replace(job, frontend="any"))).legal.row(0)
    found = [o for o in obstacles(written(job, row)) if o.place in ASKED]
    assert bool(fired(OF_QUESTIONS, question(job))) == bool(found)


@pytest.mark.parametrize("tokens", [1023, 1024, 1025, 4096])
def test_a_table_of_positions_counts_beyond_its_rows(tokens: int) -> None:
    """A table of learned positions forbids longer sequences, for rule and executor alike, and a row that is for no token counts for none;
    a window forbids none."""
    gpt2, windowed = load_model("gpt2"), replace(load_model("llama-3.2-1b"), window=1024)
    for shape, limit in ((gpt2, 1024), (replace(gpt2, pos_rows=1026), 1024), (windowed, tokens)):
        job = executable("dgx-h100", shape, seq_len=tokens)
        found = obstacles(replace(make_plan(), model=shape, workload=job.workload))
        assert [rule.id for rule in fired(OF_QUESTIONS, question(job))] == (["LEG014"] if tokens > limit else [])
        assert [o.place for o in found if o.place in ASKED] == (["workload.seq_len"] if tokens > limit else [])


ALONE: dict[str, dict[str, int]] = {
    "LEG619": {"cp": 2, "context_parallel": 1, "zero": 3, "recompute": 1},
    "LEG620": {"cp": 2, "context_parallel": 1, "zero": 3},
    "LEG612": {"tp": 2, "dp_shard": 2, "zero": 1, "ep": 2},
    "LEG613": {"dp_shard": 2, "zero": 3, "tiling": 8, "recompute": 1},
    "LEG614": {"zero": 1, "dp_shard": 2, "offload": 1},
    "LEG615": {"zero": 3, "dp_shard": 2, "tp": 2, "offload": 3},
    "LEG617": {"tp": 2, "etp": 2},
    "LEG618": {"tp": 2, "etp": 2},
}
"""Rule -> the smallest layout that it alone forbids."""


def _model_of(rule: str) -> ModelShape:
    """A model that the rule has something to say about."""
    if rule == "LEG617":
        shape = load_model("qwen1.5-moe-a2.7b")
        assert shape.moe is not None
        return replace(shape, moe=replace(shape.moe, shared_ffn=5633))
    return load_model({"LEG612": "mixtral-8x7b", "LEG618": "olmoe-1b-7b"}.get(rule, "llama-3.2-1b"))


@pytest.mark.parametrize("rule", OF_LAYOUTS)
def test_each_rule_forbids_something_alone(rule: str) -> None:
    """No rule is idle, and none is a second name for another: each has a layout of its own that the executor refuses at
    exactly one place."""
    layout = one(**ALONE[rule])
    precision = "fp32" if rule == "LEG620" else "bf16"
    job = executable("dgx-h100", _model_of(rule), global_batch=int(layout.data_parallel[0]), precision=precision)
    assert refusing(job, layout) == [rule]
    (found,) = layout_obstacles(written(job, layout.row(0)))
    assert found.place.startswith(OF_LAYOUTS[rule])


PINNED = {
    "LEG619": "cp=2,context_parallel=ring,recompute=selective",
    "LEG613": "offload=parameters,tiling=8,recompute=selective",
}


@pytest.mark.parametrize(("rule", "pin"), PINNED.items())
def test_a_pinned_choice_that_cannot_run_is_refused_by_its_rule(rule: str, pin: str) -> None:
    """A pin that our executor lacks ends with UNSUPPORTED, the pin's flag and the rule's name; without the frontend the
    same question has a plan, which says that it cannot be run here and how to get one that can."""
    fields: dict[str, Any] = {"pin": pin, "seq_len": 4096, "global_batch": 64}
    with pytest.raises(StrategistError) as refused:
        recommend("llama-3.1-8b", "dgx-h100", frontend="strategist", **fields)
    assert (refused.value.code, refused.value.flag) == ("UNSUPPORTED", "--pin")
    assert rule in (refused.value.hint or "")
    hints = [
        hint.sentence
        for hint in recommend("llama-3.1-8b", "dgx-h100", **fields).hints
        if hint.code == "W_NOT_EXECUTABLE"
    ]
    assert len(hints) == 1
    assert "--frontend strategist" in hints[0]


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"precision": "fp8", "model": "mixtral-8x7b"}, "--precision"),
        ({"precision": "fp4", "hardware": "dgx-b200"}, "--precision"),
        ({"model": "bloom-1b1"}, "--model"),
    ],
)
def test_what_no_layout_changes_is_refused_by_its_flag(fields: dict[str, Any], flag: str) -> None:
    """A precision, optimizer or model that our executor lacks is refused before anything is planned; without
    the frontend the plan's warning names the way out and does not send anybody to --frontend."""
    asked = {"model": "llama-3.1-8b", "hardware": "dgx-h100", "seq_len": 4096, "global_batch": 64} | fields
    with pytest.raises(ImpossibleError) as refused:
        recommend(**asked, frontend="strategist")
    assert (refused.value.code, refused.value.flag) == ("UNSUPPORTED", flag)
    (hint,) = [hint for hint in recommend(**asked).hints if hint.code == "W_NOT_EXECUTABLE"]
    assert "--frontend" not in hint.sentence


@pytest.mark.parametrize("frontend", [None, "strategist", "deepspeed"])
def test_a_sequence_beyond_a_table_of_positions_is_refused_whatever_runs_it(frontend: str | None) -> None:
    """No framework looks a token up in a row that a table has not; the refusal names the longest sequence that there is."""
    asked: dict[str, Any] = {"model": "gpt2-xl", "hardware": "dgx-h100", "frontend": frontend, "global_batch": 64}
    with pytest.raises(ImpossibleError, match="1024 learned positions") as refused:
        recommend(**asked, seq_len=4096)
    assert (refused.value.code, refused.value.flag) == ("FRAMEWORK_LEGALITY", "--seq-len")
    assert "--seq-len 1024" in (refused.value.hint or "")
    assert recommend(**asked, seq_len=1024).workload.seq_len == 1024


def test_changes_that_are_offered_stay_inside_the_frontend() -> None:
    """When nothing fits, what is offered was planned for our frontend too: its layout can be pinned and run."""
    with pytest.raises(NoPlanError) as refused:
        recommend("llama-3.1-8b", "ws-2x-4090", frontend="strategist", forbid="offload")
    (offered,) = [fix for fix in refused.value.fixes if fix.startswith("without --forbid")]
    pin = offered.rsplit(" with ", 1)[1].replace(", ", ",")
    assert unsupported(recommend("llama-3.1-8b", "ws-2x-4090", pin=pin)) == ()


@pytest.mark.nightly
@pytest.mark.parametrize("check", PROPERTIES.at_length, ids=lambda check: check.__name__)
def test_at_length(check: Any) -> None:
    """Every property above, over hundreds of new examples."""
    check()
