"""Compressed gradients, traced: hooks send and hold what the formulas say."""

from __future__ import annotations

import pytest

from strategist import Plan, recommend
from strategist.errors import ImpossibleError
from strategist.facts.compression import compressor, low_rank, sent_of_largest
from strategist.facts.tensors import bucket_sizes
from strategist.measure.rehearse import rehearse
from strategist.measure.trace import trace
from strategist.space.candidates import WORDS
from strategist.verify import traced_ledger

pytestmark = pytest.mark.slow

NEAR = 1e-4
RANKS = 8
ALL = WORDS["compression"][1:]


def plan_for(word: str, rounds: int = 1, model: str = "llama-debug") -> Plan:
    """Eight replicas of a small model."""
    pin = f"compression={word},micro_batch=2,recompute=none"
    return recommend(model, "dgx-h100", seq_len=256, global_batch=2 * RANKS * rounds, pin=pin)


def expected_bytes(plan: Plan) -> int:
    """Bytes of the collectives that a hook calls in one step."""
    row, sizes = compressor(plan.strategy.compression), bucket_sizes(plan.model, 4)
    if row.rank:
        split = low_rank(plan.model, row.rank)
        return 4 * (split.rest + split.left + split.right)
    if row.share:
        return RANKS * 8 * sum(sent_of_largest(size, row.share) for size in sizes)
    return 2 * sum(sizes)


@pytest.mark.parametrize(("word", "rounds"), [*((word, 1) for word in ALL), ("powersgd", 3)])
def test_hooks_send_and_hold_what_is_predicted(word: str, rounds: int) -> None:
    """The bytes of all collectives of a hook are those of the formulas, once a step however many micro-batches there are; so is the
    peak, and what lasts between steps, to a ten-thousandth."""
    plan = plan_for(word, rounds)
    seen = trace(plan)
    (rank,) = seen.ranks
    sent = sum(c.bytes * c.count for c in rank.collectives if c.during == "backward" and c.axis == "dp_replicate")
    assert sent == expected_bytes(plan)
    predicted, traced = (
        {term.name: term.bytes for term in ledger.worst.terms}
        for ledger in (plan.memory, traced_ledger(plan.memory, seen))
    )
    for name in ("parameters", "gradients", "optimizer", "bucket_buffers"):
        assert predicted[name] == pytest.approx(traced[name], rel=NEAR), name
    lasting = {term.name: term.bytes for moment in rank.memory.moments[-1:] for term in moment.terms}
    row = compressor(word)
    split = low_rank(plan.model, row.rank) if row.rank else None
    owed = sum(bucket_sizes(plan.model, 4)) * row.remembers
    factors = 0 if split is None else split.left + split.right
    assert lasting.get("bucket_buffers", 0) == 4 * (owed + factors)


def test_a_hook_is_not_rehearsed() -> None:
    """Peers are noise in a rehearsal, and hooks compute with what they send."""
    with pytest.raises(ImpossibleError, match="cannot be rehearsed"):
        rehearse(plan_for("bf16"), device="cpu")
