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
    """Model and machines, when both are named. Raises InputError MISSING when one of them is."""
    from strategist.cli.given import given_from

    given, _ = given_from(options, FLAGS)
    has_model = any((given.model, given.model_size, given.model_config))
    has_machines = given.hardware is not None or given.gpu is not None
    if has_model and has_machines:
        return given
    if given.said:
        missing = "--hardware" if has_model else "--model"
        raise InputError(
            "MISSING",
            f"To weigh a configuration, validate needs {missing} too.",
            flag=missing,
            hint="Give --model and --hardware, or neither of them.",
        )
    return None
