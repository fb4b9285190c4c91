"""The rank of each share of an uneven batch is what a rank of an even batch with as many micro-batches is."""

from __future__ import annotations

from typing import Any

import pytest

from strategist.document.plan import Plan
from strategist.errors import ImpossibleError
from tests.examples import by_night
from tests.plans import make_plan, tiny_llama, uneven

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 3},
    "zero1": {"dp_shard": 3, "zero": 1},
    "tp": {"dp_replicate": 3, "tp": 2, "sequence_parallel": True, "recompute": "full"},
}
SHARES = ((1, 5), (1, 1), (1, 2))


def plan_with(layout: dict[str, Any], **batch: Any) -> Plan:
    """A plan for three replicas of one layout."""
    return make_plan(tiny_llama(layers=2), micro_batch=2, **layout, **batch)


@pytest.mark.parametrize("name", by_night(LAYOUTS, ("ddp", "tp")))
def test_each_share_is_traced_as_an_even_batch_would_be(name: str) -> None:
    """Bytes at every moment, collectives and FLOP of each share's rank are those of the same rank where all run as many micro-batches."""
    from strategist.measure.kinds import chosen_kinds
    from tests.measure.recordings import traced

    layout = LAYOUTS[name]
    plan = plan_with(layout, accumulation=5, uneven_batch=uneven(*SHARES))
    kinds = chosen_kinds(plan, "first,last")
    assert [kind.name for kind in kinds] == [
        "share 0 (5 micro-batches)",
        "share 1 (1 micro-batch)",
        "share 2 (2 micro-batches)",
    ]
    for kind, (_, number) in zip(kinds, SHARES, strict=True):
        own, even = traced(plan, kind.rank), traced(plan_with(layout, accumulation=number), kind.rank)
        assert (own.memory, own.operators) == (even.memory, even.operators)
        assert [(c.op, c.axis, c.bytes, c.count) for c in own.collectives] == [
            (c.op, c.axis, c.bytes, c.count) for c in even.collectives
        ]


def test_a_rehearsal_refuses_in_a_sentence() -> None:
    """One device is no device of each kind."""
    from strategist import rehearse

    with pytest.raises(ImpossibleError) as caught:
        rehearse(plan_with(LAYOUTS["ddp"], accumulation=5, uneven_batch=uneven(*SHARES)), device="cpu")
    assert caught.value.code == "UNSUPPORTED"
    assert "a device of each kind" in caught.value.message
