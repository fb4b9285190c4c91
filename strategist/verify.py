"""A Plan whose memory is that of its real program: formulas choose, and the trace of what they chose has the last word.

The chosen layout is traced, and the one that would be chosen without it. A layout whose trace does not fit is ruled out
and the next is chosen, a few times over; the Plan names every layout that was looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strategist.ask import Asked
from strategist.document.estimate import MEMORY_TERMS, Estimate, MemoryLedger, MemoryTerm, StageMemory
from strategist.document.observed import Observed, RankObservation
from strategist.document.plan import Hint, Plan, Refusal
from strategist.document.verification import Role, TracedLayout, Verification
from strategist.errors import ImpossibleError, InputError, NoPlanError
from strategist.executor.support import obstacles, require_packages, way_out
from strategist.facts.profile import engine_of
from strategist.planner.kinds import UNEVEN
from strategist.planner.predict import layout_of, pins_of
from strategist.planner.write import TIGHT
from strategist.records import dataclass, replace
from strategist.units import format_gib

TRIES = 5
"""Layouts that are traced before we give up: each takes seconds to minutes, and one follows close upon the other."""
RANKS = "first,middle,last,fullest"

PlanFor = Callable[[Asked], Plan]


@dataclass(frozen=True, slots=True)
class Watch:
    """What hears how far a verification is: `begin` of each layout and its number of ranks, `rank` of each that is done."""

    begin: Callable[[str, int], None]
    rank: Callable[[RankObservation], None]


def verified(asked: Asked, plan_for: PlanFor, watch: Watch | None = None) -> Plan:
    """The Plan that `plan_for` makes of a question, its memory traced; of the next layout when that one does not fit.

    Raises InputError MISSING without torch and CONFLICT for another framework, ImpossibleError UNSUPPORTED when the
    chosen layout has no program to trace, NoPlanError when none of TRIES layouts is traced to fit.
    """
    require_verifiable(asked)
    looked_at: list[TracedLayout] = []
    for _ in range(TRIES):
        predicted = _chosen(asked, plan_for, looked_at)
        plan, seen = _traced(predicted, watch)
        if fits(plan):
            break
        looked_at.append(_entry("ruled out", predicted, plan))
        asked = without(asked, predicted)
    else:
        raise _none_fits(looked_at, asked)
    after = _runner_up(asked, predicted, watch)
    return _told(plan, predicted, seen, (*looked_at, _entry("chosen", predicted, plan), *after))


def require_verifiable(asked: Asked) -> None:
    """Raise InputError for a question whose Plans have no trace here: another framework's, or no torch to trace with."""
    frontend = asked.request.frontend
    if engine_of(frontend) not in ("any", "strategist"):
        raise InputError(
            "CONFLICT",
            f"--verify traces the program of strategist's own executor, and --frontend {frontend} asks for another's.",
            flag="--verify",
            value=frontend,
            hint="Leave one of them out.",
        )
    if UNEVEN in asked.question.also:
        raise InputError(
            "CONFLICT",
            f"--verify rules out layouts of the search whose traces do not fit, and --also {UNEVEN} is looked at behind the search.",
            flag="--verify",
            value=UNEVEN,
            hint="Leave one of them out; `strategist trace` takes the plan.",
        )
    require_packages("Tracing (--verify)", asked.question.job.model.method, asked.question.job.workload.precision)


def fits(plan: Plan) -> bool:
    """Whether every stage stays under what is usable of its device."""
    return plan.memory.worst.device <= plan.memory.usable_bytes


def without(asked: Asked, plan: Plan) -> Asked:
    """The question, the layout of a Plan ruled out."""
    question = asked.question
    return replace(asked, question=replace(question, ruled_out=(*question.ruled_out, tuple(pins_of(plan)))))


def _chosen(asked: Asked, plan_for: PlanFor, looked_at: Sequence[TracedLayout]) -> Plan:
    try:
        plan = plan_for(asked)
    except ImpossibleError:
        if looked_at:
            raise _none_fits(looked_at, asked) from None
        raise
    missing = obstacles(plan)
    if missing:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"There is no program of {layout_of(plan)} to trace: {' '.join(obstacle.sentence for obstacle in missing)}",
            flag="--verify",
            value=layout_of(plan),
            hint=f"{way_out(missing)} Or leave --verify out.",
        )
    return plan


def _traced(plan: Plan, watch: Watch | None) -> tuple[Plan, Observed]:
    """The plan with traced memory, and the trace."""
    from strategist.measure.kinds import chosen_kinds
    from strategist.measure.trace import trace

    if watch is not None:
        watch.begin(layout_of(plan), len(chosen_kinds(plan, RANKS)))
    seen = trace(plan, ranks=RANKS, on_rank=None if watch is None else watch.rank)
    return replace(plan, memory=traced_ledger(plan.memory, seen)), seen


def traced_ledger(predicted: MemoryLedger, seen: Observed) -> MemoryLedger:
    """The ledger with traced bytes on every stage that was traced.

    The interval keeps its width: traces equal real allocators on CPU ranks only, and slack is a model's.
    """
    stages = tuple(_traced_stage(ledger, seen.of_stage(ledger.stage)) for ledger in predicted.stages)
    old, worst = predicted.peak, max(stages, key=lambda stage: (stage.device, -stage.stage))
    low, high = (float(round(worst.device * bound / old.value)) for bound in (old.low, old.high))
    peak = Estimate(float(worst.device), low, high, "B", "traced" if worst.is_traced else old.basis)
    return replace(predicted, stages=stages, peak=peak)


def _traced_stage(predicted: StageMemory, rank: RankObservation | None) -> StageMemory:
    """One stage as traced: bytes of tensors at the traced peak, slack as the allocator's model has it, runtime as it was."""
    if rank is None:
        return predicted
    peak = rank.memory.peak
    found = {term.name: term for term in peak.terms}
    found |= {term.name: term for term in predicted.terms if term.name == "runtime"}
    slack = rank.memory.reserved - peak.allocated
    found |= {"slack": MemoryTerm("slack", slack, "derived")} if slack > 0 else {}
    return StageMemory(predicted.stage, peak.moment, tuple(found[name] for name in MEMORY_TERMS if name in found))


def _runner_up(asked: Asked, chosen: Plan, watch: Watch | None) -> tuple[TracedLayout, ...]:
    """The layout that would be chosen without the chosen one, traced where it has a program; none when nothing else fits."""
    from strategist.planner.recommend import recommend

    try:
        second = recommend(without(asked, chosen).question, asked.request, asked.assumptions)
    except ImpossibleError:
        return ()
    missing = obstacles(second)
    if missing:
        words = f"not traced: {' '.join(obstacle.sentence for obstacle in missing)}"
        return (_layout("runner-up", second, fits=True, traced=None, sentence=words),)
    return (_entry("runner-up", second, _traced(second, watch)[0]),)


def _entry(role: Role, predicted: Plan, plan: Plan) -> TracedLayout:
    """What is kept of one traced layout."""
    over = plan.memory.worst.device - plan.memory.usable_bytes
    words = f"does not fit: over by {format_gib(over)}" if over > 0 else "fits"
    return _layout(role, predicted, fits=over <= 0, traced=plan.memory.worst.device, sentence=words)


def _layout(role: Role, predicted: Plan, *, fits: bool, traced: int | None, sentence: str) -> TracedLayout:
    return TracedLayout(
        role=role,
        family=predicted.decision.family,
        layout=layout_of(predicted),
        fits=fits,
        predicted_bytes=predicted.memory.worst.device,
        traced_bytes=traced,
        sentence=sentence,
    )


def _told(plan: Plan, predicted: Plan, seen: Observed, layouts: tuple[TracedLayout, ...]) -> Plan:
    """The plan with the account of its verification, and with what was ruled out beside its other refusals."""
    misfits = [each for each in layouts if each.role == "ruled out"]
    known = {row.name: row for rank in seen.ranks for row in rank.substitutions}
    account = Verification(
        torch=seen.torch,
        ranks=tuple(f"{rank.kind} (rank {rank.rank})" for rank in seen.ranks),
        predicted=predicted.memory.stages,
        layouts=layouts,
        substitutions=tuple(known.values()),
    )
    refusals = [
        Refusal(rule="trace", count=1, sentence=f"Predicted to fit; its trace {each.sentence}.", example=each.layout)
        for each in misfits
    ]
    hints = [Hint(code="W_TRACED_MISFIT", sentence=misfit_words(each)) for each in misfits]
    kept = [hint for hint in plan.hints if hint.code != TIGHT or plan.memory.is_tight]
    return replace(plan, verification=account, refusals=(*plan.refusals, *refusals), hints=(*hints, *kept))


def misfit_words(each: TracedLayout) -> str:
    """One layout that was predicted to fit and does not."""
    size = format_gib(each.traced_bytes or 0)
    return f"{each.layout} was predicted to take {format_gib(each.predicted_bytes)}; its trace takes {size} and {each.sentence}. The next layout was taken."


def _none_fits(looked_at: Sequence[TracedLayout], asked: Asked) -> NoPlanError:
    usable = format_gib(asked.question.job.usable_bytes)
    return NoPlanError(
        f"No layout that the formulas chose is traced to fit into {usable}; {len(looked_at)} were traced.",
        chain=[
            f"{each.layout}: predicted {format_gib(each.predicted_bytes)}, traced {format_gib(each.traced_bytes or 0)}."
            for each in looked_at
        ]
        + ["A larger --headroom keeps away from the border, where formulas and traces may differ."],
        flag="--verify",
        hint="Plan with a larger --headroom.",
    )
