"""Lines of styled spans: what a report is before somebody prints it. Wrapping happens here, colours at the printer."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from strategist.records import dataclass

Style = Literal["plain", "title", "good", "bad", "warn", "dim", "key"]


@dataclass(frozen=True, slots=True)
class Span:
    """A run of text in one style."""

    text: str
    style: Style = "plain"


Line = tuple[Span, ...]

ROOM = 16
"""Columns that text needs beside its label; with fewer it goes under the label."""


HELD = "\u00a0"
"""A blank at which no line is broken while it is wrapped; printed as a plain blank."""

UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]i?B|[kMBT]|B|GB/s|s|ms|us|ns|%|h|d|min)(?![A-Za-z0-9]))")
"""The blank between a number and its unit."""

SHORT = 8
"""Columns below which a last line looks like a left-over."""


def line(*parts: str | Span) -> Line:
    """A line from plain text and spans."""
    return tuple(Span(part) if isinstance(part, str) else part for part in parts)


def text_of(lines: Iterable[Line]) -> str:
    """The lines as plain text, trailing blanks removed."""
    return "\n".join("".join(span.text for span in row).rstrip() for row in lines)


def folded(text: str, room: int) -> list[str]:
    """Lines of at most `room` columns. Numbers stay with their units, and a left-over word at the end gets company from
    the line above it where that costs no further line."""
    held = _held(text, room)
    whole, longest = _folded(held, room), max(map(len, held.split(" ")))
    for narrower in range(room - 1, max(room - 2 * SHORT, room // 2, longest - 1), -1):
        if len(whole) < 2 or len(whole[-1]) >= SHORT:
            break
        closer = _folded(held, narrower)
        if len(closer) > len(whole):
            break
        whole = closer
    return [piece.replace(HELD, " ") for piece in whole] or [""]


def _held(text: str, room: int) -> str:
    """The text with numbers tied to their units; what is too long to be held together is broken at its blanks."""
    words = UNIT.sub(HELD, text).split(" ")
    return " ".join(word if len(word) <= room else word.replace(HELD, " ") for word in words)


def _folded(held: str, room: int) -> list[str]:
    return textwrap.wrap(held, room, break_long_words=True, break_on_hyphens=False)


def wrapped(
    label: str, text: str, width: int, *, indent: int, style: Style = "plain", label_style: Style = "key"
) -> list[Line]:
    """A label in a column of `indent` characters and its text wrapped beside it; below 40 columns the text goes under."""
    narrow = width < 40 or width - indent < ROOM
    hanging = min(2, max(0, width - 12)) if narrow else indent
    pieces = folded(text, max(8, width - hanging))
    if narrow:
        head = [line(Span(label[: max(1, width)], label_style))] if label.strip() else []
        return [*head, *(line(" " * hanging, Span(piece, style)) for piece in pieces)]
    first = line(Span(label.ljust(indent), label_style), Span(pieces[0], style))
    return [first, *(line(" " * indent, Span(piece, style)) for piece in pieces[1:])]


def phrases(parts: Iterable[str], gap: str = "  ") -> str:
    """Several phrases as one text that is wrapped between them and not inside."""
    return gap.join(part.replace(" ", HELD) for part in parts)


def hung(text: str, width: int) -> list[Line]:
    """A line of a tree: what does not fit goes below, two columns deeper than the line itself."""
    body = text.lstrip(" ")
    depth = min(len(text) - len(body), max(0, width - ROOM))
    pieces = textwrap.wrap(
        body, max(8, width - depth), subsequent_indent="  ", break_long_words=True, break_on_hyphens=False
    )
    return [line(" " * depth + piece) for piece in pieces or [""]]


def bar(share: float, cells: int = 20) -> str:
    """A bar such as [#####-----] of a share between 0 and 1."""
    full = max(0, min(cells, round(share * cells)))
    return f"[{'#' * full}{'-' * (cells - full)}]"


def table(
    rows: Sequence[Sequence[str]], width: int, *, indent: int = 2, gap: int = 2, right: Collection[int] = ()
) -> list[Line]:
    """Columns, aligned to the left or, for figures, to the right; the last one is wrapped into what is left of the width."""
    if not rows:
        return []
    columns = len(rows[0])
    widths = [max(len(row[i]) for row in rows) for i in range(columns - 1)]
    left = indent + sum(widths) + gap * (columns - 1)
    if width - left < ROOM:
        return [piece for row in rows for piece in wrapped("", "  ".join(row), width, indent=indent)]
    lines: list[Line] = []
    for row in rows:
        cells = [
            cell.rjust(size) if i in right else cell.ljust(size)
            for i, (cell, size) in enumerate(zip(row[:-1], widths, strict=True))
        ]
        head = " " * indent + "".join(cell + " " * gap for cell in cells)
        lines.extend(wrapped(head, row[-1], width, indent=left, label_style="plain"))
    return lines
