"""Plans for ResNets: data parallelism in all its forms, and nothing that cuts matrices, sequences or stacks."""

from __future__ import annotations

from typing import Any

import pytest

from strategist import emit, load_model, predict, recommend
from strategist.accuracy.judge import judge
from strategist.accuracy.scores import grouped
from strategist.accuracy.table import read_runs
from strategist.emitters import EMITTERS
from strategist.errors import StrategistError
from strategist.facts.model import ModelShape
from strategist.planner.check import faults
from strategist.records import replace
from strategist.reports.brief import brief
from strategist.reports.lines import text_of
from tests.source import ROOT

ROWS = ROOT / "benchmarks/truth/convolutions.csv"
MODELS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]


def _of_images(side: int) -> ModelShape:
    shape = load_model("resnet50")
    return replace(shape, extra=tuple(sorted({**dict(shape.extra), "image": side}.items())))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_a_resnet_trains_with_data_parallelism(model: str, nodes: int) -> None:
    """Of the axes data parallelism alone is used, and each alternative is one that keeps to it, too."""
    plan = recommend(model, f"dgx-a100-80gb:{nodes}", global_batch=2048, optimizer="sgd")
    assert plan.mesh.dp_replicate * plan.mesh.dp_shard == 8 * nodes
    assert {"tp", "pp", "cp", "ep"}.isdisjoint(word for other in plan.alternatives for word in other.family.split("+"))


@pytest.mark.parametrize(
    ("strategy", "code"),
    [("dp=4,tp=2", "LEG109"), ("dp=4,cp=2", "LEG109"), ("dp=4,pp=2", "LEG205"), ("dp=8,zero=3,tiling=8", "LEG109")],
)
def test_what_cuts_convolutions_is_illegal(strategy: str, code: str) -> None:
    """A layout that somebody wrote is weighed, and the rule that forbids it is named."""
    found = predict("resnet50", "dgx-a100-80gb", strategy=strategy, global_batch=64)
    assert code in [violation.rule for violation in found.violations]


@pytest.mark.parametrize(
    ("said", "code"),
    [({"seq_len": 224}, "CONFLICT"), ({"method": "lora"}, "UNSUPPORTED"), ({"precision": "fp8"}, "UNSUPPORTED")],
)
def test_words_about_tokens_and_matrices_are_refused(said: dict[str, object], code: str) -> None:
    """An image is one sequence of one token; adapters and eight bits are of Linear layers."""
    with pytest.raises(StrategistError) as refused:
        recommend("resnet50", "dgx-h100", **said)
    assert refused.value.code == code


def test_larger_images_take_more_of_everything() -> None:
    """Twice the side is four times the pixels: as much memory for activations, and more than thrice the products."""
    small, large = (
        predict(_of_images(side), "dgx-a100-80gb", strategy="dp=8,mbs=32", global_batch=256) for side in (224, 448)
    )
    both = [found.memory.worst.terms for found in (small, large)]
    kept = [next(term.bytes for term in terms if term.name == "activations") for terms in both]
    assert 3.9 < kept[1] / kept[0] < 4.1
    assert large.time.step.value > 3 * small.time.step.value


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(emitter.name for emitter in EMITTERS))
def test_no_target_sends_to_another_that_refuses_too(target: str) -> None:
    """Every script that is emitted trains language models, so whoever has images is told how a script of theirs uses the plan."""
    plan = recommend("resnet50", "dgx-a100-80gb", global_batch=256)
    with pytest.raises(StrategistError) as refusal:
        emit(plan, target)
    assert "build()" in (refusal.value.hint or "")


def test_few_images_behind_a_norm_are_said() -> None:
    """A batch norm that sees less than 16 images is advised against."""
    few, many = (recommend("resnet50", "dgx-a100-80gb", global_batch=batch) for batch in (32, 2048))
    assert "W_ADV803" in [hint.code for hint in few.hints]
    assert "W_ADV803" not in [hint.code for hint in many.hints]


@pytest.mark.slow
def test_images_are_said_and_counted() -> None:
    """Their side and how they lie in memory are assumptions, rates are of images, and no other length of a sequence is tried."""
    plan = recommend("resnet50", "dgx-a100-80gb", global_batch=256, sensitivity=True)
    said = {assumption.what: assumption.value for assumption in plan.assumptions}
    assert "224 x 224 pixels, channels last" in said["sequence length"]
    assert plan.sensitivity is not None
    assert "sequence length" not in {*plan.sensitivity.steady, *(turn.assumption for turn in plan.sensitivity.turns)}
    text = text_of(brief(plan, 120))
    assert "256 images per step" in text
    assert "images/s" in text
    assert "tokens" not in text


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ("resnet50", {"extra": ()}, "model.extra.depths_0 is 0"),
        ("resnet50", {"layers": 17}, "stages of 16 blocks and model.layers is 17"),
        ("resnet50", {"image": 2**20}, "model.extra.image is 1048576"),
        ("vit-b-16", {"extra": ()}, "model.extra.patch is 0"),
        ("llama-debug", {"formula": "resnet"}, "model.extra.image is 0"),
    ],
)
def test_a_plan_whose_model_lacks_facts_is_not_sound(model: str, changes: dict[str, Any], said: str) -> None:
    """A file may say anything; what weights are counted from is asked before anything is counted."""
    plan = recommend(model, "dgx-a100-80gb", global_batch=256)
    if "image" in changes:
        changes = {"extra": tuple(sorted({**dict(plan.model.extra), **changes}.items()))}
    assert any(said in fault for fault in faults(replace(plan, model=replace(plan.model, **changes))))


def test_a_step_outside_of_what_was_calibrated_is_said() -> None:
    """No factor and no interval was fitted to convolutions, on no device: both doors warn, and the interval is the widest."""
    plan = recommend("resnet50", "dgx-a100-80gb", global_batch=256)
    found = predict("resnet50", "dgx-a100-80gb", strategy="dp=8", global_batch=256)
    for one in (plan, found):
        assert "W_UNCALIBRATED" in [hint.code for hint in one.hints]
        assert one.time.step.high / one.time.step.low > 1.5


def test_published_runs_are_met_by_physics_alone() -> None:
    """No row was fitted to: every source is met within 25 % in the median, and what ran is predicted to fit."""
    judged = judge(read_runs(str(ROWS)))
    assert not [row.skipped for row in judged if row.skipped]
    for group in grouped(judged, ("source",)):
        assert group.time is not None
        assert group.time.median <= 0.25, group
    assert all(row.fits for row in judged)
