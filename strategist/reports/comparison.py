"""Layouts side by side: what each is, then every term of step and memory, one column per layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from string import ascii_uppercase

from strategist.document.comparison import ComparedTerm, Comparison, Side
from strategist.reports.brief import batch_words
from strategist.reports.lines import Line, hung, line, table, wrapped
from strategist.units import format_count, format_gib, format_seconds

INDENT = 4


def comparison_text(found: Comparison, width: int = 80) -> list[Line]:
    """The whole report in lines of at most `width` columns."""
    heads = [letter(number) for number in range(len(found.sides))]
    steps = _block(
        "step", found.time, [side.time.value * 1e9 for side in found.sides], lambda ns: format_seconds(ns / 1e9)
    )
    peaks = _block("memory", found.memory, [side.memory.value for side in found.sides], format_gib)
    verdicts = [("fits", *("yes" if side.fits else "NO" for side in found.sides), "")]
    verdicts += [("legal", *("yes" if side.legal else "NO" for side in found.sides), "")]
    rows = [("", *heads, ""), *steps, *peaks, *verdicts]
    return [
        *(row for head, side in zip(heads, found.sides, strict=True) for row in _named(head, side, width)),
        line(""),
        *_table(rows, width),
        *_unequal(found, width),
    ]


def letter(number: int) -> str:
    """What the columns are called: A, B, ... Z, A2, B2, ..."""
    turn, place = divmod(number, len(ascii_uppercase))
    return f"{ascii_uppercase[place]}{turn + 1 if turn else ''}"


def _named(head: str, side: Side, width: int) -> Iterator[Line]:
    """One side in words."""
    yield from wrapped(head, f"{side.name}: {side.layout}", width, indent=INDENT, style="title")
    rates = f"{format_count(side.tokens_per_second)} {side.unit}/s, MFU {100 * side.mfu:.0f} %"
    batch = batch_words(side.unit, side.seq_len, side.global_batch, side.target_len)
    text = f"{side.model} on {side.hardware}, {batch}: {rates}"
    yield from wrapped("", text, width, indent=INDENT, style="dim")


def _block(
    title: str, terms: Sequence[ComparedTerm], totals: Sequence[float], words: Callable[[float], str]
) -> list[tuple[str, ...]]:
    """A total, how it compares with the first side's, and its terms below it."""
    ratios = [f"{total / totals[0]:.2f}x" for total in totals]
    rows = [(title, *map(words, totals), ""), ("  of A's", *ratios, "")]
    return [*rows, *((f"  {term.name}", *(words(v) if v else "-" for v in term.values), "") for term in terms)]


def _table(rows: Sequence[Sequence[str]], width: int) -> list[Line]:
    """Columns where the terminal has room for them; otherwise each row as a sentence."""
    needed = sum(max(len(row[i]) for row in rows) + 2 for i in range(len(rows[0])))
    if needed + 2 <= width:
        return [*(row for row in table(rows, max(width, needed + 20), right=range(1, len(rows[0]))))]
    heads = rows[0]
    texts = (", ".join(f"{head} {cell}" for head, cell in zip(heads[1:-1], row[1:-1], strict=True)) for row in rows[1:])
    return [piece for row, text in zip(rows[1:], texts, strict=True) for piece in hung(f"  {row[0]}: {text}", width)]


def _unequal(found: Comparison, width: int) -> Iterator[Line]:
    """What the sides do not share, because then the layout is not all that makes the difference."""
    questions = ("model", "hardware", "seq_len", "target_len", "global_batch")
    other = [name for name in questions if len({getattr(side, name) for side in found.sides}) > 1]
    if other:
        named = [
            name.replace("seq_len", "sequence length").replace("_len", " length").replace("_", " ") for name in other
        ]
        text = f"The sides answer different questions: {', '.join(named)} {'differs' if len(named) == 1 else 'differ'}."
        yield from wrapped("note", text, width, indent=6, style="warn", label_style="warn")
