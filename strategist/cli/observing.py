"""What `trace` and `rehearse` share: a Plan in, an Observed out, written, and shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from strategist.cli.arguments import Namespace
from strategist.cli.files import check_out, write_document
from strategist.cli.flags import Flag
from strategist.cli.output import Progress, show_document, show_lines, width
from strategist.document.load import load_plan
from strategist.document.observed import Observed, RankObservation
from strategist.document.plan import Plan
from strategist.planner.check import require_sound

if TYPE_CHECKING:
    from strategist.measure.model_function import NamedFunction

RANKS = Flag("--ranks", "first, middle, last, fullest (stages, with commas), all-kinds, or one rank's number", "WHICH")
MODEL_FN = Flag("--model-fn", "a function that makes your own torch.nn.Module", "PACKAGE.MODULE:FUNCTION")

OnRank = Callable[[RankObservation], None]


def observe(options: Namespace, see: Callable[[Plan], Observed]) -> int:
    """Load the plan, look at it, write what was seen, and print it. Nothing is written before all of it was seen."""
    plan = load_plan(options.plan)
    require_sound(plan)
    check_out(options)
    observed = see(plan)
    write_document(observed, options)
    if options.json:
        show_document(observed)
    else:
        from strategist.reports.observed import observed_text

        show_lines(observed_text(observed, width()), no_color=options.no_color)
    return 0


def with_progress(
    plan: Plan,
    options: Namespace,
    start: str,
    brief: Callable[[RankObservation], str],
    look: Callable[[str, OnRank], Observed],
) -> Observed:
    """`look(ranks, on_rank)` under a bar of ranks; `brief` says how one went."""
    from strategist.measure.kinds import chosen_kinds
    from strategist.measure.trace import DEFAULT_RANKS

    words = options.ranks or DEFAULT_RANKS
    with Progress(len(chosen_kinds(plan, words)), quiet=options.quiet or options.json, start=start) as progress:

        def finished(rank: RankObservation) -> None:
            said = brief(rank)
            progress.advance(f"{said} in {rank.seconds:.1f} s", brief=said)

        return look(words, finished)


def own_model(options: Namespace) -> NamedFunction | None:
    """The function that --model-fn names, if it names one. Raises InputError PARSE."""
    if not options.model_fn:
        return None
    from strategist.measure.model_function import named_function

    return named_function(options.model_fn)
