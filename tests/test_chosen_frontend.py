"""The front end that rules choose for a plan: by what the job is for, among those that can say the plan."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

import pytest

from strategist import emit, recommend
from strategist.document.load import load_plan
from strategist.document.plan import Plan
from strategist.emitters import EMITTERS
from strategist.emitters.emitter import Options
from strategist.errors import StrategistError
from strategist.facts.profile import PURPOSES
from strategist.frontend import chosen_frontend
from tests.cli.harness import call
from tests.emitters.grid import COMMON, grid, plan_for

PLAIN = plan_for(**COMMON | {"dp_replicate": 2})
PRODUCT = plan_for(
    **COMMON | {"dp_replicate": 2, "tp": 2, "pp": 2, "accumulation": 4, "virtual_stages": 1, "schedule": "1f1b"}
)
SMALL = ("plan", "--model", "llama-3.2-1b", "--hardware", "dgx-h100")


@pytest.mark.parametrize(
    ("purpose", "target"),
    [
        ("research", "fabric"),
        ("production", "accelerate"),
        ("performance", "torchrun"),
        ("debugging", "mp-spawn"),
        ("unsure", "fabric"),
    ],
)
def test_the_purpose_decides(purpose: str, target: str) -> None:
    """The table of front ends, for a plan that each of them can say."""
    chosen = chosen_frontend(PLAIN, purpose)
    assert chosen is not None
    assert (chosen.target, chosen.passed_over) == (target, ())
    assert chosen.words.startswith(f"{target}: ")


@pytest.mark.parametrize("purpose", sorted({*PURPOSES} - {"debugging"}))
def test_three_kinds_of_parallelism_are_for_megatron_and_torchtitan(purpose: str) -> None:
    """Whatever the job is for; two kinds are not."""
    chosen = chosen_frontend(PRODUCT, purpose)
    assert chosen is not None
    assert chosen.reason.rule == "FE201"
    assert chosen.target in ("megatron", "torchtitan", "torchrun")
    two = chosen_frontend(plan_for(**COMMON | {"dp_replicate": 2, "tp": 2}), purpose)
    assert two is not None
    assert two.reason.rule != "FE201"


@pytest.mark.slow
@pytest.mark.parametrize("purpose", PURPOSES)
def test_what_is_chosen_can_say_the_plan_and_what_is_passed_over_cannot(purpose: str) -> None:
    """For the plans of the emitters' grid, some of which send a front end away; where nothing is chosen no target has files."""
    passed = 0
    for _, plan in grid()[::3]:
        chosen, drive = chosen_frontend(plan, purpose), "/x" if plan.strategy.offload == "nvme" else None
        others = [other.target for other in chosen.passed_over] if chosen else [emitter.name for emitter in EMITTERS]
        for other in others:
            with pytest.raises(StrategistError):
                emit(plan, other, Options(nvme_path=drive))
        if chosen is not None:
            passed += len(others)
            assert emit(plan, chosen.target, Options(nvme_path=drive))
            assert all(other.sentence in chosen.words for other in chosen.passed_over)
    assert passed > 0


def test_the_plan_says_which_and_emit_takes_it(tmp_path: Path) -> None:
    """`plan --frontend auto` names the front end, the rule and its sentence, limits no layout, and `emit` needs no --to."""
    file = tmp_path / "plan.json"
    done = call(*SMALL, "--frontend", "auto", "--purpose", "production", "--out", str(file))
    assert "accelerate: For a transformer in production" in " ".join(done.out.split())
    assert "--to accelerate --out job" in " ".join(done.out.split())
    plan, free = load_plan(str(file)), recommend("llama-3.2-1b", "dgx-h100")
    assert plan.frontend is not None
    assert (plan.frontend.target, plan.request.frontend, plan.request.purpose) == ("accelerate", "any", "production")
    assert (plan.mesh, plan.strategy) == (free.mesh, free.strategy)
    emitted = call("emit", str(file), "--out", str(tmp_path / "job"), "--json")
    said = json.loads(emitted.out)
    assert said["target"] == "accelerate"
    assert "For a transformer in production" in said["notes"][0]
    named = emit(plan, "accelerate")
    assert emit(plan) == named
    assert {PurePosixPath(name).name for name in said["files"]} == {str(name) for name in named}
    assert call("check", str(file)).code == 0


def of(tmp_path: Path, *words: str) -> Plan:
    """The plan of the small job with some words more."""
    file = tmp_path / "other.json"
    assert call(*SMALL, *words, "--out", str(file), "--force").code == 0
    return load_plan(str(file))


@pytest.mark.slow
def test_without_a_word_emit_takes_what_the_plan_was_made_for(tmp_path: Path) -> None:
    """A plan that somebody made for a front end is emitted for that, any other one as if nobody knew what it is for."""
    assert emit(of(tmp_path, "--frontend", "deepspeed")) == emit(of(tmp_path, "--frontend", "deepspeed"), "deepspeed")
    free = of(tmp_path)
    assert free.frontend is None
    assert emit(free) == emit(free, "fabric")


def test_a_purpose_needs_a_choice() -> None:
    """It decides nothing where the front end is named, or where none is asked for."""
    for words in (("--purpose", "research"), ("--frontend", "torchrun", "--purpose", "research")):
        done = call(*SMALL, *words)
        assert (done.code, "E_CONFLICT" in done.err) == (2, True)
    with pytest.raises(StrategistError, match="purpose must be one of"):
        recommend("llama-3.2-1b", "dgx-h100", frontend="auto", purpose="fun")


RULE = """
[[rule]]
id = "MY001"
name = "we-use-nanotron"
when = "purpose == 'research'"
effect = "emit"
targets = [{targets}]
because = "Our group has nanotron at hand."
source = "our handbook"
fires = {{ purpose = "research" }}
silent = {{ purpose = "unsure" }}
"""


def test_rules_of_users_come_first(tmp_path: Path) -> None:
    """A folder's frontends.toml decides before ours; a target that nobody knows is an error with the nearest."""
    folder = tmp_path / "rules"
    folder.mkdir()
    book = folder / "frontends.toml"
    book.write_text(RULE.format(targets='"skypilot"'), encoding="utf-8")
    plan = recommend("llama-3.2-1b", "dgx-h100", frontend="auto", purpose="research", rules=[str(folder)])
    assert plan.frontend is not None
    assert (plan.frontend.target, plan.frontend.reason.rule) == ("skypilot", "MY001")
    book.write_text(RULE.format(targets='"skypilott"').replace("MY001", "MY002"), encoding="utf-8")
    with pytest.raises(StrategistError, match="unknown target 'skypilott'") as refused:
        recommend(
            "llama-3.2-1b", "dgx-h100", frontend="auto", purpose="research", rules=[str(folder), str(folder / ".")]
        )
    assert "skypilot" in (refused.value.hint or "")
