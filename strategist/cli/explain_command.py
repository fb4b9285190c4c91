"""`strategist explain`: a Plan, term by term, beside what other rungs of the ladder saw of it."""

from __future__ import annotations

from strategist.cli.arguments import PLAN, Command, Namespace
from strategist.cli.flags import COMMON, Flag
from strategist.cli.output import show_document, show_lines, width
from strategist.document.load import load_observed, load_plan
from strategist.document.write import seal_state
from strategist.planner.check import require_sound

COMMAND = Command(
    "explain",
    "Show a Plan term by term: time, memory, rules, refusals.",
    (
        Flag("--with", "what was observed of the plan, as `strategist trace --out` writes it", "FILE", repeats=True),
        *COMMON,
    ),
    (PLAN,),
    examples=("strategist explain plan.json", "strategist explain plan.json --with trace.json"),
)


def run(options: Namespace) -> int:
    """Print the tree of a plan; sealed, unsealed and edited plans are all read, and the report says which."""
    from strategist.reports.interval import interval_account
    from strategist.reports.text import explain_text  # NumPy: help and misspelt flags need none of it
    from strategist.reports.tree import plan_tree

    plan = load_plan(options.plan)
    observed = tuple(load_observed(path) for path in getattr(options, "with"))
    require_sound(plan)
    if options.json:
        show_document(
            {
                "seal": seal_state(plan),
                "tree": plan_tree(plan, observed),
                "interval": interval_account(plan),
                "reasons": plan.reasons,
                "refusals": plan.refusals,
            }
            | ({} if plan.sensitivity is None else {"sensitivity": plan.sensitivity})
        )
    else:
        show_lines(explain_text(plan, width(), observed), no_color=options.no_color)
    return 0
