"""`strategist status`: what the files of a run folder say, while it runs and afterwards."""

from __future__ import annotations

from strategist.cli.arguments import Command, Namespace, Positional
from strategist.cli.flags import COMMON
from strategist.cli.output import show_document, show_lines, width
from strategist.cli.resume_command import run_folder
from strategist.reports.status import status_lines
from strategist.runs.status import status_of

COMMAND = Command(
    "status",
    "Look at a run: loss, ranks, checkpoints, faults.",
    COMMON,
    (Positional("run", "a folder that `run --out` made"),),
    examples=("strategist status RUN", "strategist status RUN --json"),
)


def run(options: Namespace) -> int:
    """Read the folder and print it."""
    status = status_of(run_folder(options.run))
    if options.json:
        show_document(status)
    else:
        show_lines(status_lines(status, width()), no_color=options.no_color)
    return 0
