"""Printing: the only module with `print`. Results on stdout, everything else on stderr; colours only for people."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from strategist.errors import NoPlanError, StrategistError
from strategist.reports.lines import Line, Style, text_of, wrapped
from strategist.units import format_seconds

if TYPE_CHECKING:
    from strategist.cli.arguments import Namespace

COLOURS: Mapping[Style, str] = {
    "plain": "", "title": "bold", "good": "bold green", "bad": "bold red", "warn": "yellow", "dim": "dim", "key": "cyan"
}  # fmt: skip


def width() -> int:
    """Columns of the terminal, or of COLUMNS; 80 when there is neither."""
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and int(said) > 0:
        return max(8, int(said))
    try:
        return max(8, os.get_terminal_size(sys.stdout.fileno()).columns or 80)  # 0 where nobody set the size
    except (OSError, ValueError, AttributeError):
        return 80


def show_lines(lines: Sequence[Line], *, no_color: bool = False) -> None:
    """Print a report; through rich when a person with a colour terminal reads it."""
    if _wants_colour(no_color):
        _print_with_rich(lines)
    else:
        print(text_of(lines))


def _wants_colour(no_color: bool) -> bool:
    if no_color or os.environ.get("NO_COLOR"):
        return False
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def _print_with_rich(lines: Sequence[Line]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True, force_terminal=True)
    for row in lines:
        console.print(Text.assemble(*((span.text, COLOURS[span.style]) for span in row)))


def show_text(text: str) -> None:
    """Print plain text."""
    print(text, end="" if text.endswith("\n") else "\n")


def show_document(document: Any) -> None:
    """Print one JSON document, in the letters that stdout can carry."""
    from strategist.document.write import dump

    text = dump(document)
    if (sys.stdout.encoding or "").lower() != "utf-8":
        text = "".join(c if c.isascii() else json.dumps(c)[1:-1] for c in text)
    print(text, end="")


def note(text: str, *, quiet: bool = False) -> None:
    """A remark on stderr."""
    if not quiet:
        print(text, file=sys.stderr)


def show_error(error: StrategistError, *, as_json: bool) -> None:
    """An error: a JSON object on stdout under --json, else sentences on stderr."""
    if as_json:
        show_document({"error": error.as_document()})
        return
    print(text_of(_error_lines(error)), file=sys.stderr)


def _error_lines(error: StrategistError) -> list[Line]:
    columns = width()
    where = f" (value: {error.value})" if error.value and error.value not in error.message else ""
    label = f"E_{error.code}"
    indent = max(12, len(label) + 2)
    lines = wrapped(label, f"{error.message}{where}", columns, indent=indent)
    if isinstance(error, NoPlanError):
        for link in error.chain:
            lines += wrapped("", link, columns, indent=indent)
        if error.fixes:
            lines += wrapped("", "cheapest changes that make it feasible (each planned again)", columns, indent=0)
        for number, fix in enumerate(error.fixes, 1):
            lines += wrapped(f"  {number}", fix, columns, indent=indent)
    if error.hint and not (isinstance(error, NoPlanError) and error.fixes):
        lines += wrapped("", error.hint, columns, indent=indent)
    for other in error.also:
        lines += _error_lines(other)
    return lines


class Progress:
    """A bar of finished steps on stderr: rich's on a terminal, one plain line per step otherwise, nothing when quiet."""

    def __init__(self, total: int | None, *, quiet: bool = False, start: str = "starting the ranks") -> None:
        self.total, self.quiet, self.start = total, quiet, start
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self.total is not None and not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = RichProgress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(self.start, total=self.total)
        return self

    def expect(self, more: int, text: str) -> None:
        """That many further steps are coming; `text` says of what."""
        self.total = (self.total or 0) + more
        if self._bar is not None:
            self._bar.update(self._task, total=self.total, description=text)
        else:
            note(text, quiet=self.quiet)

    def advance(self, text: str, *, brief: str) -> None:
        """One more step is finished; `text` says how it went, `brief` the same in the few columns beside a bar."""
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=brief)
        else:
            note(text, quiet=self.quiet)

    def show(self, done: int, total: int, text: str) -> None:
        """So many of so many steps are finished, on a terminal."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=text)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def watched(options: Namespace) -> Iterator[Patience | None]:
    """Who may be told how far a long answer is: a bar on a terminal, nobody where a program reads or quiet was asked for."""
    with Patience() as patience:
        yield patience if sys.stderr.isatty() and not (options.quiet or options.json) else None


class Patience:
    """A bar for a search that takes longer than anybody expects: nothing is drawn before `after` seconds, and nothing but on a
    terminal."""

    def __init__(self, after: float = 2.0) -> None:
        self.after, self._start = after, time.perf_counter()
        self._bar: Progress | None = None

    def __enter__(self) -> Patience:
        return self

    def __call__(self, words: str, done: int, total: int, best_s: float | None) -> None:
        """How far a search is, and the seconds of the best step so far."""
        if self._bar is None and time.perf_counter() - self._start >= self.after:
            self._bar = Progress(total, start=words).__enter__()
        if self._bar is not None:
            self._bar.show(done, total, words if best_s is None else f"{words}, best so far {format_seconds(best_s)}")

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.__exit__()
