"""`strategist trace`: the program of a Plan at its true world size, without its machines."""

from __future__ import annotations

from strategist.cli.arguments import PLAN, Command, Namespace
from strategist.cli.flags import COMMON, OUTPUT
from strategist.cli.observing import MODEL_FN, RANKS, observe, own_model, with_progress
from strategist.document.observed import Observed, RankObservation
from strategist.document.plan import Plan
from strategist.units import format_gib

COMMAND = Command(
    "trace",
    "Run one optimizer step of a Plan's real program with fake tensors: every byte, collective and FLOP of one rank of "
    "each kind, in seconds, without its machines.",
    (
        RANKS,
        MODEL_FN,
        *OUTPUT,
        *COMMON,
    ),
    (PLAN,),
    examples=(
        "strategist trace plan.json --out trace.json && strategist explain plan.json --with trace.json",
        "strategist trace plan.json --model-fn mypackage.models:make_model",
    ),
)


def run(options: Namespace) -> int:
    """Trace, write the document, and print."""
    return observe(options, lambda plan: _traced(plan, options))


def _traced(plan: Plan, options: Namespace) -> Observed:
    from strategist.measure.trace import trace

    make = own_model(options)
    look = lambda ranks, on_rank: trace(plan, make, ranks=ranks, on_rank=on_rank)  # noqa: E731
    return with_progress(plan, options, "tracing", _brief, look)


def _brief(rank: RankObservation) -> str:
    return f"{rank.kind}: {format_gib(rank.memory.peak_bytes)}"
