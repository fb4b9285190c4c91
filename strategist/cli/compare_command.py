"""`strategist compare`: Plans, or layouts of one question, side by side and term by term."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from strategist.cli.arguments import Command, Namespace, Positional
from strategist.cli.files import check_out, deliver
from strategist.cli.flags import PREDICT_FLAGS
from strategist.cli.output import width
from strategist.errors import InputError, escaped

if TYPE_CHECKING:
    from strategist.document.comparison import Side
    from strategist.document.plan import Costed, Plan
    from strategist.document.prediction import Prediction

FLAGS = tuple(flag for flag in PREDICT_FLAGS if flag.name != "--strategy")
OWN = ("out",)
"""Flags with a value that say nothing about the question."""

COMMAND = Command(
    "compare",
    "Show Plans, or layouts of one question, side by side: every term of step and memory.",
    FLAGS,
    (
        Positional("a", "a Plan file, or a layout such as dp=8,zero=3 of the question in the flags"),
        Positional("b", "another"),
        Positional("more", "further ones", optional=True, repeats=True),
    ),
    examples=(
        "strategist compare plan.json other.json",
        "strategist compare dp=8,zero=3 tp=8 pp=8 --model llama-3.1-8b --hardware dgx-h100",
    ),
)


def run(options: Namespace) -> int:
    """Print the comparison. Raises InputError CONFLICT for flags of a question that nothing asks."""
    from strategist.document.comparison import comparison
    from strategist.reports.comparison import comparison_text

    check_out(options)
    words = (options.a, options.b, *options.more)
    _flags_are_used(options, words)
    both = [_side(options, word) for word in words]
    found = comparison([side for side, _ in both], [costed for _, costed in both])
    deliver(found, options, lambda: comparison_text(found, width()))
    return 0


def is_layout(word: str) -> bool:
    """Whether a word is a layout rather than a file."""
    return "=" in word and not os.path.exists(word)


def _flags_are_used(options: Namespace, words: tuple[str, ...]) -> None:
    if any(map(is_layout, words)):
        return
    given = [flag.name for flag in FLAGS if flag.metavar and flag.key not in OWN and getattr(options, flag.key)]
    if given:
        raise InputError("CONFLICT", f"The Plan files already say what {given[0]} says.", flag=given[0], hint="Leave it out, or compare layouts such as tp=8.")  # fmt: skip


def _side(options: Namespace, word: str) -> tuple[Side, Costed]:
    """One side: a layout that is predicted, or a Plan as it stands in its file."""
    return _of_layout(options, word) if is_layout(word) else _of_plan(word)


def _of_layout(options: Namespace, word: str) -> tuple[Side, Prediction]:
    from strategist.api import predicted
    from strategist.ask import complete
    from strategist.cli.given import given_from
    from strategist.records import replace

    given, _ = given_from(options, FLAGS)
    found = predicted(complete(replace(given, strategy=word)))
    return _described(word, found.layout, found, legal=found.legal, fits=found.fits), found


def _of_plan(path: str) -> tuple[Side, Plan]:
    from strategist.document.load import load_plan
    from strategist.planner.check import require_sound
    from strategist.planner.predict import predict_plan

    plan = load_plan(path)
    require_sound(plan)
    judged = predict_plan(plan)
    fits = plan.memory.worst.device <= plan.memory.usable_bytes
    return _described(path, judged.layout, plan, legal=judged.legal, fits=fits), plan


def _described(name: str, layout: str, found: Costed, *, legal: bool, fits: bool) -> Side:
    from strategist.document.comparison import Side
    from strategist.reports.brief import hardware_words

    return Side(
        name=escaped(name),
        layout=layout,
        model=found.model.name,
        hardware=hardware_words(found),
        seq_len=found.workload.seq_len,
        global_batch=found.workload.global_batch,
        legal=legal,
        fits=fits,
        memory=found.memory.peak,
        usable_bytes=found.memory.usable_bytes,
        time=found.time.step,
        tokens_per_second=found.time.tokens_per_second,
        unit=found.model.unit,
        mfu=found.time.mfu,
        target_len=found.workload.target_len,
    )
