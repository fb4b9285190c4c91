"""Hierarchical context parallelism in a search: between a ring and an all-to-all, looked at where somebody asks, and nothing else changed."""

from __future__ import annotations

import numpy as np
import pytest

from strategist import predict, recommend
from strategist.ask import Given, complete
from strategist.document.write import as_document
from strategist.errors import ImpossibleError, StrategistError
from strategist.planner.search import Found, search
from strategist.space.candidates import Candidates, code
from strategist.timing.estimate import step_times
from tests.strategies import candidates

LONG = {"model": "llama-2-7b", "hardware": "p4d.24xlarge:2", "seq_len": 65536, "global_batch": 1}
"""One long sequence on two nodes of eight A100 with slow links between them."""
KINDS = ("ring", "all-to-all", "hierarchical")


def found(**asked: str) -> Found:
    """A search for LONG."""
    return search(complete(Given(**LONG, **asked)).question)


def best(search_: Found, kind: str) -> int:
    """The shortest step of a kind of context parallelism, in nanoseconds."""
    row = search_.best_of(search_.candidates.is_word("context_parallel", kind))
    assert row is not None
    return int(search_.times.step[row])


def test_on_slow_links_it_is_faster_than_a_ring_and_an_all_to_all() -> None:
    """With eight neighbours of sixteen that exchange heads inside a node the step is more than a tenth shorter than of either alone."""
    asked = found(also="hierarchical")
    steps = {kind: best(asked, kind) for kind in KINDS}
    assert steps["hierarchical"] < 0.9 * min(steps["ring"], steps["all-to-all"])


def test_who_does_not_ask_gets_what_was_there_before() -> None:
    """Without the word no layout has groups inside, and beside it every other layout takes as long and as much as without."""
    unasked, asked = found(), found(also="hierarchical")
    assert "cp_inner" not in unasked.enumerated_candidates.columns
    others = asked.enumerated_candidates.where(asked.enumerated_candidates["cp_inner"] == 1)
    assert _rows(others) == _rows(unasked.enumerated_candidates)
    for kind in KINDS[:2]:
        assert best(asked, kind) == best(unasked, kind)


def _rows(some: Candidates) -> set[tuple[int, ...]]:
    names = [name for name in some.columns if name not in ("mesh", "cp_inner")]
    return set(zip(*(some[name].tolist() for name in names), strict=True))


def test_no_layout_is_there_twice() -> None:
    """Groups of one rank are a ring and groups of all an all-to-all: neither is enumerated as hierarchical."""
    every = found(also="hierarchical").enumerated_candidates
    split = every.is_word("context_parallel", "hierarchical")
    inner, cp = every["cp_inner"], every["cp"]
    assert ((inner[split] > 1) & (inner[split] < cp[split]) & (cp[split] % inner[split] == 0)).all()
    assert (inner[~split] == 1).all()


@pytest.mark.parametrize("tp", [1, 2])
def test_its_ends_are_a_ring_and_an_all_to_all(tp: int) -> None:
    """Groups of one rank would take as long as a ring and groups of all ranks as long as an all-to-all: the formulas have one origin."""
    job = complete(Given(**LONG)).question.job
    plain = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "ep": 1, "etp": 1, "zero": 3, "virtual_stages": 1, "schedule": "none", "micro_batch": 1, "accumulation": 1, "sequence_parallel": int(tp > 1), "recompute": "none", "offload": "none", "tiling": 1, "stage_split": "even"}  # fmt: skip
    mesh = plain | {"cp": 16 // tp, "tp": tp}
    rows = [
        *(mesh | {"context_parallel": "hierarchical", "cp_inner": inner} for inner in (1, 16 // tp)),
        *(mesh | {"context_parallel": kind} for kind in ("ring", "all-to-all")),
    ]
    steps = step_times(job, candidates(rows)).step
    assert np.array_equal(steps[:2], steps[2:])


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        ("cp=8,context_parallel=hierarchical", "cp_inner=nothing is none"),
        ("cp=8,context_parallel=hierarchical,cp_inner=8", "a part of cp=8; cp_inner=8 is none"),
        ("cp=8,cp_inner=3", "cp_inner=3 is none"),
        ("cp=8,context_parallel=ring,cp_inner=2", "context_parallel=ring has none"),
    ],
)
def test_groups_that_mean_nothing_have_no_price(strategy: str, sentence: str) -> None:
    """A number of neighbours goes with hierarchical context parallelism alone, and is a part of cp."""
    with pytest.raises(ImpossibleError, match=sentence):
        predict("llama-2-7b", "dgx-h100", strategy=strategy, seq_len=8192, global_batch=8)


def test_heads_must_divide_over_the_neighbours() -> None:
    """Grouped heads are shared out among the neighbours, not among all: 8 of them go with 8 neighbours of 16 ranks, not with 16 ranks."""
    job = {"seq_len": 65536, "global_batch": 1}
    legal = predict("llama-3.1-8b", "dgx-h100:2", strategy="cp=16,cp_inner=8,zero=3", **job)
    assert (legal.legal, legal.strategy.context_parallel, legal.strategy.cp_inner) == (True, "hierarchical", 8)
    cut = predict("llama-3.1-8b", "dgx-h100:2", strategy="cp=8,tp=2,cp_inner=4,zero=3,sequence_parallel=1", **job)
    refused = predict("llama-3.1-8b", "dgx-h100:4", strategy="cp=8,tp=4,cp_inner=4,zero=3,sequence_parallel=1", **job)
    assert (cut.legal, [fault.rule for fault in refused.violations]) == (True, ["LEG305"])


def test_plans_say_it_where_it_is_there_alone() -> None:
    """A plan with groups inside has their number and comes back from its file; others have no word of it."""
    plan = recommend("llama-2-7b", "p4d.24xlarge:2", seq_len=65536, global_batch=1, pin="cp_inner=8", policy="fastest")
    assert (plan.strategy.context_parallel, plan.strategy.cp_inner) == ("hierarchical", 8)
    assert as_document(plan)["strategy"]["cp_inner"] == 8
    plain = recommend("llama-2-7b", "dgx-h100")
    assert "cp_inner" not in as_document(plain)["strategy"]


def test_a_pinned_number_that_divides_no_machine_is_said() -> None:
    """A number of neighbours that the devices are no multiple of leaves nothing, for that reason."""
    with pytest.raises(StrategistError, match="cp_inner=3 does not divide the 8 devices"):
        recommend("llama-2-7b", "dgx-h100", pin="cp_inner=3")


def test_the_code_of_the_kind_comes_last() -> None:
    """Columns of numbers of older searches mean what they meant."""
    assert [code("context_parallel", kind) for kind in ("none", *KINDS)] == [0, 1, 2, 3]
