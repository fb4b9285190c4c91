"""`strategist check`: are a Plan's invariants true, and is its seal intact?"""

from __future__ import annotations

from strategist.cli.arguments import Command, Namespace, Positional
from strategist.cli.files import write_file
from strategist.cli.flags import COMMON, Flag
from strategist.cli.output import show_document, show_lines, width
from strategist.document.load import load_plan
from strategist.document.write import dump, seal_state, sealed
from strategist.errors import StaleError
from strategist.planner.check import require_sound
from strategist.reports.lines import wrapped

FLAGS = (Flag("--seal", "write the seal into the file when the plan is sound"), *COMMON)


COMMAND = Command(
    "check",
    "Verify a Plan; seal a hand-written one.",
    FLAGS,
    (Positional("plan", "a Plan file"),),
)


def run(options: Namespace) -> int:
    """Check a plan; with --seal, seal it in place. Exit 3 when an invariant is broken, 4 when the seal is: a script that
    asks must not take an edited plan for the one that was made. A plan that never had a seal is only told so."""
    plan = load_plan(options.plan)
    require_sound(plan)
    if options.seal:
        plan = sealed(plan)
        write_file(options.plan, dump(plan), "PLAN", force=True)
    state = seal_state(plan)
    if state == "edited":
        raise StaleError(
            "DIGEST",
            "The plan is sound, but it was edited after it was sealed.",
            flag="PLAN",
            hint="Seal it as it is now with `strategist check PLAN --seal`, or plan again.",
        )
    if options.json:
        show_document({"sound": True, "seal": state})
    else:
        show_lines(wrapped("", f"The plan is sound; seal: {state}.", width(), indent=0), no_color=options.no_color)
    return 0
