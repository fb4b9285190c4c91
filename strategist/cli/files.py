"""Where answers of commands go: the file of `--out`, the terminal, or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from strategist.cli.arguments import Namespace
from strategist.cli.output import note, show_document, show_lines
from strategist.reports.lines import Line
from strategist.writing import check_target, write_file


def check_out(options: Namespace) -> None:
    """Refuse the target of `--out`, if there is one, before any work is done. Raises what `check_target` raises."""
    if options.out is not None:
        check_target(options.out, "--out", force=options.force)


def deliver(document: Any, options: Namespace, lines: Callable[[], Sequence[Line]]) -> None:
    """Write an answer to the file of `--out`, and print it: the document with `--json`, nothing with `--quiet`, else the lines."""
    write_document(document, options)
    if options.json:
        show_document(document)
    elif not options.quiet:
        show_lines(lines(), no_color=options.no_color)


def write_document(document: Any, options: Namespace) -> None:
    """Write a document to the file of `--out`, if there is one, and say so on stderr. Raises what `write_file` raises."""
    if options.out is None:
        return
    from strategist.document.write import dump

    write_file(options.out, dump(document), "--out", force=options.force)
    note(f"wrote {options.out}", quiet=options.quiet or options.json)
