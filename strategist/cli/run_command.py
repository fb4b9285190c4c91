"""`strategist run`: train with a Plan on this machine, and show what was predicted beside what happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from strategist.cli.arguments import Command, Namespace, Positional
from strategist.cli.flags import COMMON, Flag
from strategist.cli.output import Progress, note, show_document, show_lines, width
from strategist.cli.preflight import preflight
from strategist.document.load import load_plan
from strategist.document.plan import Plan
from strategist.document.write import as_document
from strategist.errors import InputError, TrainingError
from strategist.reports.measured import compared, measured_lines
from strategist.units import parse_integer

MAX_STEPS = 10**9
DEFAULT_STEPS = 20
TAIL = 20
PATIENCE_SECONDS = 45
"""How long torchrun may take to end: it gives its ranks 30 seconds before it kills them."""

FLAGS = (
    Flag("--steps", "optimizer steps of the built-in job (20)", "N"),
    Flag("--accept-hardware", "run although the plan was made for assumed or other hardware"),
    Flag("--allow-edited", "run although the seal is broken or missing"),
    *COMMON,
)
COMMAND = Command(
    "run",
    "Train with a Plan on this machine.",
    FLAGS,
    (Positional("plan", "a Plan file"),),
    examples=(
        "strategist run plan.json",
        "strategist run plan.json -- python train.py --steps 100",
    ),
)


def run(options: Namespace) -> int:
    """Check the plan against this machine, start torchrun, and report."""
    command = options.foreign
    if command == []:
        raise InputError(
            "MISSING",
            "There is no command after --.",
            flag="--",
            hint="Example: strategist run plan.json -- python train.py.",
        )
    steps = parse_integer(options.steps, "--steps", high=MAX_STEPS, example="20") if options.steps else DEFAULT_STEPS
    plan = load_plan(options.plan)
    preflight(plan, allow_edited=options.allow_edited, accept_hardware=options.accept_hardware, own_job=command is None)
    if command is not None:
        _start(_torchrun(plan, command), None, quiet=options.quiet)
        if options.json:
            show_document({"plan": plan.seal, "command": command, "ranks": plan.mesh.world, "exit": 0})
        return 0
    report = _train(plan, options.plan, steps, quiet=options.quiet or options.json, verbose=options.verbose)
    if options.json:
        terms = [as_document(each) | {"ratio": each.ratio} for each in compared(plan, report)]
        show_document({"plan": plan.seal, "terms": terms, "report": report})
    else:
        show_lines(measured_lines(plan, report, width()), no_color=options.no_color)
    return 0


def _torchrun(plan: Plan, command: Sequence[str]) -> list[str]:
    """torchrun's command line on this machine, with one process of `command` per rank."""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nnodes",
        "1",
        "--nproc-per-node",
        str(plan.mesh.world),
    ]
    return [sys.executable, *launcher, "--no-python", *_as_program(command)]


def _as_program(command: Sequence[str]) -> list[str]:
    """The command as it was typed, except that `python` is the Python that runs us, which has torch; a script alone is run
    by it too."""
    first = os.path.basename(command[0])
    if first.startswith("python"):
        return [sys.executable, *command[1:]]
    return [sys.executable, *command] if first.endswith(".py") else list(command)


def _train(plan: Plan, path: str, steps: int, *, quiet: bool, verbose: bool) -> dict[str, Any]:
    """Run the built-in job and return rank 0's report."""
    with tempfile.TemporaryDirectory(prefix="strategist-run-") as folder:
        target = os.path.join(folder, "report.json")
        command = [
            "python",
            "-m",
            "strategist.executor",
            os.path.abspath(path),
            "--steps",
            str(steps),
            "--report",
            target,
        ]
        _start(_torchrun(plan, command), steps, quiet=quiet, verbose=verbose)
        if not os.path.exists(target):
            raise TrainingError(
                "TRAINING",
                "The ranks ended without a report.",
                hint="Run again with --verbose, or run the executor by hand: torchrun -m strategist.executor PLAN.",
            )
        with open(target, encoding="utf-8") as file:
            report: dict[str, Any] = json.load(file)
    return report


def _start(command: Sequence[str], steps: int | None, *, quiet: bool, verbose: bool = False) -> None:
    """Start the ranks, show their progress, and let none of them outlive us. Raises TrainingError when they fail."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(os.environ)
    with (
        _signals_as_exceptions(),
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as job,
    ):
        try:
            tail = _follow(job, steps, quiet=quiet, verbose=verbose)
        except BaseException:  # an interrupt, a signal, a closed stderr: whatever ends us ends the ranks first
            _stop(job)
            raise
    if job.returncode:
        raise _failure(job.returncode, tail)


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """What would end this process at once (kill, a closed terminal) unwinds it instead, as Ctrl-C does."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may listen to signals
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(job: subprocess.Popen[str]) -> None:
    """End torchrun, which ends its ranks: each has a session of its own, so nobody else could."""
    os.killpg(job.pid, signal.SIGTERM)
    try:
        job.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def _follow(job: subprocess.Popen[str], steps: int | None, *, quiet: bool, verbose: bool) -> list[str]:
    """Show each finished step and keep the last lines for an error. A user's own command is passed through, and so is
    everything that the ranks of the built-in job say when more is wanted."""
    tail: list[str] = []
    with Progress(steps, quiet=quiet) as progress:
        for row in _rows(job):
            tail = [*tail, row][-TAIL:]
            if steps is None:
                note(row)
            elif row.startswith("step "):
                progress.advance(row, brief=row.partition(": ")[2].partition(",")[0])
            elif verbose:
                note(row)
    return tail


def _rows(job: subprocess.Popen[str]) -> Iterator[str]:
    if job.stdout is not None:
        yield from (row.rstrip("\n") for row in job.stdout)


def _failure(code: int, tail: Sequence[str]) -> TrainingError:
    """The ranks' own sentence when there is one, otherwise their last words."""
    said = [row for row in tail if row.startswith("E_")]
    words = said[0] if said else next((row for row in reversed(tail) if "Error" in row), f"exit status {code}")
    return TrainingError(
        "TRAINING", f"The training processes failed: {words}", hint="The lines above it: " + " / ".join(tail[-3:])
    )
