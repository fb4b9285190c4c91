"""A plan for a front end is weighed as that runs it: `predict` of the files that are emitted says the plan's own step and peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strategist.catalog import rows
from strategist.emitters import EMITTERS
from strategist.facts.profile import frameworks
from tests.emitters.predicted import FILES, plan_and_prediction

SMALL: dict[str, Any] = {"model": "llama-3.2-1b", "hardware": "ws-2x-4090", "seq_len": 512, "global_batch": 4}
LARGE: dict[str, Any] = {"model": "llama-3.1-8b", "hardware": "dgx-h100", "global_batch": 64}
OTHERS: tuple[dict[str, Any], ...] = (
    *({"pin": f"zero={stage}"} for stage in range(4)),
    *({"pin": f"zero={stage}", "precision": "fp32"} for stage in range(4)),
    *({"pin": f"offload={what}"} for what in ("optimizer", "parameters", "nvme")),
    {"precision": "fp16"},
    {"optimizer": "sgd"},
    {"pin": "recompute=full"},
    {"pin": "tp=2"},
    {"pin": "pp=2"},
    {"pin": "cp=2"},
    {"model": "llama-3.2-1b"},
    {"model": "gpt2-medium", "seq_len": 1024},
    {"model": "mixtral-8x7b", "hardware": "dgx-h100:2"},
    {"hardware": "dgx-a100-80gb:2", "policy": "fastest"},
    {"hardware": "mi300x-platform"},
)
"""What else is asked for, beside the large question."""


def agree(folder: Path, target: str, **question: Any) -> bool:
    """Whether a target can say a plan; what is predicted of its file is the plan's then."""
    found = plan_and_prediction(folder, target, **question)
    if found is None:
        return False
    plan, prediction = found
    assert prediction.framework == plan.strategy.profile
    assert prediction.strategy.formats == plan.strategy.formats
    assert (prediction.time.step_ns, prediction.memory.worst.device) == (plan.time.step_ns, plan.memory.worst.device)
    return True


def test_every_front_end_has_a_profile_that_is_known() -> None:
    """The catalogue names a profile for each, and one of DeepSpeed's for those whose emitter hands layouts to it."""
    known = frameworks()
    named = {row["name"]: row for row in rows("frontends")}
    assert {row["profile"] for row in named.values()} <= set(known)
    assert {row["deepspeed"] for row in named.values() if "deepspeed" in row} <= set(known)
    for emitter in EMITTERS:
        usual = emitter.by_deepspeed.__name__ == "<lambda>" and emitter.name != "deepspeed"
        assert ("deepspeed" in named[emitter.name]) is not usual
        assert (named[emitter.name]["profile"] == "strategist") is (emitter.engine in ("strategist", "epl"))


@pytest.mark.parametrize("target", ["deepspeed", "axolotl", "composer"])
def test_predict_of_emitted_files_says_the_plan(target: str, tmp_path: Path) -> None:
    """Step and peak of a plan are those of its files."""
    assert agree(tmp_path, target, **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("target", FILES)
def test_predict_of_emitted_files_says_any_plan(target: str, tmp_path: Path) -> None:
    """The same for every target whose files are read, over models, machines, formats and layouts; each can say some of them."""
    said = []
    for number, other in enumerate(OTHERS):
        folder = tmp_path / str(number)
        folder.mkdir()
        said.append(agree(folder, target, **LARGE | other))
    assert any(said)
