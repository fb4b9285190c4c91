"""`strategist schema`: the JSON schema of a Plan."""

from __future__ import annotations

from collections.abc import Sequence

from strategist.cli.arguments import build_parser, parse
from strategist.cli.flags import COMMON
from strategist.cli.output import show_document
from strategist.document.load import schema


def run(words: Sequence[str]) -> int:
    """Print the schema; it is JSON with and without --json."""
    parse(build_parser("schema", "Print the JSON schema of a Plan.", COMMON), words)
    show_document(schema())
    return 0
