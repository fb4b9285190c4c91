"""What a rung of the ladder saw, for people: the peak of each kind of rank, what it sends, and what stood for what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from strategist.document.estimate import TimeTerm
from strategist.document.observed import Observed, RankObservation
from strategist.reports.lines import Line, Span, line, table, wrapped
from strategist.units import format_count, format_gib, format_seconds

INDENT = 14


def observed_text(observed: Observed, width: int = 80) -> list[Line]:
    """The report of `strategist trace` and of `strategist rehearse`."""
    on = f", on {observed.device}" if observed.device else ""
    rows = [line(Span(f"{observed.rung}: {observed.model}, torch {observed.torch}{on}", "title"))]
    for rank in observed.ranks:
        rows += [line(""), line(Span(f"{rank.kind} (rank {rank.rank})", "title"))]
        rows += [*_memory_lines(rank, width), *_time_lines(rank, width), *_work_lines(rank, width)]
    names = {row.name: row.sentence for rank in observed.ranks for row in rank.substitutions}
    if names:
        rows += [line(""), line(Span("what stood for what", "key")), *table(list(names.items()), width)]
    return rows


def _memory_lines(rank: RankObservation, width: int) -> Iterator[Line]:
    """The peak, what is reserved, and the bytes of each term where they are known."""
    memory = rank.memory
    place = ""
    if memory.moments:
        peak = memory.peak
        place = f" at: {peak.moment}; {peak.module or 'outside the blocks'}, {peak.during}, after {peak.operator}"
    reserved = f"{format_gib(memory.reserved)} ({memory.reserved_basis})" if memory.reserved else "not known"
    yield from wrapped("peak", f"{format_gib(memory.peak_bytes)}{place}", width, indent=INDENT)
    yield from wrapped("reserved", reserved, width, indent=INDENT)
    if memory.host:
        yield from wrapped("host", format_gib(memory.host), width, indent=INDENT)
    if memory.moments:
        heads = [("term", *(m.moment.replace("backward", "bwd") for m in memory.moments))]
        names = list(dict.fromkeys(t.name for m in memory.moments for t in m.terms))
        cells = [(name, *(format_gib(m.term(name)) for m in memory.moments)) for name in names]
        yield from table([*heads, *cells], width)


def _time_lines(rank: RankObservation, width: int) -> Iterator[Line]:
    """The step, its terms, and how fast it could be issued at best."""
    clock = rank.time
    if clock is None:
        return
    step = f"{_duration(clock.step_ns)}, median of {clock.steps}"
    fakes = f"; {_duration(clock.stand_in_ns)} more for what peers would send" if clock.stand_in_ns else ""
    yield from wrapped("step", f"{step}{fakes}", width, indent=INDENT)
    floor = (
        f"{_duration(clock.launch_floor_ns)}: {clock.launches:,} operations of {_duration(clock.launch_ns)} at least"
    )
    yield from wrapped("launch floor", floor, width, indent=INDENT)
    rows = [(term.name, _duration(term.exposed_ns), _time_note(term, clock.step_ns)) for term in clock.terms]
    yield from table(rows, width, right=(1,))


def _time_note(term: TimeTerm, step_ns: int) -> str:
    """The share of the step, and what ran beside it and again."""
    parts = [f"{100 * term.exposed_ns / step_ns:.0f} %" if step_ns else ""]
    parts += [f"{_duration(term.hidden_ns)} more beside it"] if term.hidden_ns else []
    parts += [f"{_duration(term.recomputed_ns)} of it run again"] if term.recomputed_ns else []
    return "; ".join(parts)


def _duration(ns: int) -> str:
    return format_seconds(ns / 1e9)


def _work_lines(rank: RankObservation, width: int) -> Iterator[Line]:
    """What it sends and computes, where the rung tells."""
    if rank.operators:
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
