"""Tables of embeddings on a server, all else under DDP: training is that of one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest

from strategist.executor.support import layout_obstacles
from tests.plans import make_plan, tiny_llama

pytestmark = pytest.mark.slow

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp_replicate": 2, "accumulation": 2, "recompute": "full"},
    {"dp_replicate": 2, "micro_batch": 4, "optimizer": "adamw"},
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_language_model_whose_tokens_lie_on_a_server_trains_as_in_one_process(
    layout: dict[str, Any], tmp_path: Any
) -> None:
    """Losses, gradient norms and weights of five AdamW steps, those of the server's table too."""
    from tests.executor.harness import run_alone_together
    from tests.executor.reference import GLOBAL_BATCH, Task, trained_by_one_process
    from tests.executor.served import serve_or_train

    task = Task(tiny_llama(), ragged=True, clip_norm=0.5)
    parts = layout["dp_replicate"] * layout.get("accumulation", 1)
    plan = make_plan(task.shape, **layout | {"micro_batch": GLOBAL_BATCH // parts})
    _assert_same(run_alone_together(3, serve_or_train, plan, task, str(tmp_path)), trained_by_one_process(task))


def test_a_recommender_trains_as_in_one_process(tmp_path: Any) -> None:
    """Two tables of bags on the server and a dense tower on two workers: what one process with all of it would do. A run that would
    save, which no checkpoint of ours can yet, is refused before its first step."""
    from tests.executor.harness import run_alone_together
    from tests.executor.served import serve_or_train

    plan = make_plan(dp_replicate=2, micro_batch=2, accumulation=2)
    _assert_same(run_alone_together(3, serve_or_train, plan, None, str(tmp_path)), _recommender_of_one_process())


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
    """Every worker says what one process does; the server says nothing."""
    losses, parameters, norms = expected
    workers = [answer for answer in answers if answer is not None]
    assert len(workers) == len(answers) - 1
    for got_losses, got_parameters, got_norms in workers:
        assert got_losses == pytest.approx(losses, abs=1e-12, rel=0)
        assert got_norms == pytest.approx(norms, abs=1e-11, rel=0)
        assert got_parameters.keys() == parameters.keys()
        assert max(float((got_parameters[name] - value).abs().max()) for name, value in parameters.items()) <= 1e-9


@pytest.mark.parametrize(
    "layout",
    [{"dp_shard": 2, "zero": 3}, {"tp": 2}, {"dp_replicate": 2, "replicas": "threads"}, {"dp_replicate": 2, "offload": "optimizer"}],
    ids=str,
)  # fmt: skip
def test_a_server_goes_with_ddp_alone(layout: dict[str, Any]) -> None:
    """What cuts or moves the other weights is refused, and so is a head that is the table."""
    from strategist.executor.parameter_server import server_obstacles

    plan = make_plan(**layout)
    assert layout_obstacles(plan) == ()
    assert [o.place for o in server_obstacles(plan)] == ["strategy.zero"]
    assert list(server_obstacles(make_plan(dp_replicate=2))) == []
    assert [o.place for o in server_obstacles(make_plan(tiny_llama(tied=True), dp_replicate=2))] == ["model.tied"]


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
