"""What a rung of the ladder saw, for people: the peak of each kind of rank, what it sends, and what stood for what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from strategist.document.observed import Observed, RankObservation
from strategist.reports.lines import Line, Span, line, table, wrapped
from strategist.units import format_count, format_gib

INDENT = 14


def observed_text(observed: Observed, width: int = 80) -> list[Line]:
    """The report of `strategist trace`."""
    rows = [line(Span(f"{observed.rung}: {observed.model}, torch {observed.torch}", "title"))]
    for rank in observed.ranks:
        rows += [line(""), *_rank_lines(rank, width)]
    names = {row.name: row.sentence for rank in observed.ranks for row in rank.substitutions}
    if names:
        rows += [line(""), line(Span("what stood for what", "key")), *table(list(names.items()), width)]
    return rows


def _rank_lines(rank: RankObservation, width: int) -> Iterator[Line]:
    memory = rank.memory
    peak = memory.peak
    place = f"{peak.moment}; {peak.module or 'outside the blocks'}, {peak.during}, after {peak.operator}"
    yield line(Span(f"{rank.kind} (rank {rank.rank})", "title"))
    yield from wrapped("peak", f"{format_gib(peak.allocated)} at: {place}", width, indent=INDENT)
    yield from wrapped("reserved", f"{format_gib(memory.reserved)} ({memory.reserved_basis})", width, indent=INDENT)
    if memory.host:
        yield from wrapped("host", format_gib(memory.host), width, indent=INDENT)
    heads = [("term", *(m.moment.replace("backward", "bwd") for m in memory.moments))]
    names = list(dict.fromkeys(t.name for m in memory.moments for t in m.terms))
    cells = [(name, *(format_gib(m.term(name)) for m in memory.moments)) for name in names]
    yield from table([*heads, *cells], width)
    yield from wrapped("sends", _sent(rank) or "nothing", width, indent=INDENT)
    yield from wrapped("FLOP", f"{format_count(rank.FLOP)} in the step", width, indent=INDENT)


def _sent(rank: RankObservation) -> str:
    """Bytes and number of collectives by axis and operation."""
    sizes: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for row in rank.collectives:
        sizes[row.axis, row.op] += row.bytes * row.count
        counts[row.axis, row.op] += row.count
    return "; ".join(
        f"{axis} {op} {format_gib(size)} in {counts[axis, op]}" for (axis, op), size in sizes.most_common()
    )
