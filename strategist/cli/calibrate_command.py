"""`strategist calibrate`: learn factors of the time model from measured runs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from strategist.cli.arguments import Command, Namespace, Positional
from strategist.cli.files import check_out, deliver
from strategist.cli.flags import COMMON, OUTPUT
from strategist.cli.output import watched, width
from strategist.errors import InputError, shown

COMMAND = Command(
    "calibrate",
    "Fit a few factors of the time model to measured runs, and say what they are worth on runs left out.",
    (*OUTPUT, *COMMON),
    (
        Positional(
            "file",
            "a CSV or JSON file of measured runs; columns as in benchmarks/truth/README.md. Or the first run.json",
        ),
        Positional(
            "observed", "run.json files of `run --observe`, each beside its plan.json", optional=True, repeats=True
        ),
    ),
    examples=(
        "strategist calibrate runs.csv RUN/run.json OTHER/run.json --out calibration.json",
        "strategist calibrate runs.csv --out calibration.json",
        "strategist plan --model-size 7B --hardware dgx-h100:4 --calibration calibration.json",
    ),
)


def run(options: Namespace) -> int:
    """Fit, judge by leaving whole groups out, print, and write when asked to."""
    from strategist.accuracy.calibrate import calibrate  # NumPy, the models and scipy: help needs none of them
    from strategist.accuracy.judge import judge
    from strategist.accuracy.observed import judged_run
    from strategist.accuracy.report import calibration_text, skipped_text, unread_text
    from strategist.accuracy.table import read_runs
    from strategist.facts.calibration import shipped_factors

    check_out(options)
    tables, observed = _sorts((options.file, *options.observed))
    with watched(options) as watch:
        judged = (*(judge(read_runs(tables[0]), watch=watch) if tables else ()), *map(judged_run, observed))
        found = calibrate(judged, shipped_factors(), watch=watch)
    deliver(
        found,
        options,
        lambda: [*calibration_text(found, width()), *skipped_text(judged, width()), *unread_text(judged, width())],
    )
    return 0


def _sorts(paths: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The table, where the first file is none of `run --observe`, and the files of `run --observe`, which lie beside their plans. Raises
    InputError DUPLICATE_KEY for one that is named twice: its run would count twice."""
    is_run = paths[0].endswith(".json") and os.path.isfile(os.path.join(os.path.dirname(paths[0]), "plan.json"))
    observed = paths if is_run else paths[1:]
    for path in observed:
        if observed.count(path) > 1:
            raise InputError("DUPLICATE_KEY", f"OBSERVED: {shown(path)} is named twice.", flag="OBSERVED", value=path, hint="Name each run once.")  # fmt: skip
    return paths[: len(paths) - len(observed)], observed
