"""What differs between two Plans, in words: layout, step and memory first, then every field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from strategist.document.difference import Difference
from strategist.document.plan import Plan
from strategist.errors import escaped
from strategist.reports.brief import INDENT, mesh_words, option_words
from strategist.reports.lines import Line, hung, line, wrapped
from strategist.units import format_gib, format_seconds

NO_DIFFERENCE = "The plans are the same, field by field."


def difference_text(old: Plan, new: Plan, found: Sequence[Difference], width: int = 80) -> list[Line]:
    """The whole report in lines of at most `width` columns."""
    if not found:
        return wrapped("", NO_DIFFERENCE, width, indent=0)
    fields = f"{len(found)} field{'s' * (len(found) > 1)}"
    return [
        *wrapped("different", fields, width, indent=INDENT, style="title"),
        *_headlines(old, new, width),
        line(""),
        *(row for one in found for row in hung(f"  {sentence(one)}", width)),
    ]


def _headlines(old: Plan, new: Plan, width: int) -> Iterator[Line]:
    """Layout, step and memory, where they differ."""
    layouts = [f"{mesh_words(plan)}, {option_words(plan)}, {plan.batch_identity}" for plan in (old, new)]
    steps = [plan.time.step_ns for plan in (old, new)]
    peaks = [plan.memory.worst.device for plan in (old, new)]
    if layouts[0] != layouts[1]:
        yield from wrapped("layout", f"{layouts[0]} -> {layouts[1]}", width, indent=INDENT)
    for label, pair, words in (("step", [ns / 1e9 for ns in steps], format_seconds), ("memory", peaks, format_gib)):
        if pair[0] != pair[1]:
            text = f"{words(pair[0])} -> {words(pair[1])}{_ratio(*pair)}"
            yield from wrapped(label, text, width, indent=INDENT)


def sentence(one: Difference) -> str:
    """One difference as a sentence: where, what it was, what it is; nothing of it steers a terminal."""
    return escaped(_said(one))


def _said(one: Difference) -> str:
    place = one.path.removeprefix("$.")
    if one.kind == "added":
        return f"{place} is new: {_shown(place, one.new)}"
    if one.kind == "removed":
        return f"{place} is gone; it was {_shown(place, one.old)}"
    if one.kind == "reordered":
        return f"{place} has another order: {', '.join(map(str, one.new))}; it was {', '.join(map(str, one.old))}"
    was, now = _shown(place, one.old), _shown(place, one.new)
    if was == now:  # they differ by less than the figures that people read
        was, now = (f"{value:,}" if isinstance(value, int) else repr(value) for value in (one.old, one.new))
    return f"{place} was {was} and is {now}{_ratio(one.old, one.new)}"


def _ratio(old: Any, new: Any) -> str:
    """How many times as large a number became."""
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (old, new))
    return f" ({new / old:.4g}x)" if numbers and old and new else ""


def _shown(place: str, value: Any) -> str:
    """A value as people read it; the name of its field says the unit."""
    if isinstance(value, dict):
        named = (f"{key} {_shown(key, item)}" for key, item in value.items() if not isinstance(item, (dict, list)))
        return ", ".join(named) or f"{len(value)} fields"
    if isinstance(value, list):
        plain = not any(isinstance(item, (dict, list)) for item in value)
        return " ".join(map(str, value)) if plain else f"{len(value)} entries"
    if value is None:
        return "nothing"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return _number(place, value)


def _number(place: str, value: float) -> str:
    if place.endswith("bytes"):
        return format_gib(value)
    if place.endswith("_ns"):
        return format_seconds(value / 1e9)
    if place.endswith(("_s", "_seconds")):
        return format_seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
