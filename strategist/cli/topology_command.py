"""`strategist topology`: the machines as a tree of links, or as a drawing."""

from __future__ import annotations

from strategist.ask import Given, machines_of
from strategist.cli.arguments import Command, Namespace
from strategist.cli.files import write_file
from strategist.cli.flags import COMMON, HARDWARE, OUTPUT, Flag
from strategist.cli.given import given_from_hardware
from strategist.cli.output import note, show_document, show_text
from strategist.facts.drawing import svg, text_tree
from strategist.facts.tiers import tiers

FLAGS = (*HARDWARE, Flag("--svg", "write a drawing to a new SVG file", "FILE"), *OUTPUT, *COMMON)


COMMAND = Command(
    "topology",
    "Show or draw the machines.",
    FLAGS,
)


def run(options: Namespace) -> int:
    """Print the tiers of a cluster; --svg draws it."""
    given: Given = given_from_hardware(options)
    resolved = machines_of(given)
    if options.svg is not None:
        write_file(options.svg, svg(resolved.cluster), "--svg", force=options.force)
        note(f"wrote {options.svg}", quiet=options.quiet or options.json)
    if options.json:
        show_document(
            {"cluster": resolved.cluster, "tiers": tiers(resolved.cluster), "assumptions": resolved.assumptions}
        )
    elif not options.quiet:
        show_text(text_tree(resolved.cluster))
    return 0
