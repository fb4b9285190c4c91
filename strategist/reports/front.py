"""The front of time, memory and cost as a picture of letters and a table; the account of a search, and what
would change the choice, as a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log
from string import ascii_lowercase, ascii_uppercase

from strategist.document.certificate import Certificate
from strategist.document.front import Front, FrontRow, Sensitivity
from strategist.reports.lines import HELD, Line, Span, line, phrases, table, wrapped
from strategist.units import format_gib, format_seconds, three_digits

INDENT = 12
MARKS = ascii_lowercase + ascii_uppercase
ROWS, NARROWEST, WIDEST = 10, 40, 72
"""Lines of the picture, and columns of a terminal: below the first there is none, above the second it grows no further."""


def front_lines(front: Front, device: str, width: int) -> Iterator[Line]:
    """The front: fastest first, each row with its letter in the picture. `device` is what people call one device."""
    yield line("")
    sizes = ", ".join(str(size) for size in front.sizes)
    head = f"time, memory and cost: {len(front.rows)} of {front.fitting:,} layouts that fit on {sizes} {device}s are beaten by none in all three"
    yield from wrapped("trade", head, width, indent=INDENT)
    if width >= NARROWEST and len(front.rows) > 1:
        yield from _picture(front.rows, min(width, WIDEST))
    yield from table([_cells(number, row, device) for number, row in enumerate(front.rows)], width, right=(1, 2, 3, 4))


def mark(number: int) -> str:
    """The letter of a row; rows beyond the alphabet share a sign."""
    return MARKS[number] if number < len(MARKS) else "*"


def _cells(number: int, row: FrontRow, device: str) -> tuple[str, ...]:
    cost = f"{row.gpu_hours_per_step:.3g} {device}-h" if row.cost_per_step is None else three_digits(row.cost_per_step)
    size, held = f"{row.gpus} {device}{'s' * (row.gpus > 1)}", format_gib(row.peak_bytes)
    return mark(number), size, format_seconds(row.step_ns / 1e9), held, cost, f"{row.family}: {row.layout}"


def _picture(rows: Sequence[FrontRow], width: int) -> Iterator[Line]:
    """Memory upwards, time to the right, both in equal ratios; where letters meet the faster row's stands."""
    room = width - 2
    grid = [[" "] * room for _ in range(ROWS)]
    across = _places([row.step_ns for row in rows], room)
    up = _places([row.peak_bytes for row in rows], ROWS)
    for number in reversed(range(len(rows))):
        grid[ROWS - 1 - up[number]][across[number]] = mark(number)
    most, least = (format_gib(pick(row.peak_bytes for row in rows)) for pick in (max, min))
    fast, slow = (format_seconds(pick(row.step_ns for row in rows) / 1e9) for pick in (min, max))
    yield line(Span(f"  {most}", "dim"))
    yield from (line(Span("  |", "dim"), "".join(cells).rstrip()) for cells in ([*row[: room - 1]] for row in grid))
    yield line(Span("  +" + "-" * (room - 1), "dim"))
    yield line(Span(f"  {least}; {fast}".ljust(width - len(slow)) + slow, "dim"))


def _places(values: Sequence[int], cells: int) -> list[int]:
    """Cells of some values on an axis of equal ratios."""
    low, high = log(min(values)), log(max(values))
    span = high - low or 1.0
    return [round((log(value) - low) / span * (cells - 2)) for value in values]


def certificate_lines(account: Certificate, width: int) -> Iterator[Line]:
    """What became of every layout, and what is claimed."""
    refused = ", ".join(f"{each.rule} {each.count:,}" for each in account.refused) or "none"
    scope = f" in the families {', '.join(account.among)}" if account.among else ""
    whole = " with cp = 1" if account.whole_sequences else ""
    yield line("")
    yield from wrapped("searched", f"{account.enumerated:,} layouts; refused by rule: {refused}", width, indent=INDENT)
    slower = f"{account.slower:,} slower than the best of their families, " if account.slower else ""
    text = f"{account.legal:,} legal: {slower}{account.bounded:,} hold too much at the loss alone, {account.over:,} more at their peak; {account.evaluated:,} fit and are timed"
    yield from wrapped("", text, width, indent=INDENT)
    claim = f"nothing that fits{scope}{whole} is better than what is recommended; `strategist check PLAN --exhaustive` tries all again"
    yield from wrapped("", claim, width, indent=INDENT)


def sensitivity_lines(found: Sensitivity, width: int) -> Iterator[Line]:
    """What would change the choice, nearest first, and what would not."""
    yield line("")
    for number, turn in enumerate(found.turns):
        said = f"   set:{HELD}{turn.flag}" if turn.flag else ""
        yield from wrapped("" if number else "flips", f"{turn.sentence}{said}", width, indent=INDENT)
    if found.steady:
        text = f"{phrases(found.steady, gap=', ')}: nothing from {found.low:g} to {found.high:g} times what is assumed changes the choice"
        yield from wrapped("holds", text, width, indent=INDENT, style="dim")
