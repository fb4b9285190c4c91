"""`strategist validate`: what is wrong with a configuration of another framework?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strategist.cli.arguments import Command, Namespace, Positional
from strategist.cli.files import check_out, deliver
from strategist.cli.flags import PREDICT_FLAGS
from strategist.cli.output import width
from strategist.errors import InputError

if TYPE_CHECKING:
    from strategist.ask import Given

FLAGS = tuple(flag for flag in PREDICT_FLAGS if flag.name != "--strategy")
COMMAND = Command(
    "validate",
    "Judge another framework's configuration: typos, illegal pairs, batch, launcher, memory.",
    FLAGS,
    (Positional("files", "configurations or launch scripts", repeats=True),),
    examples=(
        "strategist validate accelerate.yaml deepspeed.json job.sbatch",
        "strategist validate deepspeed.json --model llama-3.1-8b --hardware dgx-h100:2",
    ),
)
FOUND_FAILURES = 5


def run(options: Namespace) -> int:
    """Print what is wrong with each file. Exit 5 when one of them has a failure; warnings pass."""
    from strategist.judging import judge  # the planner and NumPy: help and misspelt flags need neither
    from strategist.reports.judgement import judgement_text

    check_out(options)
    given = _given(options)
    found = [judge(path, given) for path in options.files]
    deliver(found, options, lambda: judgement_text(found, width()))
    return 0 if all(judgement.passes for judgement in found) else FOUND_FAILURES


def _given(options: Namespace) -> Given | None:
    """Machines, and the model where it is named; files may say theirs. Raises InputError MISSING for all else without machines."""
    from strategist.cli.given import given_from

    given, _ = given_from(options, FLAGS)
    if given.hardware is not None or given.gpu is not None:
        return given
    if given.said:
        raise InputError(
            "MISSING",
            "To weigh a configuration, validate needs --hardware too.",
            flag="--hardware",
            hint="Give the machines, or neither them nor a model.",
        )
    return None
