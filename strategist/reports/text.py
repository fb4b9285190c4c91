"""What `explain` prints: the assumptions, the layout, every term, the stages, the rules and what they refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strategist.document.observed import Observed
from strategist.document.plan import Costed, Plan
from strategist.document.write import seal_state
from strategist.reports.brief import (
    INDENT,
    assumed_lines,
    extra_lines,
    family_title,
    frontend_lines,
    hint_lines,
    mesh_words,
    option_words,
    policy_words,
    unrestricted_lines,
    verified_lines,
)
from strategist.reports.interval import interval_lines
from strategist.reports.lines import Line, Span, line, table, wrapped
from strategist.reports.tree import plan_tree, rungs_of, tree_lines
from strategist.units import counted, format_gib


def explain_text(plan: Plan, width: int = 80, observed: Sequence[Observed] = ()) -> list[Line]:
    """The full explanation of a plan, beside what other rungs saw of it."""
    return [
        *assumed_lines(plan, width),
        *wrapped(
            "plan", f"{family_title(plan.decision.family)}   {mesh_words(plan)}", width, indent=INDENT, style="title"
        ),
        *wrapped("layout", option_words(plan), width, indent=INDENT),
        *wrapped("batch", plan.batch_identity, width, indent=INDENT),
        *wrapped("seal", _seal_words(plan), width, indent=INDENT),
        *details(plan, width, observed),
        *unrestricted_lines(plan, width),
        *frontend_lines(plan, width),
        *extra_lines(plan, width),
        *hint_lines(plan, width),
    ]


def details(plan: Plan, width: int = 80, observed: Sequence[Observed] = ()) -> list[Line]:
    """Every term of the step and of the peak, the stages, the rules and what they refused."""
    return [
        line(""),
        *tree_lines(plan_tree(plan, observed), width, rungs_of(plan, observed)),
        *interval_lines(plan, width),
        *stage_lines(plan, width),
        *_verified(plan, width),
        *_rules(plan, width),
        *_refusals(plan, width),
    ]


def _seal_words(plan: Plan) -> str:
    words = {
        "sealed": f"intact ({(plan.seal or '')[:19]}...)",
        "unsealed": "none: written or edited by hand; `strategist check PLAN --seal` checks and seals it",
        "edited": "BROKEN: the plan was edited after it was sealed; `run` refuses it without --allow-edited",
    }
    return words[seal_state(plan)]


def stage_lines(plan: Costed, width: int) -> Iterator[Line]:
    """The layers and the peak of every pipeline stage."""
    if plan.mesh.pp == 1:
        return
    yield line("")
    yield line(Span("stages", "key"))
    rows = []
    for stage, memory in zip(plan.strategy.stages, plan.memory.stages, strict=True):
        runs = " and ".join(f"{first}-{end - 1}" for first, end in stage.layers)
        holds = [word for word, is_held in (("embedding", stage.embedding), ("head", stage.head)) if is_held]
        rows.append(
            (
                str(stage.index),
                f"layers {runs}",
                format_gib(memory.device),
                ", ".join([*holds, f"peaks at: {memory.moment}"]),
            )
        )
    yield from table(rows, width, right=(2,))


def _verified(plan: Plan, width: int) -> Iterator[Line]:
    """The account of the trace that the plan was verified with."""
    account = plan.verification
    if account is None:
        return
    yield line("")
    yield line(Span("verified", "key"))
    yield from verified_lines(account, width)
    yield from table([(row.name, row.sentence) for row in account.substitutions], width)


def _rules(plan: Plan, width: int) -> Iterator[Line]:
    yield line("")
    yield line(Span("rules", "key"))
    for reason in plan.reasons:
        yield from wrapped(f"  {reason.rule}", f"{reason.sentence} Source: {reason.source}", width, indent=INDENT)
    yield from wrapped("  policy", policy_words(plan), width, indent=INDENT)


def _refusals(plan: Plan, width: int) -> Iterator[Line]:
    if plan.refusals:
        yield line("")
        yield line(Span("refused", "key"))
    for refusal in plan.refusals:
        yield from wrapped(
            f"  {refusal.rule}",
            f"{counted(refusal.count, 'layout', f'{refusal.count:,}')}. {refusal.sentence} For example {refusal.example}",
            width,
            indent=INDENT,
        )
