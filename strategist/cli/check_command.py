"""`strategist check`: are a Plan's invariants true, and is its seal intact?"""

from __future__ import annotations

from collections.abc import Sequence

from strategist.cli.arguments import build_parser, parse
from strategist.cli.files import write_file
from strategist.cli.flags import COMMON, Flag
from strategist.cli.output import show_document, show_text
from strategist.document.load import load_plan
from strategist.document.write import dump, seal_state, sealed
from strategist.errors import ImpossibleError
from strategist.planner.check import faults

FLAGS = (Flag("--seal", "write the seal into the file when the plan is sound"), *COMMON)


def run(words: Sequence[str]) -> int:
    """Check a plan; with --seal, seal it in place. Exit 3 when an invariant is broken."""
    parser = build_parser("check", "Verify a Plan; seal a hand-written one.", FLAGS, [("plan", "a Plan file", "1")])
    namespace = parse(parser, words)
    plan = load_plan(namespace.plan)
    broken = faults(plan)
    if broken:
        raise ImpossibleError(
            "FRAMEWORK_LEGALITY",
            f"The plan is not sound: {' '.join(broken)}",
            flag="PLAN",
            value=namespace.plan,
            hint="Correct the file, or plan again.",
        )
    if namespace.seal:
        plan = sealed(plan)
        write_file(namespace.plan, dump(plan), "PLAN", force=True)
    state = seal_state(plan)
    if namespace.json:
        show_document({"sound": True, "seal": state})
    else:
        show_text(f"The plan is sound; seal: {state}.")
    return 0
