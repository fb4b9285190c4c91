"""`strategist plan`: from a question to a Plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strategist.cli.arguments import Command, Namespace
from strategist.cli.files import check_out, write_document
from strategist.cli.flags import PLAN_FLAGS
from strategist.cli.output import Progress, note, show_document, show_lines, watched, width
from strategist.units import format_gib, format_seconds

if TYPE_CHECKING:
    from strategist.ask import Asked
    from strategist.document.observed import RankObservation
    from strategist.document.plan import Plan
    from strategist.planner.recommend import Extras
    from strategist.planner.search import SearchLog
    from strategist.reports.lines import Line

COMMAND = Command(
    "plan",
    "Choose a parallel layout, say why, and write a Plan.",
    PLAN_FLAGS,
    examples=(
        "strategist plan --model-size 7B",
        "strategist plan --model llama-3.1-70b --hardware dgx-h100:8 --seq-len 8192 --out plan.json",
        "strategist plan --model-size 7B --gpu l40s --gpus-per-node 8 --pin pp=4 --json",
        "strategist plan --model llama-3.2-1b --hardware dgx-h100 --verify",
        "strategist plan --model llama-3.1-8b --hardware dgx-h100 --sensitivity",
    ),
)


def run(options: Namespace) -> int:
    """Plan, then print the report or the document, and write it when asked to."""
    from strategist.api import finished, plan_for  # the planner and NumPy: help and misspelt flags need neither
    from strategist.ask import complete
    from strategist.cli.given import given_from
    from strategist.planner.recommend import Extras
    from strategist.planner.search import Pace, SearchLog
    from strategist.reports.brief import brief

    given, top = given_from(options)
    check_out(options)
    log = SearchLog()
    asked = complete(given)
    with watched(options) as watch:
        pace = Pace(asked.time_budget, watch) if watch is not None or asked.time_budget is not None else None
        extras = Extras(options.pareto, options.certificate, options.sensitivity, options.allow_idle, pace)
        plan = (
            _verified(asked, top, log, extras, options)
            if options.verify
            else plan_for(asked, top=top, log=log, extras=extras)
        )
    if options.json or options.out is not None:
        plan = finished(plan, asked)
    write_document(plan, options)
    if options.json:
        show_document(plan)
    elif not options.quiet:
        show_lines([*brief(plan, width(), saved=options.out), *_details(plan, options)], no_color=options.no_color)
    if options.search_log:
        for stage in log.stages:
            note(f"{stage.name:<12} {format_seconds(stage.seconds):>9}   {stage.survivors:>12,} left")
    return 0


def _details(plan: Plan, options: Namespace) -> list[Line]:
    if not options.verbose:
        return []
    from strategist.reports.text import details  # with the trees of other rungs, which few ask for

    return details(plan, width())


def _verified(asked: Asked, top: int, log: SearchLog, extras: Extras, options: Namespace) -> Plan:
    """The plan, traced to fit, with a bar of traced ranks."""
    from strategist.api import verified_plan_for
    from strategist.verify import Watch

    with Progress(0, quiet=options.quiet or options.json, start="tracing") as progress:

        def begin(layout: str, ranks: int) -> None:
            progress.expect(ranks, f"tracing {layout}")

        def rank(seen: RankObservation) -> None:
            words = f"{seen.kind}: {format_gib(seen.memory.peak.allocated)} allocated"
            progress.advance(f"{words}, traced in {seen.seconds:.1f} s", brief=words)

        return verified_plan_for(asked, top=top, log=log, extras=extras, watch=Watch(begin, rank))
