"""`strategist trace`: the program of a Plan at its true world size, without its machines."""

from __future__ import annotations

from strategist.cli.arguments import Command, Namespace, Positional
from strategist.cli.files import check_target, write_file
from strategist.cli.flags import COMMON, OUTPUT, Flag
from strategist.cli.output import Progress, show_document, show_lines, width
from strategist.document.load import load_plan
from strategist.document.observed import Observed, RankObservation
from strategist.document.plan import Plan
from strategist.planner.check import require_sound
from strategist.units import format_gib

COMMAND = Command(
    "trace",
    "Run one optimizer step of a Plan's real program with fake tensors: every byte, collective and FLOP of one rank of "
    "each kind, in seconds, without its machines.",
    (
        Flag("--ranks", "first, middle, last, fullest (stages, with commas), all-kinds, or one rank's number", "WHICH"),
        Flag("--model-fn", "a function that makes your own torch.nn.Module", "PACKAGE.MODULE:FUNCTION"),
        *OUTPUT,
        *COMMON,
    ),
    (Positional("plan", "a Plan file"),),
    examples=(
        "strategist trace plan.json --out trace.json && strategist explain plan.json --with trace.json",
        "strategist trace plan.json --model-fn mypackage.models:make_model",
    ),
)


def run(options: Namespace) -> int:
    """Trace, print, and write the document."""
    plan = load_plan(options.plan)
    require_sound(plan)
    if options.out is not None:
        check_target(options.out, "--out", force=options.force)
    observed = _traced(plan, options)
    if options.out is not None:
        from strategist.document.write import dump

        write_file(options.out, dump(observed), "--out", force=options.force)
    if options.json:
        show_document(observed)
    else:
        from strategist.reports.observed import observed_text

        show_lines(observed_text(observed, width()), no_color=options.no_color)
    return 0


def _traced(plan: Plan, options: Namespace) -> Observed:
    from strategist.measure.kinds import chosen_kinds
    from strategist.measure.model_function import named_function
    from strategist.measure.trace import DEFAULT_RANKS, trace

    words = options.ranks or DEFAULT_RANKS
    make = named_function(options.model_fn) if options.model_fn else None
    with Progress(len(chosen_kinds(plan, words)), quiet=options.quiet or options.json, start="tracing") as progress:

        def finished(rank: RankObservation) -> None:
            words = f"{rank.kind}: {format_gib(rank.memory.peak.allocated)}"
            progress.advance(f"{words} in {rank.seconds:.1f} s", brief=words)

        return trace(plan, make, ranks=words, on_rank=finished)
