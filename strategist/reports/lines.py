"""Lines of styled spans: what a report is before somebody prints it. Wrapping happens here, colours at the printer."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
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


def line(*parts: str | Span) -> Line:
    """A line from plain text and spans."""
    return tuple(Span(part) if isinstance(part, str) else part for part in parts)


def text_of(lines: Iterable[Line]) -> str:
    """The lines as plain text, trailing blanks removed."""
    return "\n".join("".join(span.text for span in row).rstrip() for row in lines)


def wrapped(
    label: str, text: str, width: int, *, indent: int, style: Style = "plain", label_style: Style = "key"
) -> list[Line]:
    """A label in a column of `indent` characters and its text wrapped beside it; below 40 columns the text goes under."""
    narrow = width < 40 or width - indent < ROOM
    hanging = min(2, max(0, width - 12)) if narrow else indent
    pieces = textwrap.wrap(text, max(8, width - hanging), break_long_words=True, break_on_hyphens=False) or [""]
    if narrow:
        head = [line(Span(label[: max(1, width)], label_style))] if label.strip() else []
        return [*head, *(line(" " * hanging, Span(piece, style)) for piece in pieces)]
    first = line(Span(label.ljust(indent), label_style), Span(pieces[0], style))
    return [first, *(line(" " * indent, Span(piece, style)) for piece in pieces[1:])]


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


def table(rows: Sequence[Sequence[str]], width: int, *, indent: int = 2, gap: int = 2) -> list[Line]:
    """Left-aligned columns; the last one is wrapped into what is left of the width."""
    if not rows:
        return []
    columns = len(rows[0])
    widths = [max(len(row[i]) for row in rows) for i in range(columns - 1)]
    left = indent + sum(widths) + gap * (columns - 1)
    if width - left < ROOM:
        return [piece for row in rows for piece in wrapped("", "  ".join(row), width, indent=indent)]
    lines: list[Line] = []
    for row in rows:
        head = " " * indent + "".join(cell.ljust(size + gap) for cell, size in zip(row[:-1], widths, strict=True))
        lines.extend(wrapped(head, row[-1], width, indent=left, label_style="plain"))
    return lines
