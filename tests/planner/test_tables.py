"""Tables of embeddings on a parameter server: a choice that somebody must ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strategist import Plan, load_model, predict, recommend
from strategist.errors import ImpossibleError
from strategist.facts.modules import shape_from_module
from strategist.planner.exhaustive import recheck

JOB: dict[str, Any] = {"seq_len": 2048, "global_batch": 64}


def plan_for(pin: str | None, **more: Any) -> Plan:
    """A plan for a model whose ends are two weights."""
    return recommend("tinyllama-1.1b", "dgx-h100", pin=pin, **JOB | more)


def test_a_server_is_chosen_by_those_alone_who_ask_for_it() -> None:
    """Unasked every table is local; asked for, the same layout holds the table's weights, gradients and moments less, and waits."""
    layout = "dp_replicate=8,micro_batch=4,recompute=full"
    local, served = plan_for(layout), plan_for(f"{layout},tables=server")
    assert (plan_for(None).strategy.tables, local.strategy.tables, served.strategy.tables) == (
        "local",
        "local",
        "server",
    )
    table = local.model.vocab * local.model.hidden
    saved = {"parameters": 4 * table, "optimizer": 8 * table}
    for name, size in saved.items():
        assert local.memory.worst.term(name) - served.memory.worst.term(name) == size
    waits = {term.name: term.exposed_ns for term in served.time.terms}
    assert waits["offload"] > 0
    assert served.time.step_ns > local.time.step_ns
    assert "W_ADV207" in {hint.code for hint in served.hints}


def test_what_is_waited_for_grows_with_the_ranks_and_the_words() -> None:
    """One process serves all: twice the rows, or twice the ranks with rows of their own, take longer."""
    few, words, ranks = (
        _waiting("dgx-h100", strategy, **job)
        for strategy, job in (
            ("dp=8,micro_batch=1,tables=server", {"seq_len": 512, "global_batch": 8}),
            ("dp=8,micro_batch=1,tables=server", {"seq_len": 1024, "global_batch": 8}),
            ("dp=8,micro_batch=1,tables=server", {"seq_len": 512, "global_batch": 16}),
        )
    )
    assert few < min(words, ranks)


def _waiting(hardware: str, strategy: str, **job: Any) -> int:
    found = predict("tinyllama-1.1b", hardware, strategy=strategy, **job)
    return next(term.exposed_ns for term in found.time.terms if term.name == "offload")


@pytest.mark.slow
def test_every_layout_with_a_server_is_found_and_tried() -> None:
    """The layouts one at a time are those of the search, and none of them is better than the chosen one."""
    plan = plan_for("tables=server", certificate=True)
    again = recheck(plan)
    assert plan.certificate is not None
    assert (again.enumerated, again.holds) == (plan.certificate.enumerated, True)


@pytest.mark.parametrize(
    ("said", "rule"),
    [
        ({"model": "llama-3.2-1b"}, "LEG771"),
        ({"hardware": {"gpu": "h100-sxm-80gb", "gpus_per_node": 8, "nodes": 2}}, "LEG772"),
        ({"frontend": "deepspeed"}, "LEG773"),
        ({"method": "lora"}, "LEG774"),
        ({"optimizer": "muon"}, "LEG774"),
    ],
    ids=str,
)
def test_a_server_is_refused_where_none_would_run(said: dict[str, Any], rule: str) -> None:
    """Tied ends, several nodes, other engines and what was not tried, each by its rule."""
    words = {"model": "tinyllama-1.1b", "hardware": "dgx-h100"} | JOB | said
    with pytest.raises(ImpossibleError) as refused:
        recommend(words.pop("model"), words.pop("hardware"), pin="tables=server", **words)
    assert rule in str(refused.value.hint)


@pytest.mark.parametrize("strategy", ["tp=2,tables=server", "dp_shard=8,zero=3,tables=server"])
def test_a_server_stands_beside_whole_replicas(strategy: str) -> None:
    """A layout that cuts weights has no price with it; nor has another framework's."""
    with pytest.raises(ImpossibleError, match="parameter server"):
        predict("tinyllama-1.1b", "dgx-h100", strategy=strategy, **JOB)
    with pytest.raises(ImpossibleError, match="tables=server"):
        predict("tinyllama-1.1b", "dgx-h100", strategy="dp=8,tables=server", framework="megatron-core", **JOB)


@pytest.mark.slow
def test_the_tables_of_a_module_are_read() -> None:
    """Rows and width of each, bags among them; none where one of them is padded or lends its weight."""
    from torch import nn

    tables = {"bought": nn.EmbeddingBag(5000, 16), "seen": nn.Embedding(70, 8)}
    tower = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 1))
    plain = nn.ModuleDict({**tables, "tower": tower})
    assert sorted(shape_from_module(plain).tables) == [(70, 8), (5000, 16)]
    assert (
        shape_from_module(nn.ModuleDict({**tables, "odd": nn.Embedding(9, 4, padding_idx=0), "tower": tower})).tables
        == ()
    )
    head = nn.Linear(8, 70, bias=False)
    head.weight = tables["seen"].weight
    assert shape_from_module(nn.ModuleDict({**tables, "head": head, "tower": tower})).tables == ()


@pytest.mark.slow
def test_a_recommender_that_outgrows_its_devices_fits_beside_a_server() -> None:
    """Tables of 26 GB, of which no sample names many rows, leave the devices; the plan without a server names it."""
    from torch import nn

    with_meta = {"device": "meta"}
    model = nn.ModuleDict({
        "buyers": nn.EmbeddingBag(40_000_000, 64, **with_meta),
        "goods": nn.EmbeddingBag(60_000_000, 64, **with_meta),
        "tower": nn.Sequential(nn.Linear(128, 1024, **with_meta), nn.ReLU(), nn.Linear(1024, 1, **with_meta)),
    })  # fmt: skip
    asked = {"seq_len": 64, "global_batch": 4096, "precision": "fp32"}
    served = recommend(model, "dgx-h100", pin="tables=server", **asked)
    with pytest.raises(ImpossibleError) as refused:
        recommend(model, "dgx-h100", pin="zero=0", **asked)
    assert refused.value.code == "NO_PLAN"
    assert sum(rows * width for rows, width in served.model.tables) == 100_000_000 * 64
    assert served.memory.peak.value < 4e9


def test_a_shape_without_tables_of_its_own_has_none_to_serve() -> None:
    """A head of its own makes a table one that can be served."""
    from strategist.facts.tables import served_tables

    tied = load_model("llama-3.2-1b")
    assert served_tables(tied) == ()
    assert served_tables(replace(tied, tied=False)) == ((tied.vocab, tied.hidden),)
