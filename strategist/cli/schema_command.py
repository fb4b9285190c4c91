"""`strategist schema`: the JSON schema of a Plan."""

from __future__ import annotations

from strategist.cli.arguments import Command, Namespace
from strategist.cli.flags import COMMON
from strategist.cli.output import show_document
from strategist.document.load import schema

COMMAND = Command(
    "schema",
    "Print the JSON schema of a Plan.",
    COMMON,
)


def run(options: Namespace) -> int:
    """Print the schema; it is JSON with and without --json."""
    show_document(schema())
    return 0
