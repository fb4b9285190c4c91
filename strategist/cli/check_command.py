"""`strategist check`: are a Plan's invariants true, and is its seal intact?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strategist.cli.arguments import PLAN, Command, Namespace
from strategist.cli.flags import COMMON, Flag
from strategist.cli.output import Progress, show_document, show_lines, width
from strategist.document.load import load_plan
from strategist.document.write import dump, seal_state, sealed
from strategist.errors import InputError, StaleError
from strategist.planner.check import require_sound
from strategist.reading import STANDARD_INPUT
from strategist.reports.lines import Line, wrapped
from strategist.units import format_gib, format_seconds
from strategist.writing import write_file

if TYPE_CHECKING:
    from strategist.document.plan import Plan
    from strategist.planner.exhaustive import Recheck

FLAGS = (
    Flag("--seal", "write the seal into the file when the plan is sound"),
    Flag(
        "--exhaustive", "try every layout of the plan's question again, one at a time: is there a better one? (minutes)"
    ),
    *COMMON,
)


COMMAND = Command(
    "check",
    "Verify a Plan; seal a hand-written one.",
    FLAGS,
    (PLAN,),
    examples=("strategist check plan.json", "strategist check plan.json --exhaustive"),
)


def run(options: Namespace) -> int:
    """Check a plan; with --seal, seal it in place; with --exhaustive, try every layout of its question again. Exit 3 when an invariant is broken, 4 when the seal is: a script that
    asks must not take an edited plan for the one that was made. A plan that never had a seal is only told so."""
    if options.seal and options.plan == STANDARD_INPUT:
        raise InputError("CONFLICT", "--seal writes into the plan's file, and - is none.", flag="--seal", hint="Name the file.")  # fmt: skip
    plan = load_plan(options.plan)
    require_sound(plan)
    other = _figures_of_its_layout(plan)
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
    found = _tried_again(plan, options) if options.exhaustive else None
    if options.json:
        more = ({"predicted": other} if other else {}) | ({} if found is None else {"exhaustive": found})
        show_document({"sound": True, "seal": state} | more)
    else:
        lines = wrapped("", f"The plan is sound; seal: {state}.", width(), indent=0)
        claims = [] if found is None else [row for claim in found.claims for row in wrapped("  true", claim.sentence, width(), indent=8)]  # fmt: skip
        show_lines([*lines, *_warning(plan, other), *claims], no_color=options.no_color)
    return 0


def _figures_of_its_layout(plan: Plan) -> dict[str, int]:
    """Bytes of the fullest device and nanoseconds of a step that its layout is predicted at, where the plan says others: a seal signs
    whatever stands in the file."""
    from strategist.planner.predict import predict_plan

    said, due = (
        {"device_bytes": one.memory.worst.device, "step_ns": one.time.step_ns} for one in (plan, predict_plan(plan))
    )
    return {} if said == due else due


def _warning(plan: Plan, due: dict[str, int]) -> list[Line]:
    if not due:
        return []
    said = f"{format_gib(plan.memory.worst.device)} and {format_seconds(plan.time.step_ns * 1e-9)}"
    ours = f"{format_gib(due['device_bytes'])} and {format_seconds(due['step_ns'] * 1e-9)}"
    text = f"The plan says {said} a step, and its layout is predicted at {ours}: these are figures of another layout, or of another version."
    return wrapped("  figures", text, width(), indent=11)


TENTHS = 10


def _tried_again(plan: Plan, options: Namespace) -> Recheck:
    """Every layout tried again, with a bar. Raises StaleError FACTS_DIFFER when a claim of the plan does not hold."""
    from strategist.ask import frontend_named
    from strategist.planner.exhaustive import recheck

    with Progress(TENTHS, quiet=options.quiet or options.json, start="trying every layout") as progress:

        def watch(done: int, total: int) -> None:
            if done * TENTHS // total > (done - 1) * TENTHS // total:
                words = f"{done:,} of {total:,} layouts tried"
                progress.advance(words, brief=words)

        found = recheck(plan, watch, frontend_named(plan.request.frontend))
    wrong = [claim.sentence for claim in found.claims if not claim.holds]
    if wrong:
        raise StaleError(
            "FACTS_DIFFER",
            f"The plan does not keep what it says: {'; '.join(wrong)}.",
            flag="--exhaustive",
            hint="Plan again with this version.",
        )
    return found
