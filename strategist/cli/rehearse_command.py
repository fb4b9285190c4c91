"""`strategist rehearse`: one rank of a Plan on the device in front of us, without its peers."""

from __future__ import annotations

from strategist.cli.arguments import Command, Namespace, Positional
from strategist.cli.files import check_target, write_document
from strategist.cli.flags import COMMON, OUTPUT, Flag
from strategist.cli.output import Progress, show_document, show_lines, width
from strategist.document.load import load_plan
from strategist.document.observed import Observed, RankObservation
from strategist.document.plan import Plan
from strategist.planner.check import require_sound
from strategist.units import format_gib, format_seconds, parse_integer

COMMAND = Command(
    "rehearse",
    "Run steps of a Plan's real program, one rank of each kind, on one real device: seconds by term and measured memory. "
    "Collectives are fake; what peers would send is noise.",
    (
        Flag("--ranks", "first, middle, last, fullest (stages, with commas), all-kinds, or one rank's number", "WHICH"),
        Flag("--steps", "steps that are timed (5)", "N"),
        Flag("--device", "where: a GPU, or the CPU; as the plan has it unless named", "WORD", choices=("cpu", "cuda")),
        *OUTPUT,
        *COMMON,
    ),
    (Positional("plan", "a Plan file"),),
    examples=(
        "strategist rehearse plan.json --out rehearsal.json && strategist explain plan.json --with rehearsal.json",
        "strategist rehearse plan.json --device cpu --ranks last --steps 3",
    ),
)


def run(options: Namespace) -> int:
    """Rehearse, write the document, and print."""
    plan = load_plan(options.plan)
    require_sound(plan)
    if options.out is not None:
        check_target(options.out, "--out", force=options.force)
    observed = _rehearsed(plan, options)
    write_document(observed, options)
    if options.json:
        show_document(observed)
    else:
        from strategist.reports.observed import observed_text

        show_lines(observed_text(observed, width()), no_color=options.no_color)
    return 0


def _rehearsed(plan: Plan, options: Namespace) -> Observed:
    from strategist.measure.kinds import chosen_kinds
    from strategist.measure.rehearse import DEFAULT_STEPS, MAX_STEPS, rehearse
    from strategist.measure.trace import DEFAULT_RANKS

    words = options.ranks or DEFAULT_RANKS
    steps = parse_integer(options.steps, "--steps", high=MAX_STEPS, example="5") if options.steps else DEFAULT_STEPS
    total = len(chosen_kinds(plan, words))
    with Progress(total, quiet=options.quiet or options.json, start="rehearsing") as progress:

        def finished(rank: RankObservation) -> None:
            step = "" if rank.time is None else f", {format_seconds(rank.time.step_ns / 1e9)} a step"
            brief = f"{rank.kind}: {format_gib(rank.memory.peak_bytes)}{step}"
            progress.advance(f"{brief}, in {rank.seconds:.1f} s", brief=brief)

        return rehearse(plan, ranks=words, steps=steps, device=options.device, on_rank=finished)
