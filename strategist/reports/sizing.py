"""A Sizing as text: the three answers first, then everything that was looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from strategist.document.sizing import Largest, Machines, Sizing
from strategist.facts.parameters import count
from strategist.facts.resolved import Assumption
from strategist.reports.brief import batch_words
from strategist.reports.lines import HELD, Line, line, table, wrapped
from strategist.units import counted, format_count, format_duration, format_gib, format_seconds

INDENT = 12


def sizing_text(found: Sizing, width: int = 80, *, verbose: bool = False) -> list[Line]:
    """The whole report in lines of at most `width` columns; machines that fewer of their kind outrun only where it is `verbose`."""
    shown = list(found.looked_at) if verbose else worth_their_devices(found.looked_at)
    work = found.workload
    parameters = format_count(count(found.model).total)
    unit = found.model.unit
    batch = batch_words(unit, work.seq_len, work.global_batch, work.target_len)
    job = f"{found.model.name} ({parameters}) on {counted(work.tokens or 0, unit.removesuffix('s'), format_count(work.tokens or 0))}, {batch} per step"
    by = "no deadline" if found.deadline_s is None else f"in {format_duration(found.deadline_s)}"
    return [
        *wrapped("job", f"{job}, {by}", width, indent=INDENT),
        *_assumed(found.assumptions, width),
        *_unfinished(found, width),
        line(""),
        *_answer("least", found.least, width),
        *_cheapest(found, width),
        *_answer("fastest", found.fastest, width),
        line(""),
        *wrapped("", "looked at", width, indent=0, style="key"),
        *table([_cells(machines) for machines in shown], width, right=(0, 2, 3, 4, 5)),
        *_outrun(len(found.looked_at) - len(shown), width),
        line(""),
        *_failures(found.least, width),
    ]  # fmt: skip


def largest_text(found: Largest, width: int = 80) -> list[Line]:
    """The largest that fits, and the next that does not."""
    title, unit, words = WORDS[found.what]
    beyond = "" if found.too_large is None else f"; {words(found.too_large)} does not fit"
    beyond += _positions(found)
    text = f"{found.family}: {found.layout}; step {format_seconds(found.step_s)}, {format_gib(found.peak_bytes)} of {format_gib(found.usable_bytes)} usable"
    return [
        *_assumed(found.assumptions, width),
        line(""),
        *wrapped("largest", f"{title}: {words(found.value)} {unit}{beyond}", width, indent=INDENT, style="title", label_style="good"),
        *wrapped("", text, width, indent=INDENT),
    ]  # fmt: skip


def worth_their_devices(looked_at: Sequence[Machines]) -> list[Machines]:
    """Those of which no fewer devices of the same kind end as early: more of them would be paid for nothing."""
    best: dict[str, float] = {}
    worth = []
    for machines in sorted(looked_at, key=lambda one: one.gpus):
        if machines.run_seconds < best.get(machines.gpu, math.inf):
            best[machines.gpu] = machines.run_seconds
            worth.append(machines)
    return worth


def _positions(found: Largest) -> str:
    """Where sequences end for another reason than memory, or go beyond what the model was made for."""
    if found.positions is None or found.value < found.positions:
        return ""
    if found.value == found.positions:
        return "; the model has no more positions"
    return f"; the model was made for {found.positions:,} positions"


WORDS: Mapping[str, tuple[str, str, Callable[[int], str]]] = {
    "seq-len": ("sequence", "tokens", lambda value: f"{value:,}"),
    "model-size": ("model", "parameters", format_count),
    "micro-batch": ("micro-batch", "sequences", lambda value: f"{value:,}"),
}
"""What people call what can be largest, what it counts, and how its values are written."""


def _assumed(said: Sequence[Assumption], width: int) -> Iterator[Line]:
    for number, one in enumerate(said, 1):
        text = f"{one.what}: {one.value}   set:{HELD}{one.flag}"
        yield from wrapped(f"assumed A{number}", text, width, indent=INDENT, style="dim")


def _unfinished(found: Sizing, width: int) -> Iterator[Line]:
    if found.unfinished:
        text = f"the time budget ran out: {', '.join(found.unfinished)}. The answers are those of what was looked at."
        yield from wrapped("untried", text, width, indent=INDENT, style="warn")


def _answer(label: str, machines: Machines, width: int) -> Iterator[Line]:
    nodes = f"{machines.nodes} node{'s' * (machines.nodes > 1)}"
    head = f"{machines.gpus:,} x {machines.gpu} ({nodes}): {format_duration(machines.run_seconds)}, {_price(machines)}"
    yield from wrapped(label, head, width, indent=INDENT, style="title", label_style="good")
    text = f"{machines.family}: {machines.layout}; step {format_seconds(machines.step_s)}, {format_gib(machines.peak_bytes)}, goodput {100 * machines.goodput.share:.1f} %"
    yield from wrapped("", text, width, indent=INDENT)


def _cheapest(found: Sizing, width: int) -> Iterator[Line]:
    if found.cheapest is not None:
        yield from _answer("cheapest", found.cheapest, width)
        return
    text = "not known: devices differ and no price was given (--price-per-gpu-hour, one for all or one for each --gpu)"
    yield from wrapped("cheapest", text, width, indent=INDENT, style="warn")


def _price(machines: Machines) -> str:
    hours = f"{format_count(machines.gpu_hours)} GPU-hours"
    return hours if machines.cost is None else f"{hours}, cost {format_count(machines.cost)}"


def _cells(machines: Machines) -> tuple[str, ...]:
    late = "" if machines.in_time else "too late; "
    return (
        f"{machines.gpus:,}",
        machines.gpu,
        format_duration(machines.run_seconds),
        f"{100 * machines.goodput.share:.1f} %",
        f"{format_count(machines.gpu_hours)} GPU-h",
        "" if machines.cost is None else f"cost {format_count(machines.cost)}",
        f"{late}{machines.family}",
    )


def _outrun(number: int, width: int) -> Iterator[Line]:
    if number:
        text = f"and {counted(number, 'size')} at which fewer of the same devices end as early (--verbose)"
        yield from wrapped("", text, width, indent=INDENT, style="dim")


def _failures(machines: Machines, width: int) -> Iterator[Line]:
    """What goodput rests on, for the least machines."""
    share = machines.goodput
    text = (
        f"on {machines.gpus:,} device{'s' * (machines.gpus > 1)} one in {format_duration(share.seconds_between_failures)}; a checkpoint of "
        f"{format_seconds(share.checkpoint_s)} every {format_duration(share.interval_s)}, {format_duration(share.restart_s)} to start again"
    )
    yield from wrapped("failures", text, width, indent=INDENT, style="dim")
