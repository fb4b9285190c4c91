"""Judgements as text: what each file says, then its faults with what removes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strategist.document.judgement import Finding, Judgement
from strategist.errors import shown
from strategist.reports.brief import INDENT
from strategist.reports.lines import Line, Style, line, wrapped
from strategist.units import format_gib

HIDDEN = ("parameter", "gradient", "reduce", "master")
"""Formats that the compute format mostly implies; `--json` has them."""


def judgement_text(found: Sequence[Judgement], width: int = 80) -> list[Line]:
    """The reports of some files in lines of at most `width` columns."""
    rows: list[Line] = []
    for number, one in enumerate(found):
        rows += [line("")] if number else []
        rows += list(_one(one, width))
    return rows


def _one(found: Judgement, width: int) -> Iterator[Line]:
    yield from wrapped("file", f"{shown(found.file)} ({found.title})", width, indent=INDENT, style="title")
    said = ", ".join(f"{name} {shown(value)}" for name, value in found.says if name not in HIDDEN)
    if said:
        yield from wrapped("  says", said, width, indent=INDENT)
    if found.prediction is not None:
        peak, usable = found.prediction.memory.worst.device, found.prediction.memory.usable_bytes
        yield from wrapped("  memory", f"{format_gib(peak)} of {format_gib(usable)} usable", width, indent=INDENT)
    for fault in found.findings:
        yield from _fault(fault, width)
    if not found.findings:
        yield from wrapped("  ok", "no fault was found", width, indent=INDENT, label_style="good")


def faults_lines(file: str, findings: Sequence[Finding], width: int) -> list[Line]:
    """How many faults a file has, and who says them; nothing where it has none."""
    if not findings:
        return []
    failures = sum(fault.kind == "failure" for fault in findings)
    bad = "1 of them a failure" if failures == 1 else f"{failures or 'none'} of them failures"
    text = f"{len(findings)} in {shown(file)}, {bad}: strategist validate {shown(file)}"
    style: Style = "bad" if failures else "warn"
    return [line(""), *wrapped("faults", text, width, indent=INDENT, label_style=style)]


def _fault(fault: Finding, width: int) -> Iterator[Line]:
    label, style = ("  FAILURE", "bad") if fault.kind == "failure" else ("  warning", "warn")
    text = f"{fault.place}: {fault.sentence} {fault.fix} [{fault.rule}]"
    yield from wrapped(label, text, width, indent=INDENT, label_style=style)  # type: ignore[arg-type]
