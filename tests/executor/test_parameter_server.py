"""Tables of embeddings on a server, all else under DDP: training is that of one process, in float64."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strategist.document.plan import NumberFormats, Plan
from strategist.errors import ImpossibleError
from strategist.executor.support import layout_obstacles
from strategist.facts.model import ModelShape
from strategist.measure.rehearse import rehearse
from tests.plans import BFLOAT16, FLOAT32, FLOAT64, make_plan, tiny_gpt2, tiny_llama, tiny_mixtral

pytestmark = pytest.mark.slow

LAYOUTS: tuple[tuple[ModelShape, dict[str, Any]], ...] = (
    (tiny_llama(), {"dp_replicate": 2, "accumulation": 2, "recompute": "full"}),
    (tiny_llama(), {"dp_replicate": 4, "loss": "chunked"}),
    (tiny_gpt2(tied=False), {"dp_replicate": 2}),
    (tiny_mixtral(), {"dp_replicate": 4, "accumulation": 2}),
)
SERVED = {"tables": "server"}
FLOAT16 = replace(BFLOAT16, compute="float16")


def wait_until(holds: Callable[[], bool]) -> bool:
    """Whether something holds within a minute."""
    end = time.monotonic() + 60.0
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def with_tables(plan: Plan) -> Plan:
    """The plan with its tables on a server."""
    return replace(plan, strategy=replace(plan.strategy, tables="server"))


@pytest.mark.parametrize(
    ("shape", "layout"), LAYOUTS, ids=lambda part: part.name if isinstance(part, ModelShape) else str(part)
)
def test_a_language_model_whose_tokens_lie_on_a_server_trains_as_in_one_process(
    shape: ModelShape, layout: dict[str, Any]
) -> None:
    """Losses, gradient norms and weights of five AdamW steps at rates that change, those of the server's table too."""
    from tests.executor.harness import run_ranks
    from tests.executor.reference import GLOBAL_BATCH, Task, trained_by_one_process
    from tests.executor.workers import train_task

    task = Task(shape, ragged=True, clip_norm=0.5, scheduled=True)
    parts = layout["dp_replicate"] * layout.get("accumulation", 1)
    plan = make_plan(task.shape, **layout | SERVED | {"micro_batch": GLOBAL_BATCH // parts})
    _assert_same(run_ranks(plan.mesh.world, train_task, plan, task), trained_by_one_process(task))


def test_a_recommender_trains_as_in_one_process() -> None:
    """Two tables of bags on the server and a dense tower on two workers: what one process with all of it would do."""
    from tests.executor.harness import run_ranks
    from tests.executor.served import recommend

    plan = make_plan(dp_replicate=2, micro_batch=2, accumulation=2, **SERVED)
    _assert_same(run_ranks(2, recommend, plan), _recommender_of_one_process())


@pytest.mark.parametrize(
    ("formats", "optimizer", "bound"),
    [(FLOAT64, "sgd", 1e-12), (FLOAT32, "adamw8bit", 5e-6), (BFLOAT16, "adamw", 5e-3), (FLOAT16, "adamw", 5e-3)],
    ids=["fp64", "8-bit", "bf16", "fp16"],
)
def test_ranks_start_the_server_themselves(formats: NumberFormats, optimizer: str, bound: float) -> None:
    """`train` under a plan with tables on a server gives the losses of the plan without one, and leaves no process behind."""
    from tests.executor.harness import run_ranks
    from tests.executor.served import losses_of

    local = make_plan(dp_replicate=2, micro_batch=2, accumulation=2, formats=formats, optimizer=optimizer)
    expected, (losses, *_) = (run_ranks(2, losses_of, plan) for plan in (local, with_tables(local)))
    assert losses == pytest.approx(expected[0], abs=bound, rel=0)
    assert len(set(losses)) == len(losses)


def test_ranks_train_beside_one_server_after_another() -> None:
    """torch counts meetings and leavings of a process, which a new server knows nothing of: the second training is the first again."""
    from tests.executor.harness import run_ranks
    from tests.executor.served import losses_of_two

    for first, second in run_ranks(2, losses_of_two, make_plan(dp_replicate=2, micro_batch=2, **SERVED)):
        assert first == second


def test_a_server_ends_with_the_rank_that_started_it(tmp_path: Path) -> None:
    """Killed, rank 0 cannot say goodbye; the kernel ends its server."""
    code = f"from tests.executor.served import serve_for_ever; serve_for_ever({str(tmp_path)!r})"
    with subprocess.Popen((sys.executable, "-c", code)) as rank:
        assert wait_until((tmp_path / "server").exists)
        server = Path("/proc") / (tmp_path / "server").read_text()
        was_there = server.exists()
        rank.kill()
    assert was_there
    assert wait_until(lambda: not server.exists())


def test_a_session_alone_has_no_server() -> None:
    """`build` does not start processes, and says who does."""
    from tests.executor.harness import run_ranks
    from tests.executor.served import built_alone

    plan = make_plan(dp_replicate=2, micro_batch=2, **SERVED)
    assert all("does not start" in sentence for sentence in run_ranks(2, built_alone, plan))


def _recommender_of_one_process() -> Any:
    """The same in plain torch, each batch in one piece."""
    import torch

    from tests.executor.reference import LEARNING_RATE
    from tests.executor.served import Purchases, Recommender

    model, data, losses, norms = Recommender(), Purchases(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for first in range(0, len(data), 8):
        ids, labels = (torch.stack([data[first + i][name] for i in range(8)]) for name in ("input_ids", "labels"))
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}, norms


def _assert_same(answers: list[Any], expected: Any) -> None:
    """Every worker says what one process does."""
    losses, parameters, norms = expected
    for got_losses, got_parameters, got_norms in answers:
        assert got_losses == pytest.approx(losses, abs=1e-12, rel=0)
        assert got_norms == pytest.approx(norms, abs=1e-11, rel=0)
        assert got_parameters.keys() == parameters.keys()
        assert max(float((got_parameters[name] - value).abs().max()) for name, value in parameters.items()) <= 1e-9


def test_a_worker_is_not_rehearsed() -> None:
    """Its server is somebody else."""
    with pytest.raises(ImpossibleError, match="cannot be rehearsed"):
        rehearse(make_plan(dp_replicate=2, **SERVED), device="cpu")


@pytest.mark.parametrize(
    "layout",
    [{"dp_shard": 2, "zero": 3}, {"tp": 2}, {}, {"dp_replicate": 2, "replicas": "threads"}, {"dp_replicate": 2, "optimizer": "muon"}],
    ids=str,
)  # fmt: skip
def test_a_server_goes_with_ddp_alone(layout: dict[str, Any]) -> None:
    """What cuts or moves the other weights is refused, and so is a head that is the table."""
    assert layout_obstacles(make_plan(**layout)) == ()
    assert {o.place for o in layout_obstacles(make_plan(**layout | SERVED))} == {"strategy.tables"}
    assert layout_obstacles(make_plan(dp_replicate=2, **SERVED)) == ()
    (tied,) = layout_obstacles(make_plan(tiny_llama(tied=True), dp_replicate=2, **SERVED))
    assert "no table of embeddings" in tied.sentence


def test_tables_that_do_more_than_give_rows_are_refused() -> None:
    """Padding, limits on norms and weights that two modules share would be lost on the way."""
    from torch import nn

    from tests.executor.served import Recommender, refused_by

    shared = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    shared[1].weight = shared[0].weight
    odd = (nn.Embedding(4, 2, padding_idx=0), nn.EmbeddingBag(4, 2, max_norm=1.0), shared, nn.Linear(2, 2))
    assert all("no tables" in refused_by(nn.Sequential(module)) for module in odd)
    assert refused_by(Recommender()) == "server"


def test_a_plan_for_a_recommender_names_the_parameter_server() -> None:
    """Where tables outweigh the layers of a module, and there alone, the plan says what keeps them once; it chooses DDP itself."""
    from torch import nn

    from strategist import recommend
    from tests.executor.served import Recommender

    small, large = Recommender(), Recommender()
    large.bought = nn.EmbeddingBag(100_000, 6, mode="sum")
    small.bought, small.seen = (nn.EmbeddingBag(2, 6, mode="sum") for _ in range(2))
    machine = {"gpu": "h100-sxm-80gb", "gpus_per_node": 2, "nodes": 1}
    plans = [recommend(model, machine, seq_len=16, global_batch=8, pin="zero=0") for model in (large, small)]
    said = [{hint.code for hint in plan.hints} for plan in plans]
    assert ["W_ADV206" in codes for codes in said] == [True, False]
