"""Hidden or exposed, by program order: whether there is other work that a collective can run beside.

- What FSDP2 gathers runs in a stream of its own, which waits for no compute: it overlaps with the work issued since the
  last gather was needed, or issued before this one is. The first gather of a pass has nothing before it.
- What FSDP2 and DDP reduce during backward is needed when backward ends: it overlaps with the backward work after it.
- Everything else overlaps with the work between it and the first operation that needs what it brings.

Work is what costs FLOP: matrix products and attention.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter

from strategist.document.observed import Exposure, ObservedCollective, Pass, TierTotal
from strategist.document.plan import Plan
from strategist.facts.tiers import Tier, group_bandwidth, tiers
from strategist.measure.kinds import group_of
from strategist.measure.messages import Message
from strategist.measure.program import shortened
from strategist.measure.recorder import Record


def collectives(record: Record, plan: Plan) -> tuple[ObservedCollective, ...]:
    """Every collective of the step that counts, equal ones together, in the order of their first."""
    levels = tiers(plan.cluster) if plan.mesh.world > 1 else ()
    judged = _Order(record)
    first = record.begin[2]
    counted: Counter[tuple[str, str, int, str, Pass, Exposure]] = Counter()
    left_out = plan.strategy.accumulation - shortened(plan).strategy.accumulation
    begin, end = second_micro_batch(record) if left_out else (0, 0)
    for place, message in enumerate(record.messages[first:], first):
        during = record.passes[message.operation]
        times = 1 + left_out if begin < message.operation <= end else 1
        key = (message.name, message.dtype, message.bytes, message.group, during, judged.exposure(place, message))
        counted[key] += times
    return tuple(
        ObservedCollective(
            op=op,
            dtype=dtype,
            bytes=size,
            axis=axis,
            ranks=group_of(plan, axis)[0],
            tier=_tier(levels, *group_of(plan, axis)),
            during=during,
            exposure=exposure,
            count=count,
        )
        for (op, dtype, size, axis, during, exposure), count in counted.items()
    )


def second_micro_batch(record: Record) -> tuple[int, int]:
    """The operations of the second micro-batch of the step that counts, between the last ones of two backward passes."""
    ends: dict[int, int] = {}
    for operation, graph in enumerate(record.graphs):
        if graph >= 0 and operation >= record.begin[0]:
            ends[graph] = operation
    first, second, *_ = ends.values()
    return first, second


def _tier(levels: tuple[Tier, ...], ranks: int, stride: int) -> str:
    link = group_bandwidth(levels, ranks, stride)
    return "" if link.tier is None else link.tier.name


def tier_totals(rows: tuple[ObservedCollective, ...]) -> tuple[TierTotal, ...]:
    """Bytes and number of all collectives by tier."""
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for row in rows:
        sizes[row.tier] += row.bytes * row.count
        counts[row.tier] += row.count
    return tuple(TierTotal(tier=tier, bytes=sizes[tier], count=counts[tier]) for tier in sizes)


class _Order:
    """Questions about the order of work and messages."""

    def __init__(self, record: Record) -> None:
        self._record, self._works = record, record.works
        self._needed = sorted(
            record.uses[place]
            for place, message in enumerate(record.messages)
            if place in record.uses and _is_gather(message)
        )

    def exposure(self, place: int, message: Message) -> Exposure:
        """What the rules above say of one message."""
        issued = message.operation
        needed = self._record.uses.get(place, len(self._record.passes))
        begin, end = issued, needed
        if _is_gather(message):
            begin = self._last_need_before(issued)
        elif not message.is_functional and message.name in ("reduce_scatter", "all_reduce"):
            end = self._end_of_backward(issued)
        return "hidden" if self._works_between(begin, end) else "exposed"

    def _last_need_before(self, operation: int) -> int:
        at = bisect_left(self._needed, operation) - 1
        begin = self._needed[at] if at >= 0 else operation
        same_step = begin >= self._record.begin[0] and self._record.passes[begin] != "update"
        return begin if same_step else operation

    def _end_of_backward(self, operation: int) -> int:
        """The first operation after this one that is neither backward nor recomputation."""
        passes = self._record.passes
        end = operation
        while end < len(passes) and passes[end] in ("backward", "recompute"):
            end += 1
        return end

    def _works_between(self, begin: int, end: int) -> bool:
        return bisect_left(self._works, end) > bisect_right(self._works, begin)


def _is_gather(message: Message) -> bool:
    return message.name == "all_gather" and not message.is_functional
