"""`strategist accuracy`: the model against measured runs."""

from __future__ import annotations

from strategist.cli.arguments import Command, Namespace, Positional
from strategist.cli.flags import CALIBRATION, COMMON, Flag
from strategist.cli.output import show_document, show_lines, watched, width

BRIEF = Flag("--quiet", "print the line of all runs together alone")
FLAGS = (
    Flag("--by", "columns that make a group: source, hardware, framework, model", "COLUMN,..."),
    *CALIBRATION,
    *(BRIEF if flag.name == BRIEF.name else flag for flag in COMMON),
)
COMMAND = Command(
    "accuracy",
    "Predict the measured runs of a table and show how far off the predictions are.",
    FLAGS,
    (Positional("file", "a CSV or JSON file of measured runs; columns as in benchmarks/truth/README.md"),),
    examples=("strategist accuracy benchmarks/truth/training.csv --by source",),
)


def run(options: Namespace) -> int:
    """Predict every row that can be expressed, list every row that cannot, and sum up per group."""
    from strategist.accuracy.judge import judge  # NumPy and the models: help and misspelt flags need neither
    from strategist.accuracy.report import accuracy_document, accuracy_text, columns_of, inside_text, unread_text
    from strategist.accuracy.scores import grouped
    from strategist.accuracy.table import read_runs
    from strategist.ask import Given, calibrated_by

    by = columns_of(options.by)
    own = calibrated_by(Given(calibration=options.calibration, uncalibrated=options.uncalibrated))
    with watched(options) as watch:
        judged = judge(read_runs(options.file), own.factors, watch)
    groups = grouped(judged, by)
    if options.json:
        show_document(accuracy_document(groups, judged, own.near))
    else:
        listed = judged if options.verbose else ()
        about_all = () if options.quiet else (*inside_text(judged, own.near, width()), *unread_text(judged, width()))
        lines = [*accuracy_text(groups, listed, width(), quiet=options.quiet), *about_all]
        show_lines(lines, no_color=options.no_color)
    return 0
