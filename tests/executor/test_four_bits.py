"""Adapters beside a base of four bits: the data type of the paper, the same training on every layout, and nearly that of LoRA."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strategist.errors import InputError
from strategist.executor.support import layout_obstacles, require_packages
from strategist.facts.model import Adapters, ModelShape
from tests.plans import FLOAT32, make_plan, tiny_gpt2, tiny_llama, tiny_mixtral

EVERY = Adapters(method="qlora", rank=4, alpha=8, targets=("q", "k", "v", "o", "gate", "up", "down"))
SOME = replace(EVERY, rank=2, targets=("q", "v"))
OF_ATTENTION = replace(EVERY, targets=("q", "k", "v", "o"))
BF16 = replace(FLOAT32, parameter="bfloat16", compute="bfloat16")
BOUNDS = {"float32": 5e-6, "bfloat16": 5e-3}
"""Of losses over twenty updates, as for every layout in that format."""
LAYOUTS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "single": (tiny_llama(adapters=EVERY), {"accumulation": 2, "recompute": "selective"}, FLOAT32),
    "ddp2": (tiny_llama(adapters=EVERY, qkv_bias=True), {"dp_replicate": 2, "accumulation": 2}, FLOAT32),
    "ddp2-bf16": (tiny_llama(adapters=EVERY), {"dp_replicate": 2, "recompute": "full"}, BF16),
    "zero2": (tiny_llama(adapters=SOME, tied=True), {"dp_shard": 2, "zero": 2, "recompute": "full"}, FLOAT32),
    "fsdp4": (tiny_gpt2(adapters=replace(EVERY, targets=("q", "k", "v", "o", "up", "down"))), {"dp_shard": 4, "zero": 3}, FLOAT32),
    "hsdp-bf16": (tiny_llama(adapters=EVERY), {"dp_replicate": 2, "dp_shard": 2, "zero": 3}, BF16),
    "moe-ddp2": (tiny_mixtral(adapters=OF_ATTENTION), {"dp_replicate": 2, "recompute": "selective"}, FLOAT32),
    "moe-fsdp2": (tiny_mixtral(adapters=OF_ATTENTION, moe={"shared_ffn": 16, "shared_gate": True}), {"dp_shard": 2, "zero": 3, "accumulation": 2}, FLOAT32),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("size", [(48, 32), (40, 48), (30, 7), (300, 128)])
def test_a_base_of_four_bits_is_what_the_paper_keeps(size: tuple[int, int]) -> None:
    """Also where blocks go on in the next row, where the last is not full, and where scales have several blocks of their own; a product's
    gradient is made with the same numbers."""
    import torch

    from tests.executor.four import agrees, brought_back

    matrix, back, gradient = brought_back(*size)
    assert agrees(back, matrix)
    assert not agrees(back.roll(1), matrix)
    assert torch.allclose(gradient, back.sum(dim=0).expand_as(gradient), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_beside_four_bits_is_that_of_one_process(name: str) -> None:
    """Losses of twenty updates are those of one process that trains adapters beside plain matrices rounded once."""
    import torch

    from tests.executor.eight import BATCH, trained
    from tests.executor.four import LEARNING_RATE, trained_alone
    from tests.executor.harness import run_ranks

    shape, layout, formats = LAYOUTS[name]
    parts = layout.get("accumulation", 1) * layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
    plan = make_plan(shape, formats=formats, micro_batch=BATCH // parts, **layout)
    expected = trained_alone(shape, getattr(torch, formats.compute))
    for losses in run_ranks(plan.mesh.world, trained, plan, LEARNING_RATE):
        assert losses == pytest.approx(expected, abs=BOUNDS[formats.compute], rel=0)


@pytest.mark.slow
def test_a_base_that_is_not_rounded_is_told_apart() -> None:
    """Beside weights as they were, and where adapters are left as they were, losses differ by far more than the bound of float32: it
    would see a base that nobody rounded, and gradients that went astray."""
    import torch

    from tests.executor.four import trained_alone

    shape = tiny_llama(adapters=EVERY)
    losses = trained_alone(shape, torch.float32)
    others = (
        trained_alone(shape, torch.float32, is_rounded=False),
        trained_alone(shape, torch.float32, learning_rate=0.0),
    )
    for other in others:
        assert max(abs(a - b) for a, b in zip(losses, other, strict=True)) > 10 * BOUNDS["float32"]


@pytest.mark.slow
def test_checkpoints_hold_the_base_of_four_bits(tmp_path: Path) -> None:
    """Five steps with a checkpoint under another layout between each two are five steps of one layout, and the base is bit for bit
    what it was: no layout rounds it again."""
    from tests.executor.harness import run_ranks
    from tests.executor.reference import Task
    from tests.executor.workers import train_part

    task = Task(tiny_llama(adapters=EVERY), ragged=True, clip_norm=0.5)
    chain = ({"dp_shard": 2, "zero": 3}, {"dp_replicate": 2}, {"dp_shard": 2, "zero": 2})
    plans = [make_plan(task.shape, micro_batch=4, formats=FLOAT32, **layout) for layout in chain]
    ((losses, parameters, _), *_) = run_ranks(2, train_part, plans[1], task, None, 3, tmp_path / "whole")
    start: Path | None = None
    for step, plan in enumerate(plans):
        ((got, last, _), *_) = run_ranks(2, train_part, plan, task, start, step + 1, tmp_path / f"{step}")
        assert got == pytest.approx(losses[step : step + 1], abs=BOUNDS["float32"], rel=0)
        start = tmp_path / f"{step}"
    base = [name for name in parameters if name.endswith(".bits")]
    assert len(base) == task.shape.layers * len(EVERY.targets)
    assert all(last[name].equal(parameters[name]) for name in base)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "adapters", "matrices"),
    [(tiny_llama, EVERY, 7), (tiny_mixtral, OF_ATTENTION, 4 + 1 + 3 * 4)],
    ids=["dense", "experts"],
)
def test_weights_of_hugging_face_are_rounded_as_they_come_in(
    make: Callable[..., ModelShape], adapters: Adapters, matrices: int, tmp_path: Path
) -> None:
    """Each matrix of the layers is what four bits keep of the one in the files, on two ranks that share it: in a mixture the router too, and experts one by one."""
    from tests.executor.four import agrees, carried, exported, one_by_one
    from tests.executor.harness import run_ranks

    (theirs,) = run_ranks(1, exported, make_plan(make(), formats=FLOAT32), tmp_path)
    whole = one_by_one(theirs)
    plan = make_plan(make(adapters=adapters), formats=FLOAT32, dp_shard=2, zero=3)
    for found in run_ranks(2, carried, plan, tmp_path / "files"):
        assert len(found) == plan.model.layers * matrices
        assert all(agrees(value, whole[name]) for name, value in found.items())


@pytest.mark.slow
def test_ranks_share_the_base_where_the_plan_says_so() -> None:
    """Under ZeRO-3 two ranks hold a half each, but for the padding of one byte a matrix."""
    from tests.executor.four import bytes_of_bases
    from tests.executor.harness import run_ranks

    plan = make_plan(tiny_llama(adapters=EVERY), formats=FLOAT32, dp_shard=2, zero=3)
    own, whole = zip(*run_ranks(2, bytes_of_bases, plan), strict=True)
    assert sum(own) == whole[0]
    assert abs(own[0] - own[1]) <= plan.model.layers * len(EVERY.targets)


@pytest.mark.parametrize(
    ("choices", "words"),
    [({}, "float64"), ({"formats": FLOAT32, "compile": True}, "compile"), ({"formats": FLOAT32, "tp": 2}, "tp 2")],
)
def test_what_nobody_tried_beside_four_bits_is_refused(choices: dict[str, Any], words: str) -> None:
    """Each is named in a sentence, and a plan without it is not refused."""
    shape = tiny_llama(adapters=EVERY)
    (found,) = layout_obstacles(make_plan(shape, **choices))
    assert (found.code, words in found.sentence) == ("UNSUPPORTED", True)
    assert not layout_obstacles(make_plan(shape, formats=FLOAT32))


def test_without_bitsandbytes_a_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lacks the package is told which extra brings it, and needs it for four bits alone."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    require_packages("Running", "lora")
    with pytest.raises(InputError) as refused:
        require_packages("Running", "qlora")
    assert refused.value.code == "MISSING"
    assert "strategist[qlora]" in str(refused.value.hint)
