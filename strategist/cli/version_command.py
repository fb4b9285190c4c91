"""`strategist version`."""

from __future__ import annotations

from collections.abc import Sequence

from strategist import __version__
from strategist.cli.arguments import build_parser, parse
from strategist.cli.flags import COMMON
from strategist.cli.output import show_document, show_text


def run(words: Sequence[str]) -> int:
    """Print the version."""
    namespace = parse(build_parser("version", "Print the version.", COMMON), words)
    if namespace.json:
        show_document({"version": __version__})
    else:
        show_text(f"strategist {__version__}")
    return 0
