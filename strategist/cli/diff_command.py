"""`strategist diff`: which fields of a Plan changed. Exit 8 when any did, so that a script can ask."""

from __future__ import annotations

from strategist.cli.arguments import PLAN, Command, Namespace, Positional
from strategist.cli.flags import COMMON
from strategist.cli.output import show_document, show_lines, width
from strategist.records import replace

COMMAND = Command(
    "diff",
    "Say which fields differ between two Plans. Nothing is ignored; exit 8 when they differ.",
    COMMON,
    (replace(PLAN, name="old"), Positional("new", "another Plan file")),
    examples=("strategist diff yesterday.json today.json",),
)
DIFFERS = 8


def run(options: Namespace) -> int:
    """Print every difference. Raises what reading a Plan raises, InputError KIND for a file of another kind."""
    from strategist.document.difference import differences
    from strategist.document.load import load_plan
    from strategist.document.write import as_document
    from strategist.reports.difference import difference_text, sentence

    old, new = load_plan(options.old, "OLD"), load_plan(options.new, "NEW")
    found = tuple(differences(as_document(old), as_document(new)))
    if options.json:
        told = [as_document(one) | {"sentence": sentence(one)} for one in found]
        show_document({"same": not found, "differences": told})
    elif not options.quiet:
        show_lines(difference_text(old, new, found, width()), no_color=options.no_color)
    return DIFFERS if found else 0
