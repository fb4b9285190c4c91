"""Hugging Face's decoders beside the parity matrix (test_matrix.py trains them in its cells): what they save goes on under another
layout, what they draw at random is drawn again, and what they cannot do is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.executor.hugging_face import config_of, shape_of
from tests.plans import make_plan

pytestmark = pytest.mark.slow

TP = {"tp": 2, "micro_batch": 8}
ON_THE_WAY: tuple[dict[str, Any], ...] = (
    TP,
    {"dp_shard": 2, "zero": 3, "tp": 2, "micro_batch": 4},
    {"pp": 2, "micro_batch": 2, "accumulation": 4},
    {"dp_shard": 2, "zero": 1, "tp": 2, "micro_batch": 4},
)


def plan_of(family: str, layout: dict[str, Any], **changes: Any) -> Any:
    """A plan for a tiny model, experts cut as all else."""
    cut = {"etp": layout["tp"]} if family == "mixtral" and "tp" in layout else {}
    return make_plan(replace(shape_of(family, 2, True), **changes), **layout | cut)


def assert_alike(trained: Any, expected: Any) -> None:
    """Losses and weights are the same within the bounds of float64."""
    from tests.executor.cells import EXACT

    (losses, weights), (other_losses, others) = trained, expected
    assert losses == pytest.approx(other_losses, abs=EXACT.loss_bound, rel=0)
    assert weights.keys() == others.keys()
    assert max(float((weights[name] - value).abs().max()) for name, value in others.items()) <= (
        EXACT.weight_bound or 0.0
    )


@pytest.mark.parametrize("family", ["gpt2", pytest.param("mixtral", marks=pytest.mark.nightly)])
def test_a_checkpoint_knows_no_layout(family: str, tmp_path: Path) -> None:
    """Saved after every step or two and gone on from under another layout: five losses, and the weights by then, are those of one
    process, although tensor-parallel ranks hold queries, keys and values, or gate and up, in another order than the model has them."""
    from tests.executor.cells import EXACT, trained_alone
    from tests.executor.harness import run_ranks
    from tests.executor.theirs import train_part

    start, losses, ends = None, [], (1, 2, 4, 5)
    for layout, end in zip(ON_THE_WAY, ends, strict=True):
        plan = plan_of(family, layout)
        (some, parameters), *_ = run_ranks(plan.processes, train_part, plan, start, end, tmp_path / str(end))
        start, losses = tmp_path / str(end), [*losses, *some]
    assert_alike((losses, parameters), trained_alone(shape_of(family, 2, True), EXACT, 8, of_transformers=True))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_vocabulary_that_tp_does_not_divide_is_exact_too(family: str) -> None:
    """GPT-2's real one, 50,257, is odd."""
    from tests.executor.cells import EXACT, Job, assert_trained_like_one_process

    assert_trained_like_one_process([Job(plan_of(family, TP, vocab=65), EXACT, of_transformers=True)])


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_what_was_dropped_is_dropped_again(recompute: str) -> None:
    """Dropout of the residual stream and of attention: a block that is computed again draws the same numbers, so losses and weights of
    five steps are those without recomputation."""
    from tests.executor.harness import run_alone
    from tests.executor.theirs import train_with_chance

    rates = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    plans = [plan_of("gpt2", {"micro_batch": 8, "recompute": kind}) for kind in ("none", recompute)]
    plain, again = (run_alone(train_with_chance, plan, rates) for plan in plans)
    assert_alike(again, plain)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_compiled_blocks_are_exact_too(family: str) -> None:
    """Under tensor parallelism, where layers compute with parts of their weights."""
    from tests.executor.cells import EXACT, trained_alone
    from tests.executor.harness import run_ranks
    from tests.executor.theirs import train_compiled

    for trained in run_ranks(2, train_compiled, plan_of(family, TP)):
        assert_alike(trained, trained_alone(shape_of(family, 2, True), EXACT, 8, of_transformers=True))


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gpt2", "mixtral"))]
)
def test_three_ranks_are_exact_where_the_library_computes_in_float64(family: str) -> None:
    """On three ranks gradients are scaled by a third on their way, which is exact in no format; norms and routers that round to float32
    would show it, so here they round to float64."""
    from tests.executor.cells import EXACT, Job
    from tests.executor.harness import run_alone, run_ranks
    from tests.executor.theirs import trained_in_float64

    job = Job(plan_of(family, {"dp_shard": 3, "zero": 3, "micro_batch": 2}), EXACT, of_transformers=True)
    expected = run_alone(trained_in_float64, job)
    for trained in run_ranks(3, trained_in_float64, job):
        assert_alike(trained, expected)


def test_weights_of_files_come_into_the_built_in_model_only(tmp_path: Path) -> None:
    """Models of transformers load their own, and nothing passes them over without a word."""
    from tests.executor.harness import run_alone
    from tests.executor.theirs import refused_import

    assert run_alone(refused_import, plan_of("gpt2", {"micro_batch": 8}), tmp_path) == "UNSUPPORTED"


REFUSED: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], str, str]] = {
    "dropout under tp": ("gpt2", TP, "", {"resid_pdrop": 0.1}, "UNSUPPORTED", "would each draw for themselves"),
    "dropout of attention under tp": ("llama", TP, "", {"attention_dropout": 0.1}, "UNSUPPORTED", "would each draw"),
    "noise of a router under tp": ("mixtral", TP, "", {"router_jitter_noise": 0.1}, "UNSUPPORTED", "would each draw"),
    "heads of GPT-2 that tp does not divide": ("gpt2", TP, "", {"n_head": 1}, "DIVISIBILITY", "has 1 heads"),
    "experts too narrow for a product of groups": ("mixtral", TP, "", {"intermediate_size": 24}, "DIVISIBILITY", "leaves 12 to each"),
    "sequence parallelism": ("gpt2", TP | {"sequence_parallel": True}, "", {}, "UNSUPPORTED", "sequence parallelism"),
    "context parallelism": ("mixtral", {"cp": 2, "context_parallel": "ring", "micro_batch": 8}, "", {}, "UNSUPPORTED", "context parallelism"),
    "spread experts": ("mixtral", {"dp_shard": 2, "zero": 3, "ep": 2, "micro_batch": 4}, "", {}, "UNSUPPORTED", "ep spreads experts"),
    "its own loss in a pipeline": ("llama", {"pp": 2, "micro_batch": 4, "accumulation": 2}, "own loss", {}, "UNSUPPORTED", "gives logits alone"),
    "a class with two heads": ("gpt2", TP, "GPT2DoubleHeadsModel", {"summary_first_dropout": 0.0}, "UNSUPPORTED", "nobody said how GPT2DoubleHeadsModel may be cut"),
    "a word of a plan that is not known": (
        "llama", TP, "", {"base_model_tp_plan": {"layers.*.mlp": "sideways"}}, "UNSUPPORTED", "'sideways'"
    ),
    "a weight of a plan that is no expert's": (
        "llama", TP, "", {"base_model_tp_plan": {"layers.*.mlp.up_proj.weight": "colwise"}}, "UNSUPPORTED", "up_proj.weight"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def refused() -> dict[str, list[tuple[str, str]]]:
    """What every rank says of all that is refused."""
    from tests.executor.harness import run_ranks
    from tests.executor.theirs import refusals

    asked = [(plan_of(family, layout), kind, changes) for family, layout, kind, changes, _, _ in REFUSED.values()]
    said = zip(*run_ranks(2, refusals, asked), strict=True)
    return dict(zip(REFUSED, map(list, said), strict=True))


@pytest.mark.parametrize("case", REFUSED)
def test_what_they_cannot_do_is_refused(case: str, refused: dict[str, list[tuple[str, str]]]) -> None:
    """When a session is built, on every rank, in a sentence: never at the first step, and never silently."""
    *_, code, words = REFUSED[case]
    for found, sentence in refused[case]:
        assert (found, words in sentence) == (code, True), sentence


def test_the_configurations_are_those_of_transformers() -> None:
    """What the planner reads in a few words is what it reads in all that transformers makes of them."""
    from transformers import AutoConfig

    from strategist.facts.model_config import shape_from_config

    for family in ("llama", "qwen2", "qwen3", "mistral", "mixtral", "gpt2"):
        words = config_of(family, 2, True)
        whole = AutoConfig.for_model(words.pop("model_type"), **words).to_dict()
        short, long = shape_of(family, 2, True), shape_from_config(whole)
        assert replace(short, notes=(), max_seq=0) == replace(long, notes=(), max_seq=0)
