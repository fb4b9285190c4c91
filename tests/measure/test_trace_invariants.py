"""What a trace may never break: every byte has one home, every byte goes back, and shares are exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strategist.document.observed import RankObservation
from strategist.document.plan import Plan
from tests.examples import by_night
from tests.measure.recordings import LedgerFacts, ledger_of, traced
from tests.plans import BFLOAT16, FLOAT32, make_plan, tiny_llama

pytestmark = pytest.mark.slow

SHAPE = tiny_llama(layers=2, hidden=64, vocab=256, ffn_hidden=128, heads=8, kv_heads=4, head_dim=8, max_seq=128)
RESTING = {"parameters", "optimizer", "activations", "gradients", "gather_buffers", "pipeline_buffers", "host", "drive"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"accumulation": 2},
    "ddp": {"dp_replicate": 4, "accumulation": 2},
    "zero1": {"dp_shard": 4, "zero": 1},
    "zero1-3d": {"pp": 2, "dp_shard": 2, "zero": 1, "tp": 2, "accumulation": 2},
    "zero1-replicas": {"dp_shard": 2, "dp_replicate": 2, "zero": 1, "tp": 2, "accumulation": 3},
    "zero2": {"dp_shard": 4, "zero": 2, "accumulation": 2},
    "zero3": {"dp_shard": 4, "zero": 3, "recompute": "full", "micro_batch": 2},
    "hsdp-selective": {"dp_replicate": 2, "dp_shard": 2, "zero": 3, "recompute": "selective", "accumulation": 3},
    "offload": {"dp_shard": 4, "zero": 3, "offload": "parameters"},
    "offload to a drive": {"dp_shard": 4, "zero": 3, "offload": "nvme"},
    "compile": {"dp_shard": 4, "zero": 3, "compile": True},
    "tp": {"tp": 4, "sequence_parallel": True},
    "pp": {"pp": 2, "accumulation": 4},
    "gpipe": {"pp": 2, "accumulation": 4, "schedule": "gpipe", "recompute": "full"},
    "interleaved": {"pp": 2, "virtual_stages": 2, "dp_shard": 2, "zero": 3, "accumulation": 4},
    "3d": {"pp": 2, "dp_shard": 2, "zero": 2, "tp": 2, "accumulation": 2},
}


@pytest.mark.parametrize("name", by_night(LAYOUTS, ("zero1-replicas", "gpipe", "3d", "zero2")))
def test_every_byte_has_one_home_and_shares_are_exact(name: str) -> None:
    """Of the first and the last rank of each kind of strategy: at each of thousands of instants the terms add up to the bytes alive, a
    step leaves what it found, and at rest a rank holds its share of weights, gradients and twice that of moments, byte for byte."""
    shape = replace(SHAPE, layers=4) if "pp" in LAYOUTS[name] else SHAPE
    plan = make_plan(shape, seq_len=64, formats=BFLOAT16, backend="nccl", **LAYOUTS[name])
    for rank in {0, plan.mesh.world - 1}:
        ledger = ledger_of(plan, rank)
        _assert_terms_add_up_and_everything_goes_back(ledger)
        _assert_state_is_the_exact_share(plan, ledger.seen, _parts(plan, rank))


def _assert_terms_add_up_and_everything_goes_back(ledger: LedgerFacts) -> None:
    assert ledger.instants > 500
    assert (ledger.mismatches, ledger.negative) == (0, 0)
    assert ledger.before == ledger.after
    assert ledger.resting_roles <= RESTING


def _assert_state_is_the_exact_share(plan: Plan, seen: RankObservation, parts: list[int]) -> None:
    shards = plan.mesh.dp_shard if plan.strategy.zero >= 2 else 1
    on_device = plan.strategy.offload == "none"
    stored = 4 * sum(size // shards for size in parts) * on_device
    step = next(m for m in seen.memory.moments if m.moment == "optimizer step")
    assert (step.term("parameters"), step.term("gradients")) == (stored, stored)
    if plan.strategy.zero != 1:  # there whole tensors go to ranks, as evenly as they do
        counters = 4 * len(parts) * on_device
        assert step.term("optimizer") == 2 * stored + counters


def _parts(plan: Plan, rank: int) -> list[int]:
    """Elements of every parameter of a rank's stage, cut by tp; all sizes divide."""
    stage, tp = plan.strategy.stages[rank // plan.mesh.stride("pp") % plan.mesh.pp], plan.mesh.tp
    h, f, kv = SHAPE.hidden, SHAPE.ffn_hidden, SHAPE.kv_heads * SHAPE.head_dim
    layer = [h * h // tp] * 2 + [h * kv // tp] * 2 + [h * f // tp] * 3 + [h] * 2
    table = SHAPE.vocab * h // tp
    return layer * stage.layer_count + [table] * stage.embedding + [table, h] * stage.head


def test_three_micro_batches_stand_for_more() -> None:
    """Each micro-batch beyond the second sends the same, traced or not, and the peak does not change."""
    seen = {
        m: traced(make_plan(SHAPE, seq_len=64, formats=BFLOAT16, dp_shard=2, zero=3, accumulation=m)) for m in (2, 3, 7)
    }
    assert 3 * seen[7].FLOP == 7 * seen[3].FLOP
    assert _sent(seen[7]) - _sent(seen[3]) == 4 * (_sent(seen[3]) - _sent(seen[2]))
    steady = ("parameters", "gradients", "optimizer", "gather_buffers", "logits")
    assert len({tuple(seen[m].memory.peak.term(name) for name in steady) for m in seen}) == 1


def _sent(seen: RankObservation) -> int:
    return sum(row.bytes * row.count for row in seen.collectives)


def test_odd_sizes_break_nothing() -> None:
    """Shards that do not divide, odd vocabularies and tied ends: the step leaves what it found."""
    odd = replace(SHAPE, vocab=251, tied=True, hidden=40, heads=5, kv_heads=1, head_dim=8)
    ledger = ledger_of(make_plan(odd, seq_len=64, formats=FLOAT32, dp_shard=3, zero=3, accumulation=2), 2)
    assert (ledger.mismatches, ledger.before) == (0, ledger.after)


@pytest.mark.parametrize(
    "layout", [{"dp_replicate": 2, "dp_shard": 2, "zero": 3}, {"dp_replicate": 4, "tp": 2}, {"dp_replicate": 8}],
    ids=["hsdp", "ddp x tp", "ddp"],
)  # fmt: skip
def test_replicas_average_once_a_step(layout: dict[str, Any]) -> None:
    """Four micro-batches are joined between replicas as often, and with as many bytes, as one."""
    one, four = (_joined(make_plan(SHAPE, seq_len=64, formats=BFLOAT16, accumulation=m, **layout)) for m in (1, 4))
    assert four == one
    assert sum(one.values()) > 0


def test_norms_are_summed_once_a_step() -> None:
    """Under sequence parallelism each rank has a term of the gradients of norms: all are added up in one message a step, whatever the
    number of micro-batches, of which each has three messages for its loss."""
    layout = {"tp": 2, "sequence_parallel": True, "dp_shard": 2, "zero": 3}
    one, four = (
        sum(row.count for row in traced(plan).collectives if (row.axis, row.op) == ("tp", "all_reduce"))
        for plan in (make_plan(SHAPE, seq_len=64, formats=BFLOAT16, accumulation=m, **layout) for m in (1, 4))
    )
    assert four - one == 3 * 3


def _joined(plan: Plan) -> dict[int, int]:
    """How many all-reduces of each size the replicas of a rank take part in."""
    found = [row for row in traced(plan).collectives if (row.axis, row.op) == ("dp_replicate", "all_reduce")]
    return {size: sum(row.count for row in found if row.bytes == size) for size in {row.bytes for row in found}}
