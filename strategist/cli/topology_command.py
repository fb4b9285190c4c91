"""`strategist topology`: the machines as a tree of links, or as a drawing."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from strategist.ask import Given, machines_of
from strategist.cli.arguments import build_parser, parse
from strategist.cli.files import write_file
from strategist.cli.flags import COMMON, HARDWARE, OUTPUT, Flag
from strategist.cli.given import given_from_hardware
from strategist.cli.output import note, show_document, show_text
from strategist.facts.drawing import svg, text_tree
from strategist.facts.tiers import tiers

FLAGS = (*HARDWARE, Flag("--svg", "write a drawing to a new SVG file", "FILE"), *OUTPUT, *COMMON)


def run(words: Sequence[str]) -> int:
    """Print the tiers of a cluster; --svg draws it."""
    namespace: Namespace = parse(build_parser("topology", "Show or draw the machines.", FLAGS), words)
    given: Given = given_from_hardware(namespace)
    resolved = machines_of(given)
    if namespace.svg is not None:
        write_file(namespace.svg, svg(resolved.cluster), "--svg", force=namespace.force)
        note(f"wrote {namespace.svg}", quiet=namespace.quiet or namespace.json)
    if namespace.json:
        show_document(
            {"cluster": resolved.cluster, "tiers": tiers(resolved.cluster), "assumptions": resolved.assumptions}
        )
    elif not namespace.quiet:
        show_text(text_tree(resolved.cluster))
    return 0
