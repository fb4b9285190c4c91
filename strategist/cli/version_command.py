"""`strategist version`."""

from __future__ import annotations

from strategist import __version__
from strategist.cli.arguments import Command, Namespace
from strategist.cli.flags import COMMON
from strategist.cli.output import show_document, show_text

COMMAND = Command(
    "version",
    "Print the version.",
    COMMON,
)


def run(options: Namespace) -> int:
    """Print the version."""
    if options.json:
        show_document({"version": __version__})
    else:
        show_text(f"strategist {__version__}")
    return 0
