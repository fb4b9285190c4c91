"""`strategist predict`: what a configuration that somebody wrote by hand will cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strategist.cli.arguments import Command, Namespace, Positional
from strategist.cli.files import check_out, deliver
from strategist.cli.flags import PREDICT_FLAGS
from strategist.cli.output import width
from strategist.errors import InputError

if TYPE_CHECKING:
    from strategist.document.judgement import Finding
    from strategist.document.prediction import Prediction
    from strategist.readers.foreign import Source

COMMAND = Command(
    "predict",
    "Judge one given layout: legal or not, out of memory or not, memory and time term by term.",
    PREDICT_FLAGS,
    (
        Positional(
            "plan", "a Plan file, instead of flags, or another framework's configuration beside them", optional=True
        ),
    ),
    examples=(
        "strategist predict --model llama-3.1-8b --hardware dgx-h100:2 --strategy dp=8,tp=2,mbs=1,zero=1",
        "strategist predict plan.json",
        "strategist predict deepspeed.json --model llama-3.1-8b --hardware dgx-h100",
        "strategist predict train.sh --hardware dgx-h100:4",
        "strategist predict train.sh --hardware dgx-h100:4 --strategy zero=3",
    ),
)
IMPOSSIBLE = 3


def run(options: Namespace) -> int:
    """Print the prediction of a layout. Exit 3 when a rule forbids it or it does not fit."""
    from strategist.api import predicted  # the planner and NumPy: help and misspelt flags need neither
    from strategist.ask import complete
    from strategist.cli.given import given_from
    from strategist.reports.judgement import faults_lines
    from strategist.reports.prediction import prediction_text

    check_out(options)
    faults: tuple[Finding, ...] = ()
    if options.plan is not None:
        found, faults = _of_file(options)
    else:
        given, _ = given_from(options, PREDICT_FLAGS)
        if given.strategy is None:
            raise InputError("MISSING", "No layout was given.", flag="--strategy", hint="Give --strategy dp=8,tp=2, or a Plan file.")  # fmt: skip
        found = predicted(complete(given))
    deliver(found, options, lambda: [*prediction_text(found, width()), *faults_lines(options.plan, faults, width())])
    return 0 if found.legal and found.fits else IMPOSSIBLE


def _of_file(options: Namespace) -> tuple[Prediction, tuple[Finding, ...]]:
    """The prediction of what a file says: a Plan, or another framework's configuration, whose own faults are beside it."""
    from strategist.cli.given import given_from
    from strategist.judging import is_foreign, predicted_source
    from strategist.readers import open_source

    source = open_source(options.plan, "PLAN")
    if is_foreign(source):
        return predicted_source(source, given_from(options, PREDICT_FLAGS)[0], "PLAN")
    return _of_plan(options, source), ()


def _of_plan(options: Namespace, source: Source) -> Prediction:
    """The Plan of a file, priced again. Raises InputError CONFLICT for flags beside it, KIND where they stand beside what is no document
    of ours."""
    from strategist.cli.given import is_asking
    from strategist.document.load import load_plan
    from strategist.planner.check import require_sound
    from strategist.planner.predict import predict_plan
    from strategist.readers import reader_of

    own = ("out",)
    given = [
        flag.name for flag in PREDICT_FLAGS if is_asking(flag) and flag.key not in own and getattr(options, flag.key)
    ]
    if given and "format" not in source.table:
        reader_of(source, "PLAN")
    if given:
        raise InputError("CONFLICT", f"A Plan file already says what {given[0]} says.", flag=given[0], hint="Give the file or the flags.")  # fmt: skip
    plan = load_plan(options.plan)
    require_sound(plan)
    return predict_plan(plan)
