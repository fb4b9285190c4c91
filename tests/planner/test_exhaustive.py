"""Certificates: what a search says it did adds up, is confirmed by trying everything, and a lie is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strategist import Plan, StrategistError, load_plan, recommend
from strategist.ask import Given, complete
from strategist.document.write import digest, dump, seal_state, sealed
from strategist.errors import InputError
from strategist.planner.check import faults
from strategist.planner.exhaustive import recheck
from strategist.planner.search import limits_of
from strategist.records import replace
from strategist.space.brute_force import every_layout
from strategist.space.enumerate import enumerate_candidates
from strategist.space.grammar import parse_forbids, parse_pins
from tests.cli.harness import call, plan_file
from tests.examples import by_night

SPACES: tuple[dict[str, Any], ...] = (
    {"model": "llama-debug", "hardware": "cpu:2"},
    {"model": "llama-2-7b", "hardware": "dgx-h100"},
    {"model": "llama-2-7b", "hardware": "dgx-h100", "global_batch": 12},
    {"model": "llama-3.1-70b", "hardware": "dgx-h100:2", "global_batch": 32},
    {"model": "mixtral-8x7b", "hardware": "dgx-h100:2", "global_batch": 16},
    {"model": "t5-base", "hardware": "ws-2x-4090"},
    {"model": "70B", "hardware": "ws-1x-4090"},
    {"model": "llama-3.1-8b", "hardware": "dgx-h100", "seq_len": 16384},
    {"model": "llama-2-7b", "hardware": "dgx-h100", "pin": "pp=2,schedule=gpipe"},
    {"model": "llama-2-7b", "hardware": "dgx-h100", "pin": "pp=4,dp_replicate=2,schedule=looped_bfs"},
    {"model": "llama-2-7b", "hardware": "dgx-h100", "pin": "pp=4,schedule=zb_h1"},
    {"model": "llama-2-7b", "hardware": "dgx-h100", "pin": "pp=4,schedule=zbv"},
    {"model": "llama-2-7b", "hardware": "dgx-h100", "pin": "pp=2,schedule=dualpipev"},
    {"model": "llama-2-7b", "hardware": "dgx-h100", "pin": "dp=4,sequence_parallel=0,virtual_stages=3"},
    {"model": "llama-2-7b", "hardware": "dgx-h100:2", "pin": "tp=16"},
    {"model": "llama-2-7b", "hardware": "dgx-h100", "pin": "tiling=8"},
    {"model": "llama-2-7b", "hardware": "dgx-h100", "pin": "pp=3"},
    {"model": "olmoe-1b-7b", "hardware": "dgx-h100", "global_batch": 8, "forbid": "ep,interleaved"},
    {"model": "llama-2-7b", "hardware": "dgx-h100", "forbid": "pp,offload,sequence_parallel,hsdp"},
    {"model": "llama-2-7b", "hardware": "dgx-h100", "also": "zb_h1,zbv,dualpipev"},
    {"model": "llama-2-7b", "hardware": "dgx-h100", "seq_len": 16384, "global_batch": 2, "also": "hierarchical"},
    {
        "model": "mixtral-8x7b",
        "hardware": "dgx-h100",
        "pin": "cp=8,context_parallel=hierarchical",
        "forbid": "recompute",
    },
    {"model": "llama-3.1-8b", "hardware": "dgx-h100:2", "seq_len": 16384, "pin": "cp_inner=4", "global_batch": 2},
    {
        "model": "llama-2-7b",
        "hardware": "dgx-h100",
        "global_batch": 12,
        "also": "gpipe,looped_bfs,tiling",
        "forbid": "tp",
    },
)


@pytest.mark.slow
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_brute_force_enumerates_the_same_layouts(space: dict[str, Any]) -> None:
    """Throwing away what means nothing leaves exactly the layouts that are built, each once."""
    limits = limits_of(complete(Given(**space)).question)
    built = enumerate_candidates(limits)
    names = [name for name in built.columns if name != "mesh"]
    tried = [tuple(row[name] for name in names) for row in every_layout(limits)]
    assert len(tried) == len(set(tried)) == len(built)
    assert set(tried) == {tuple(int(built[name][row]) for name in names) for row in range(len(built))}


QUESTIONS: tuple[dict[str, Any], ...] = (
    {"model": "llama-debug", "hardware": "cpu:2", "global_batch": 2, "forbid": "offload,recompute"},
    {"model": "llama-debug", "hardware": "cpu:2", "global_batch": 2, "policy": "fastest", "objective": "memory"},
    {"model": "llama-debug", "hardware": "cpu:2", "global_batch": 4, "objective": "simplicity", "pin": "pp=2"},
    {
        "model": "llama-debug",
        "hardware": "cpu:2",
        "global_batch": 8,
        "policy": "fastest",
        "pin": "pp=2",
        "also": "zb_h1,zbv,gpipe",
    },
    {"model": "llama-debug", "hardware": "dgx-h100", "global_batch": 8, "pin": "tp=2", "uncalibrated": True},
    {"model": "qwen2.5-1.5b", "hardware": "aws-p4d.24xlarge", "global_batch": 16, "forbid": "offload,pp,tp"},
    {"model": "llama-3.1-8b", "hardware": "dgx-b200", "global_batch": 4, "forbid": "offload,pp,tp"},
    {"model": "qwen2.5-0.5b", "hardware": "dgx-h100", "seq_len": 16384, "global_batch": 1, "forbid": "offload,pp,tp"},
)
"""Small spaces; the last three are chosen from the second tier because cp waits, from the first with cp because nothing fits without
it, and from one that cp alone belongs to because sequences are long."""
LARGER: tuple[dict[str, Any], ...] = (
    {"model": "llama-2-7b", "hardware": "dgx-h100", "global_batch": 8, "pin": "tp=2", "policy": "fastest"},
    {"model": "mixtral-8x7b", "hardware": "dgx-h100:2", "global_batch": 16, "pin": "pp=2,tp=2,etp=2,micro_batch=1"},
    {
        "model": "llama-3.1-70b",
        "hardware": "dgx-h100:8",
        "global_batch": 64,
        "pin": "micro_batch=1",
        "forbid": "recompute",
    },
    {"model": "llama-2-7b", "hardware": "dgx-h100", "global_batch": 16, "forbid": "offload"},
    {"model": "llama-2-7b", "hardware": "dgx-h100", "global_batch": 16, "forbid": "offload,recompute"},
    {
        "model": "llama-2-7b",
        "hardware": "p4d.24xlarge:2",
        "seq_len": 65536,
        "global_batch": 1,
        "policy": "fastest",
        "also": "hierarchical",
    },
)
"""Questions of 8, 16 and 64 devices with a few hundred layouts each, and one with so many that most are left out as slower."""
BY_NIGHT = LARGER[1:5]


def certified(question: dict[str, Any]) -> Plan:
    """The plan with its certificate."""
    return recommend(**question, certificate=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "question",
    [*QUESTIONS, *by_night(LARGER, BY_NIGHT)],
    ids=str,
)
def test_trying_everything_confirms_the_certificate(question: dict[str, Any]) -> None:
    """Counts, refusals by rule, the best of all and the plan's own layout are what trying each layout alone finds; so on eight,
    sixteen and sixty-four devices, where the bound drops layouts unweighed."""
    plan = certified(question)
    found = recheck(plan)
    assert [claim.sentence for claim in found.claims if not claim.holds] == []
    account = plan.certificate
    assert account is not None
    counted = (found.enumerated, found.legal, found.refused, found.best_layout, found.best_step_ns)
    stated = (account.enumerated, account.legal, account.refused, account.best_layout, account.best_step_ns)
    assert counted == stated
    assert account.evaluated <= found.fitting <= account.evaluated + account.slower


@pytest.mark.slow
@pytest.mark.parametrize("space", [*SPACES[:3], SPACES[7]], ids=str)
def test_a_certificate_adds_up(space: dict[str, Any]) -> None:
    """Every layout has one end, the values that were searched are those of the space, and the best is no worse than the
    plan's layout, which is the best where time alone decides."""
    plan = certified(space)
    account = plan.certificate
    assert account is not None
    assert account.enumerated == sum(each.count for each in account.refused) + account.legal
    assert account.legal == account.slower + account.bounded + account.over + account.evaluated
    assert min(own.step_ns for own in account.bests) == account.best_step_ns
    assert account.best_step_ns <= plan.time.step_ns
    fastest = recommend(**space, certificate=True, policy="fastest")
    assert fastest.time.step_ns == account.best_step_ns
    limits = limits_of(complete(Given(**space)).question)
    built = enumerate_candidates(limits)
    values = {each.name: each.values for each in account.dimensions}
    assert all(
        values[name] == tuple(str(d) for d in sorted(set(built[name].tolist()))) for name in ("tp", "pp", "zero")
    )


def lie(**changes: Any) -> Any:
    """A plan whose certificate says something else."""
    plan = certified(QUESTIONS[0])
    return replace(plan, certificate=replace(plan.certificate, **changes))  # type: ignore[type-var]


def test_figures_that_do_not_add_up_are_no_certificate() -> None:
    """A count that was changed alone makes the plan unsound."""
    plan = certified(QUESTIONS[0])
    assert faults(plan) == ()
    for name in ("enumerated", "legal", "slower", "bounded", "weighed", "over", "evaluated"):
        assert faults(lie(**{name: 10**6})) != ()


@pytest.mark.slow
def test_a_lie_that_adds_up_is_found() -> None:
    """One layout more than there is, and a best one that is not, are told as claims that do not hold."""
    account = certified(QUESTIONS[0]).certificate
    assert account is not None
    more = {name: getattr(account, name) + 1 for name in ("enumerated", "legal", "weighed", "evaluated")}
    slowed = (*account.bests[1:], replace(account.bests[0], step_ns=account.bests[0].step_ns + 1))
    worse = "dp_replicate=2, micro_batch=1, accumulation=2"
    for plan in (lie(**more), lie(best_layout=worse), lie(refused=()), lie(bests=slowed)):
        assert not recheck(plan).holds


@pytest.mark.slow
def test_a_plan_that_is_not_the_best_is_found(tmp_path: Path) -> None:
    """A worse layout that is passed off as the answer is told with a better one: exit 4."""
    worse = recommend(**{**QUESTIONS[1], "pin": "tp=2"})
    passed_off = sealed(replace(worse, request=replace(worse.request, pins=())))
    path = tmp_path / "plan.json"
    path.write_text(dump(passed_off), encoding="utf-8")
    assert call("check", str(path)).code == 0
    ran = call("check", str(path), "--exhaustive", "--json")
    assert (ran.code, ran.error["code"], ran.error["flag"]) == (4, "E_FACTS_DIFFER", "--exhaustive")
    assert "such as" in ran.error["message"]


@pytest.mark.slow
def test_check_says_what_was_confirmed(tmp_path: Path) -> None:
    """The document holds the counts and every claim; the report has a line for each; nothing is written."""
    words = (
        "--model",
        "llama-debug",
        "--hardware",
        "cpu:2",
        "--global-batch",
        "2",
        "--certificate",
        "--forbid",
        "offload",
    )
    path = plan_file(tmp_path, *words)
    document = call("check", path, "--exhaustive", "--json").document
    assert document["exhaustive"]["fitting"] == load_plan(path).certificate.evaluated  # type: ignore[union-attr]
    ran = call("check", path, "--exhaustive")
    assert ran.out.count("  true  ") == len(document["exhaustive"]["claims"])
    assert "layouts tried" in ran.err


@pytest.mark.parametrize(
    ("change", "code", "exit_code"),
    [
        ({"hardware": "dgx-h100:16", "model": "llama-2-7b"}, "E_UNSUPPORTED", 3),
        ({"book": "sha256:0"}, "E_FACTS_DIFFER", 4),
        ({"given": (("--rules", "mine"),)}, "E_UNSUPPORTED", 3),
    ],
    ids=str,
)
def test_what_cannot_be_tried_again_is_refused(change: dict[str, Any], code: str, exit_code: int) -> None:
    """More than 64 devices, other facts, and plans that rest on files beside them are refused before any work."""
    own = {key: change[key] for key in ("model", "hardware") if key in change}
    plan = recommend(**{**QUESTIONS[0], "global_batch": 128, **own})
    plan = replace(plan, book=change.get("book", plan.book))
    plan = replace(plan, request=replace(plan.request, given=change.get("given", plan.request.given)))
    with pytest.raises(StrategistError) as refused:
        recheck(plan)
    assert (f"E_{refused.value.code}", refused.value.exit_code) == (code, exit_code)


def test_a_seal_from_before_there_were_certificates_is_whole() -> None:
    """A plan without front and certificate is signed as if these fields did not exist; one with them signs them."""
    plan = recommend(**QUESTIONS[0])
    document = json.loads(dump(plan))
    assert (document.pop("front"), document.pop("certificate"), document.pop("seal")) == (None, None, plan.seal)
    assert digest(document) == plan.seal
    assert seal_state(replace(plan, certificate=certified(QUESTIONS[0]).certificate)) == "edited"


@pytest.mark.parametrize(
    ("also", "more", "code"),
    [
        ("zbw", {}, "CHOICE"),
        ("interleaved", {}, "CHOICE"),
        ("zbv", {"pin": "schedule=1f1b"}, "CONFLICT"),
        ("tiling", {"forbid": "pp,tiling"}, "CONFLICT"),
        ("", {}, "EMPTY"),
    ],
)
def test_what_cannot_be_added_is_refused(also: str, more: dict[str, str], code: str) -> None:
    """Unknown words, those that every search has, and those that something else in the question rules out."""
    with pytest.raises(InputError) as refused:
        complete(Given(model="llama-2-7b", hardware="dgx-h100", also=also, **more))
    assert (refused.value.code, refused.value.flag) == (code, "--also")


def test_pins_and_bans_reach_both_enumerations() -> None:
    """A pin or ban that only one of the two obeyed would show: together they leave what each leaves alone."""
    base = complete(Given(model="llama-2-7b", hardware="dgx-h100")).question
    for pins, forbids in (("zero=3", "tp"), ("recompute=full", "zero"), ("micro_batch=256", "recompute"), ("cp=2", "gpipe,tiling")):  # fmt: skip
        limits = limits_of(replace(base, pins=parse_pins(pins), forbids=parse_forbids(forbids)))
        assert len(list(every_layout(limits))) == len(enumerate_candidates(limits))
