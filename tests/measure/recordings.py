"""Records of traced ranks, made in processes of their own, and what tests ask of them."""

from __future__ import annotations

from dataclasses import dataclass

from strategist.document.observed import RankObservation
from strategist.document.plan import Plan
from strategist.measure.kinds import Kind, stage_of
from tests.executor.harness import run_alone


def traced(plan: Plan, rank: int = 0) -> RankObservation:
    """One rank of a plan, traced."""
    return run_alone(_observed, plan, rank, timeout_s=300.0)  # type: ignore[no-any-return]


def _observed(plan: Plan, rank: int) -> RankObservation:
    from strategist.measure.models import shape_model
    from strategist.measure.trace_rank import trace_rank

    return trace_rank(plan, Kind(f"rank {rank}", rank, stage_of(plan, rank)), shape_model(plan.model))


def traced_rise(plan: Plan) -> int:
    """Bytes of the traced peak beyond what rests before the step."""
    return int(run_alone(_rise, plan, timeout_s=300.0))


def _rise(plan: Plan) -> int:
    from strategist.measure.models import shape_model
    from strategist.measure.timeline import Timeline
    from strategist.measure.trace_rank import record_rank

    recording = record_rank(plan, 0, shape_model(plan.model))
    record = recording.record
    resting = sum(change for _, _, change in record.changes[: record.begin[1]])
    return max(total for _, total, _ in Timeline(record, recording.outline).instants()) - resting


@dataclass(frozen=True)
class LedgerFacts:
    """What an independent count of a record's bytes found: instants seen, those at which the terms do not add up or one
    is negative, bytes alive before and after the step, and what the things are for that rest; beside it what the record says itself."""

    seen: RankObservation
    instants: int
    mismatches: int
    negative: int
    before: int
    after: int
    resting_roles: set[str]


def ledger_of(plan: Plan, rank: int) -> LedgerFacts:
    """The bytes of one traced rank, counted a second time."""
    return run_alone(_ledger, plan, rank, timeout_s=300.0)  # type: ignore[no-any-return]


def _ledger(plan: Plan, rank: int) -> LedgerFacts:
    from strategist.measure.models import shape_model
    from strategist.measure.timeline import DRIVE, HOST, Timeline
    from strategist.measure.trace_rank import observation, record_rank

    recording = record_rank(plan, rank, shape_model(plan.model))
    record = recording.record
    timeline = Timeline(record, recording.outline)
    alive: dict[int, int] = {}
    sums = []
    for _, number, change in record.changes:
        if record.allocations[number].role not in (HOST, DRIVE):
            alive[number] = alive.get(number, 0) + change
        sums.append(sum(alive.values()) if len(sums) % 7 == 0 else None)  # adding everything up each time takes long
    begin = record.begin[1]
    instants = [(total, sum(terms.values()), min(terms.values())) for _, total, terms in timeline.instants()]
    counted = sums[begin:]
    return LedgerFacts(
        seen=observation(plan, Kind(f"rank {rank}", rank, stage_of(plan, rank)), recording, seconds=0.0),
        instants=len(instants),
        mismatches=sum(
            total != by_term or (seen is not None and seen != total)
            for (total, by_term, _), seen in zip(instants, counted, strict=True)
        ),
        negative=sum(least < 0 for _, _, least in instants),
        before=sum(change for _, _, change in record.changes[:begin]),
        after=sum(change for _, _, change in record.changes),
        resting_roles={allocation.role for allocation in timeline.resting()},
    )
