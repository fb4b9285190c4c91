"""`strategist topology`: the machines as a tree of links, or as a drawing."""

from __future__ import annotations

from strategist.cli.arguments import Command, Namespace
from strategist.cli.flags import COMMON, HARDWARE, Flag
from strategist.cli.output import note, show_document, show_lines, width
from strategist.reports.lines import hung
from strategist.writing import write_file

FLAGS = (
    *HARDWARE,
    Flag("--svg", "write a drawing to a new SVG file", "FILE"),
    Flag("--force", "replace the file named by --svg"),
    *COMMON,
)


COMMAND = Command(
    "topology",
    "Show or draw the machines.",
    FLAGS,
)


def run(options: Namespace) -> int:
    """Print the tiers of a cluster; --svg draws it."""
    from strategist.ask import machines_of  # NumPy: help and misspelt flags need none of it
    from strategist.cli.given import given_from_hardware
    from strategist.facts.drawing import svg, text_tree
    from strategist.facts.tiers import tiers

    resolved = machines_of(given_from_hardware(options))
    if options.svg is not None:
        write_file(options.svg, svg(resolved.cluster), "--svg", force=options.force)
        note(f"wrote {options.svg}", quiet=options.quiet or options.json)
    if options.json:
        show_document(
            {
                "cluster": resolved.cluster,
                "tiers": tiers(resolved.cluster),
                "assumptions": resolved.assumptions,
                "notes": resolved.notes,
            }
        )
    elif not options.quiet:
        assumed = [f"assumed {said.what}: {said.value}   set: {said.flag}" for said in resolved.assumptions]
        rows = [*text_tree(resolved.cluster).splitlines(), *assumed, *(f"note {text}" for text in resolved.notes)]
        show_lines([piece for row in rows for piece in hung(row, width())], no_color=options.no_color)
    return 0
