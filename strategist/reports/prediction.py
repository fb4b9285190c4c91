"""A Prediction as text: the verdicts first, then memory and time, then every term."""

from __future__ import annotations

from collections.abc import Iterator

from strategist.document.prediction import Prediction
from strategist.facts.profile import find_profile
from strategist.reports.brief import (
    INDENT,
    assumed_lines,
    hint_lines,
    memory_lines,
    mesh_words,
    option_words,
    time_lines,
)
from strategist.reports.interval import interval_lines
from strategist.reports.lines import Line, line, wrapped
from strategist.reports.text import stage_lines
from strategist.reports.tree import plan_tree, tree_lines
from strategist.units import format_gib


def prediction_text(found: Prediction, width: int = 80) -> list[Line]:
    """The whole report of a prediction in lines of at most `width` columns."""
    return [
        *assumed_lines(found, width),
        *wrapped("framework", find_profile(found.framework).title, width, indent=INDENT),
        line(""),
        *wrapped("layout", f"{mesh_words(found)}   {option_words(found)}", width, indent=INDENT, style="title"),
        *wrapped("  batch", found.batch_identity, width, indent=INDENT),
        *_verdicts(found, width),
        *memory_lines(found, width),
        *time_lines(found, width),
        line(""),
        *tree_lines(plan_tree(found), width),
        *interval_lines(found, width),
        *stage_lines(found, width),
        *hint_lines(found, width),
    ]


def _verdicts(found: Prediction, width: int) -> Iterator[Line]:
    if found.legal:
        yield from wrapped("  legal", "yes: no rule forbids it", width, indent=INDENT, label_style="good")
    for fault in found.violations:
        text = f"{fault.sentence} {fault.hint} [{fault.rule}]"
        yield from wrapped("  ILLEGAL", text, width, indent=INDENT, style="bad", label_style="bad")
    usable = format_gib(found.memory.usable_bytes)
    if found.fits:
        yield from wrapped("  fits", f"yes: {usable} are usable", width, indent=INDENT, label_style="good")
    else:
        yield from wrapped(
            "  OOM", f"{usable} are usable; {found.shortfall}", width, indent=INDENT, style="bad", label_style="bad"
        )
