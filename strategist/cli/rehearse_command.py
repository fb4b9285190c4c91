"""`strategist rehearse`: one rank of a Plan on the device in front of us, without its peers."""

from __future__ import annotations

from strategist.cli.arguments import PLAN, Command, Namespace
from strategist.cli.flags import COMMON, OUTPUT, Flag
from strategist.cli.observing import MODEL_FN, RANKS, observe, own_model, with_progress
from strategist.document.observed import Observed, RankObservation
from strategist.document.plan import Plan
from strategist.units import format_gib, format_seconds, parse_integer

COMMAND = Command(
    "rehearse",
    "Run steps of a Plan's real program, one rank of each kind, on one real device: seconds by term and measured memory. "
    "Collectives are fake; what peers would send is noise.",
    (
        RANKS,
        Flag("--steps", "steps that are timed (5)", "N"),
        Flag("--device", "where: a GPU, or the CPU; as the plan has it unless named", "WORD", choices=("cpu", "cuda")),
        MODEL_FN,
        *OUTPUT,
        *COMMON,
    ),
    (PLAN,),
    examples=(
        "strategist rehearse plan.json --out rehearsal.json && strategist explain plan.json --with rehearsal.json",
        "strategist rehearse plan.json --device cpu --ranks last --steps 3",
        "strategist rehearse plan.json --model-fn mypackage.models:make_model",
    ),
)


def run(options: Namespace) -> int:
    """Rehearse, write the document, and print."""
    return observe(options, lambda plan: _rehearsed(plan, options))


def _rehearsed(plan: Plan, options: Namespace) -> Observed:
    from strategist.measure.rehearse import DEFAULT_STEPS, MAX_STEPS, rehearse

    steps = parse_integer(options.steps, "--steps", high=MAX_STEPS, example="5") if options.steps else DEFAULT_STEPS
    make = own_model(options)
    look = lambda ranks, on_rank: rehearse(  # noqa: E731
        plan, make, ranks=ranks, steps=steps, device=options.device, on_rank=on_rank
    )
    return with_progress(plan, options, "rehearsing", _brief, look)


def _brief(rank: RankObservation) -> str:
    step = "" if rank.time is None else f", {format_seconds(rank.time.step_ns / 1e9)} a step;"
    return f"{rank.kind}: {format_gib(rank.memory.peak_bytes)}{step}"
