"""What `run` and `resume` share: a Plan and a run folder in, supervised ranks, and predicted beside measured at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strategist.cli.arguments import Namespace
from strategist.cli.flags import Flag
from strategist.cli.output import Progress, note, show_document, show_lines, width
from strategist.document.plan import Plan
from strategist.document.write import as_document, dump
from strategist.errors import TrainingError
from strategist.reports.measured import compared, measured_lines
from strategist.runs.checkpoints import Checkpoint
from strategist.runs.folder import RunFolder, write_whole
from strategist.runs.job import JobRecord
from strategist.runs.observing import LEAST_STEPS, observed_run
from strategist.runs.supervise import Launch, supervise
from strategist.units import parse_integer

MAX_STEPS = 10**9
MAX_SECONDS = 10**6
DEFAULT_HEARTBEAT_SECONDS = 300

ACCEPT = (
    Flag("--accept-hardware", "run although the plan was made for assumed or other hardware"),
    Flag("--allow-edited", "run although the seal is broken or missing"),
)
WATCHING = (
    Flag("--max-restarts", "start again from the newest checkpoint after a failure, at most so often (0)", "N"),
    Flag(
        "--heartbeat", f"seconds after which a silent rank counts as hanging ({DEFAULT_HEARTBEAT_SECONDS})", "SECONDS"
    ),
)


def whole_number(options: Namespace, flag: str, default: int, *, low: int = 1, high: int = MAX_STEPS) -> int:
    """The number of a flag. Raises InputError as `parse_integer` does."""
    given = getattr(options, flag.lstrip("-").replace("-", "_"))
    return parse_integer(given, flag, low=low, high=high, example=str(max(default, low))) if given else default


def limits(options: Namespace) -> tuple[int, int]:
    """Seconds of a heartbeat, and restarts at most. Raises InputError as `parse_integer` does."""
    heartbeat_s = whole_number(options, "--heartbeat", DEFAULT_HEARTBEAT_SECONDS, high=MAX_SECONDS)
    return heartbeat_s, whole_number(options, "--max-restarts", 0, low=0)


def train_in(folder: RunFolder, plan: Plan, job: JobRecord, options: Namespace) -> int:
    """Train the built-in job of a run folder under a plan, from its newest complete checkpoint, and report. The folder must be
    locked."""
    quiet = options.quiet or options.json
    heartbeat_s, max_restarts = limits(options)
    launch = Launch(
        command=lambda checkpoint: own_command(folder, job, checkpoint),
        world=plan.processes,
        folder=folder,
        reports=True,
        saves=job.save_every is not None,
        heartbeat_s=heartbeat_s,
        max_restarts=max_restarts,
    )
    folder.report.unlink(missing_ok=True)
    folder.observed.unlink(missing_ok=True)
    write_whole(folder.plan, dump(plan))
    told = Listeners(folder.log)
    with Progress(job.steps, quiet=quiet) as progress:

        def heard(row: str) -> None:
            told.keep(row)
            if row.startswith("step "):
                told.tell(lambda: progress.advance(row, brief=row.partition(": ")[2].partition(",")[0]))
            elif options.verbose and not quiet:
                told.tell(lambda: note(row))

        supervise(launch, heard, lambda text: told.tell(lambda: note(text, quiet=quiet)))
    report = _report(folder)
    if job.observe:
        _observe(folder, plan, quiet=quiet)
    if options.json:
        terms = [as_document(each) | {"ratio": each.ratio} for each in compared(plan, report)]
        show_document({"plan": plan.seal, "terms": terms, "report": report})
    else:
        show_lines(measured_lines(plan, report, width()), no_color=options.no_color)
    return 0


class Listeners:
    """Who hears of a run while it goes on: a log file, and whoever reads what we print. Training does not depend on them: a log
    that cannot be written is said once, and a reader that went away is not told any more."""

    def __init__(self, log: Path) -> None:
        self._log, self._keeps, self._is_read = log, True, True

    def keep(self, row: str) -> None:
        """Add a row to the log."""
        if not self._keeps:
            return
        try:
            with open(self._log, "a", encoding="utf-8") as file:
                file.write(row + "\n")
        except OSError as problem:
            self._keeps, words = False, f"the log cannot be written any more: {problem}"
            self.tell(lambda: note(words))

    def tell(self, say: Callable[[], None]) -> None:
        """Print something, as long as somebody reads it."""
        if not self._is_read:
            return
        try:
            say()
        except BrokenPipeError:
            self._is_read = False


def _observe(folder: RunFolder, plan: Plan, *, quiet: bool) -> None:
    """Write what the ranks saw, or say why there is nothing."""
    seen = observed_run(folder, plan)
    if seen is None:
        note(f"nothing was observed: after the last start there were fewer than {LEAST_STEPS} steps", quiet=quiet)
        return
    write_whole(folder.observed, dump(seen))
    note(f"observed: strategist explain {folder.plan} --with {folder.observed}", quiet=quiet)


def own_command(folder: RunFolder, job: JobRecord, checkpoint: Checkpoint | None) -> list[str]:
    """The command of each rank of the built-in job."""
    words = ["--steps", str(job.steps), "--seed", str(job.seed), "--report", str(folder.report)]
    words += ["--tensorboard"] if job.tensorboard else []
    if job.save_every is not None:
        words += ["--save-every", str(job.save_every), "--keep", str(job.keep)]
        words += ["--async-save"] if job.async_save else []
    if checkpoint is not None:
        words += ["--start", str(checkpoint.path)]
    program = "strategist.measure.observed_run" if job.observe else "strategist.executor"
    return [sys.executable, "-m", program, str(folder.plan), "--run-folder", folder.path, *words]


def _report(folder: RunFolder) -> dict[str, Any]:
    if not folder.report.exists():
        raise TrainingError(
            "TRAINING", "The ranks ended without a report.", hint="Run again with --verbose, and look at what they say."
        )
    report: dict[str, Any] = json.loads(folder.report.read_text(encoding="utf-8"))
    return report
