"""`strategist trace` and `explain --with`: what they write, and how they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strategist import load_observed, load_plan
from strategist.document.write import dump
from tests.cli.harness import Refusal, assert_refuses, edited, hand_written, process, refused
from tests.executor.harness import run_alone
from tests.measure.own_models import MODELS, NO_MODELS, write_models
from tests.plans import FLOAT32, make_plan, tiny_llama

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a plan of two ranks and a module of models."""
    hand_written(tmp_path, dp_shard=2, zero=3, formats=FLOAT32)
    write_models(tmp_path)
    return tmp_path


def test_a_trace_is_written_loaded_and_set_beside_its_plan(folder: Path) -> None:
    """The file is the document that --json prints; `explain --with` puts its bytes beside the plan's and marks one term."""
    ran = process("trace", "plan.json", "--out", "trace.json", "--json", cwd=folder)
    assert ran.code == 0, ran.out
    text = (folder / "trace.json").read_text(encoding="utf-8")
    assert {**json.loads(text)} == ran.document
    observed = load_observed(str(folder / "trace.json"))
    assert dump(observed) == text
    shown = process("explain", "plan.json", "--with", "trace.json", "--json", cwd=folder)
    memory = shown.document["tree"]["children"][1]
    assert memory["observed"] == [observed.worst.memory.peak.allocated]
    assert sum(leaf["is_worst"] for leaf in memory["children"]) == 1
    words = process("explain", "plan.json", "--with", "trace.json", cwd=folder).out
    assert "traced" in words
    assert "<- worst" in words


def test_a_trace_of_another_plan_is_stale(folder: Path) -> None:
    """A trace tells which plan it is of, and is not set beside another."""
    assert process("trace", "plan.json", "--out", "trace.json", cwd=folder).code == 0
    plan = load_plan(str(folder / "plan.json"))
    other = replace(plan, workload=replace(plan.workload, tokens=10**6))
    (folder / "other.json").write_text(dump(other), encoding="utf-8")
    ran = process("explain", "other.json", "--with", "trace.json", "--json", cwd=folder)
    assert (ran.code, ran.error["code"]) == (4, "E_DIGEST")


def test_somebody_s_own_module_is_traced_without_its_values(folder: Path) -> None:
    """A module with tied ends that nobody described: its parameters are counted once, in shares."""
    ran = process("trace", "plan.json", "--model-fn", "own:Tiny", "--json", cwd=folder)
    assert ran.code == 0, ran.out
    moments = {m["moment"]: m for m in ran.document["ranks"][0]["memory"]["moments"]}
    held = {t["name"]: t["bytes"] for t in moments["optimizer step"]["terms"]}
    assert held["parameters"] == 4 * (64 * 32 + 3 * (32 * 32 + 32)) // 2


REFUSALS = {
    "another version": Refusal(4, "E_SCHEMA_VERSION", (), edited(format="strategist-plan/2")),
    "another document": Refusal(2, "E_KIND", (), edited(format="strategist-observed/1")),
    "no such ranks": Refusal(2, "E_CHOICE", ("--ranks", "fastest")),
    "a rank too many": Refusal(2, "E_TOO_LARGE", ("--ranks", "2")),
    "half a number": Refusal(2, "E_INTEGER", ("--ranks", "0.5")),
    "a function that touches CUDA": Refusal(2, "E_UNSUPPORTED_DEVICE", ("--model-fn", "own:touches_cuda")),
    **NO_MODELS,
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_a_sentence_and_leaves_nothing(folder: Path, name: str) -> None:
    """Each wrong word ends in its code, its exit code, a hint, and no file."""
    assert_refuses(folder, "trace", REFUSALS[name])


def test_a_strategy_that_the_executor_lacks_is_impossible(folder: Path) -> None:
    """Tiling without ZeRO-3 is legal in a plan, but there is no program of it to trace."""
    (folder / "plan.json").write_text(dump(make_plan(tiling=2, formats=FLOAT32)), encoding="utf-8")
    ran = refused(folder, "trace")
    assert (ran.code, ran.error["code"]) == (3, "E_UNSUPPORTED")


def test_an_architecture_without_a_model_is_impossible(folder: Path) -> None:
    """The built-in model cannot be every shape; with a function of one's own the same plan is traced."""
    odd = make_plan(tiny_llama(kind="encoder"), formats=FLOAT32)
    (folder / "plan.json").write_text(dump(odd), encoding="utf-8")
    assert (refused(folder, "trace").code, refused(folder, "trace").error["code"]) == (3, "E_UNSUPPORTED")
    assert process("trace", "plan.json", "--model-fn", "own:Tiny", cwd=folder).code == 0


def test_a_file_that_exists_is_kept(folder: Path) -> None:
    """Without --force an existing file is not touched, and nothing is traced in vain."""
    (folder / "trace.json").write_text("mine", encoding="utf-8")
    ran = process("trace", "plan.json", "--out", "trace.json", "--json", cwd=folder)
    assert (ran.code, ran.error["code"]) == (2, "E_EXISTS")
    assert (folder / "trace.json").read_text(encoding="utf-8") == "mine"


def test_python_takes_a_module_or_a_function_that_makes_it() -> None:
    """A live module and a function that makes it give the same bytes; the module keeps its values."""
    assert run_alone(_both_ways, timeout_s=120.0)


def _both_ways() -> bool:
    import torch
    from torch import nn

    import strategist

    space: dict[str, Any] = {}
    exec(MODELS, space)
    plan = make_plan(dp_shard=2, zero=3, formats=FLOAT32)
    model: nn.Module = space["Tiny"]()
    before = [parameter.clone() for parameter in model.parameters()]
    live, made = strategist.trace(plan, model), strategist.trace(plan, space["Tiny"])
    kept = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    return kept and live.worst.memory == made.worst.memory and live.plan == made.plan
