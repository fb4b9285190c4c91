"""`strategist plan`: from a question to a Plan."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from strategist.api import finished, plan_for
from strategist.ask import complete
from strategist.cli.arguments import build_parser, parse
from strategist.cli.files import check_target, write_file
from strategist.cli.flags import PLAN_FLAGS
from strategist.cli.given import given_from
from strategist.cli.output import note, show_document, show_lines, width
from strategist.planner.search import SearchLog
from strategist.reports.brief import brief
from strategist.units import format_seconds

EXAMPLES = """examples
  strategist plan --model-size 7B
  strategist plan --model llama-3.1-70b --hardware dgx-h100:8 --seq-len 8192 --global-batch 1024 --out plan.json
  strategist plan --model-size 13B --gpu rtx-4090 --gpus-per-node 4 --pin pp=4 --json
"""


def run(words: Sequence[str]) -> int:
    """Plan, then print the report or the document, and write it when asked to."""
    gc.disable()  # a plan makes many small records and no cycles, and the process ends with it
    parser = build_parser("plan", "Choose a parallel layout, say why, and write a Plan.", PLAN_FLAGS, epilog=EXAMPLES)
    namespace = parse(parser, words)
    given, top = given_from(namespace)
    if namespace.out is not None:
        check_target(namespace.out, "--out", force=namespace.force)
    log = SearchLog()
    asked = complete(given)
    plan = plan_for(asked, top=top, log=log)
    if namespace.json or namespace.out is not None:
        plan = finished(plan, asked)
    if namespace.out is not None:
        from strategist.document.write import dump

        write_file(namespace.out, dump(plan), "--out", force=namespace.force)
        note(f"wrote {namespace.out}", quiet=namespace.quiet or namespace.json)
    if namespace.json:
        show_document(plan)
    elif not namespace.quiet:
        show_lines(brief(plan, width()), no_color=namespace.no_color)
    if namespace.search_log:
        for stage in log.stages:
            note(f"{stage.name:<12} {format_seconds(stage.seconds):>9}   {stage.survivors:>12,} left")
    return 0
