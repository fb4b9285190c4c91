"""`strategist plan`: from a question to a Plan."""

from __future__ import annotations

from strategist.cli.arguments import Command, Namespace
from strategist.cli.files import check_target, write_document
from strategist.cli.flags import PLAN_FLAGS
from strategist.cli.output import note, show_document, show_lines, width
from strategist.units import format_seconds

COMMAND = Command(
    "plan",
    "Choose a parallel layout, say why, and write a Plan.",
    PLAN_FLAGS,
    examples=(
        "strategist plan --model-size 7B",
        "strategist plan --model llama-3.1-70b --hardware dgx-h100:8 --seq-len 8192 --out plan.json",
        "strategist plan --model-size 13B --gpu rtx-4090 --gpus-per-node 4 --pin pp=4 --json",
    ),
)


def run(options: Namespace) -> int:
    """Plan, then print the report or the document, and write it when asked to."""
    from strategist.api import finished, plan_for  # the planner and NumPy: help and misspelt flags need neither
    from strategist.ask import complete
    from strategist.cli.given import given_from
    from strategist.planner.search import SearchLog
    from strategist.reports.brief import brief
    from strategist.reports.text import details

    given, top = given_from(options)
    if options.out is not None:
        check_target(options.out, "--out", force=options.force)
    log = SearchLog()
    asked = complete(given)
    plan = plan_for(asked, top=top, log=log)
    if options.json or options.out is not None:
        plan = finished(plan, asked)
    write_document(plan, options)
    if options.json:
        show_document(plan)
    elif not options.quiet:
        more = details(plan, width()) if options.verbose else []
        show_lines([*brief(plan, width(), saved=options.out), *more], no_color=options.no_color)
    if options.search_log:
        for stage in log.stages:
            note(f"{stage.name:<12} {format_seconds(stage.seconds):>9}   {stage.survivors:>12,} left")
    return 0
