"""A session trains any module with data parallelism, and never spoils weights with a step that went wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strategist.errors import ImpossibleError
from tests.plans import BFLOAT16, FLOAT32, make_plan, tiny_llama

pytestmark = pytest.mark.slow

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp_replicate": 2, "micro_batch": 2, "accumulation": 2},
    {"dp_shard": 2, "zero": 1, "micro_batch": 4},
    {"dp_shard": 2, "zero": 3, "micro_batch": 4, "recompute": "full"},
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_module_trains_data_parallel_as_one_process(layout: dict[str, Any]) -> None:
    """A foreign module that starts differently on every rank trains as rank 0's would alone on whole batches."""
    import torch

    from strategist.executor.data import SyntheticTokens
    from tests.executor.harness import run_ranks
    from tests.executor.modules import ByteMixer, mean_square
    from tests.executor.workers import train_module

    data = SyntheticTokens(64, 16, 24)
    torch.manual_seed(0)
    model = ByteMixer().double()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        batch = {n: torch.stack([data[i][n] for i in range(8 * step, 8 * step + 8)]) for n in ("input_ids", "labels")}
        loss = mean_square(model(batch["input_ids"]), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for got_losses, parameters, _ in run_ranks(2, train_module, make_plan(**layout), data):
        assert got_losses == pytest.approx(losses, abs=1e-12, rel=0)
        assert all(torch.allclose(parameters[n], p, rtol=0, atol=1e-12) for n, p in model.named_parameters())


@pytest.mark.parametrize(("spoil", "code"), [("short", "BATCH_SPLIT"), ("ignored", "EMPTY"), ("poison", "TRAINING")])
def test_a_bad_batch_stops_all_ranks_and_leaves_the_weights(spoil: str, code: str) -> None:
    """Wrong size, nothing to learn, not a number: every rank raises the same error before any update."""
    from tests.executor.harness import run_ranks
    from tests.executor.workers import refusal

    plan = make_plan(dp_replicate=2, micro_batch=4)
    for got_code, sentence, untouched in run_ranks(2, refusal, plan, spoil):
        assert got_code == code
        assert sentence.endswith(".")
        assert untouched or spoil == "poison"  # NaN differs from itself, and the poisoned weight was spoilt by hand


@pytest.mark.parametrize(
    ("layout", "kind", "code"),
    [
        ({"tp": 2}, "module", "UNSUPPORTED"),
        ({"pp": 2, "accumulation": 2}, "module", "UNSUPPORTED"),
        ({"pp": 2, "accumulation": 2}, "shallow", "FACTS_DIFFER"),
        ({"tp": 2}, "reference", "UNSUPPORTED"),  # a loss function of one's own over parts of the logits
        ({"dp_replicate": 2}, "meta", "MISSING"),
        ({"dp_replicate": 2, "recompute": "full"}, "bare", "UNSUPPORTED"),
        ({"dp_replicate": 4}, "reference", "FACTS_DIFFER"),
    ],
)
def test_what_cannot_be_built_is_refused(layout: dict[str, Any], kind: str, code: str) -> None:
    """Cutting a model nobody described, values that do not exist, blocks that do not exist, another world."""
    from tests.executor.harness import run_ranks
    from tests.executor.workers import build_code

    assert run_ranks(2, build_code, make_plan(**layout), kind) == [code, code]


def test_training_goes_on_when_the_data_end() -> None:
    """A dataset of two steps serves five: it begins anew, without a process group of anybody else's."""
    from tests.executor.harness import run_alone
    from tests.executor.workers import train_on_little_data

    told, losses, ranks = run_alone(train_on_little_data, make_plan(micro_batch=4, formats=FLOAT32), 5)
    assert told == [0, 1, 2, 3, 4]
    assert len(set(losses)) == 5
    assert ranks == 1


def test_a_plan_that_cannot_run_starts_no_process_group() -> None:
    """`build` refuses before torch.distributed is touched."""
    import torch.distributed as dist

    from strategist.executor.build import build
    from strategist.executor.models import model_from_shape

    with pytest.raises(ImpossibleError, match=r"strategy\.tiling = 2"):
        build(make_plan(tiling=2), model_from_shape(tiny_llama()))
    assert not dist.is_initialized()


@pytest.mark.parametrize(("precision", "before", "during"), [("tf32", "highest", "high"), ("fp32", "high", "highest"), ("bf16", "high", "high")])  # fmt: skip
def test_products_of_fp32_are_what_the_plan_says(precision: Any, before: str, during: str) -> None:
    """A session in tf32 or fp32 sets how CUDA multiplies float32 and leaves it as it was; others do not touch it."""
    import torch

    from strategist.executor.precision import products_of_fp32

    plan, found = make_plan(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)
    with products_of_fp32(replace(plan, workload=replace(plan.workload, precision=precision))):
        assert torch.get_float32_matmul_precision() == during
    assert torch.get_float32_matmul_precision() == before
    torch.set_float32_matmul_precision(found)


@pytest.mark.parametrize(("formats", "bound"), [(FLOAT32, 2e-6), (BFLOAT16, 1e-2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "layout",
    [
        {"micro_batch": 8},
        {"dp_replicate": 2, "micro_batch": 4},
        {"dp_shard": 2, "zero": 3, "micro_batch": 4},
        {"tp": 2, "sequence_parallel": True, "micro_batch": 8},
        {"pp": 2, "micro_batch": 2, "accumulation": 4},
    ],
    ids=["single", "ddp", "zero3", "tp", "pp"],
)
def test_lower_formats_stay_near_float64(layout: dict[str, Any], formats: Any, bound: float) -> None:
    """In float32 and bfloat16 every layout follows the float64 losses as far as the format reaches."""
    from tests.executor.harness import run_ranks
    from tests.executor.reference import Task, trained_by_one_process
    from tests.executor.workers import train_task

    # initial weights are drawn in the format of the parameters, so the truth starts from float32 numbers too
    task = Task(tiny_llama(), start="float32")
    plan = make_plan(task.shape, **layout, formats=formats)
    losses, _, _ = trained_by_one_process(task)
    for got, _, _ in run_ranks(plan.mesh.world, train_task, plan, task):
        assert got == pytest.approx(losses, abs=bound, rel=0)
