"""`strategist run`: train with a Plan on this machine, and show what was predicted beside what happened."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence

from strategist.cli.arguments import PLAN, Command, Namespace
from strategist.cli.flags import COMMON, Flag
from strategist.cli.launching import ACCEPT, WATCHING, limits, train_in, whole_number
from strategist.cli.output import note, show_document
from strategist.cli.preflight import preflight, require_tensorboard
from strategist.document.load import load_plan
from strategist.document.plan import Plan
from strategist.document.write import dump
from strategist.errors import InputError, shown
from strategist.runs.folder import RunFolder, write_whole
from strategist.runs.job import DEFAULT_KEEP, JobRecord
from strategist.runs.lock import locked
from strategist.runs.observing import LEAST_STEPS
from strategist.runs.supervise import Launch, supervise
from strategist.writing import check_target, make_folder

DEFAULT_STEPS = 20

FLAGS = (
    Flag("--steps", "optimizer steps of the built-in job (20)", "N"),
    Flag("--out", "a new folder for the run: checkpoints, verdicts, what `resume` and `status` read", "RUN"),
    Flag("--save-every", "save a checkpoint after every N steps; needs --out", "N"),
    Flag("--tensorboard", "loss, step time, memory, faults and checkpoints as scalars in RUN/tensorboard; needs --out"),
    Flag("--async-save", "train on while a checkpoint is written, from a copy in host memory; needs --save-every"),
    Flag(
        "--observe",
        "time and memory in the Plan's terms into RUN/run.json, for `explain --with` and `calibrate`; needs --out",
    ),
    Flag("--keep", f"how many checkpoints stay ({DEFAULT_KEEP})", "N"),
    *WATCHING,
    *ACCEPT,
    *COMMON,
)
COMMAND = Command(
    "run",
    "Train with a Plan on this machine.",
    FLAGS,
    (PLAN,),
    examples=(
        "strategist run plan.json",
        "strategist run plan.json --out RUN --observe && strategist explain plan.json --with RUN/run.json",
        "strategist run plan.json --steps 1000 --out RUN --save-every 100 --max-restarts 3",
        "strategist run plan.json -- python train.py --steps 100",
    ),
)
OF_A_FOLDER = ("--save-every", "--keep", "--max-restarts", "--async-save", "--observe", "--tensorboard")
"""Flags that mean something only where there is a run folder."""


def run(options: Namespace) -> int:
    """Check the plan against this machine, start the ranks, and report."""
    command = options.foreign
    _check_flags(options, command)
    job = _job(options)
    limits(options)  # what is wrong with them is said before a folder is made
    plan = load_plan(options.plan)
    if options.out is not None:
        _require_new(options.out)
    if job.tensorboard:
        require_tensorboard()
    preflight(plan, allow_edited=options.allow_edited, accept_hardware=options.accept_hardware, own_job=command is None)
    if options.out is not None:
        folder = RunFolder(os.path.abspath(options.out))
        make_folder(str(folder.checkpoints), "--out")
        return _begin(folder, plan, job, options)
    with tempfile.TemporaryDirectory(prefix="strategist-run-") as place:
        folder = RunFolder(place)
        return _begin(folder, plan, job, options) if command is None else _foreign(folder, plan, command, options)


def _check_flags(options: Namespace, command: Sequence[str] | None) -> None:
    if command == []:
        raise InputError(
            "MISSING",
            "There is no command after --.",
            flag="--",
            hint="Example: strategist run plan.json -- python train.py.",
        )
    for flag in (*OF_A_FOLDER, "--out", "--heartbeat"):
        given = getattr(options, flag.lstrip("-").replace("-", "_")) not in (None, False)
        if given and command is not None:
            raise InputError(
                "CONFLICT",
                f"{flag} is about the built-in job, and the command after -- keeps its own files.",
                flag=flag,
                hint="Leave it out; in a program of your own, use session.save and session.load.",
            )
        if given and flag in OF_A_FOLDER and options.out is None:
            raise InputError("MISSING", f"{flag} needs a run folder.", flag="--out", hint="Add --out RUN.")
    if options.async_save and options.save_every is None:
        raise InputError(
            "MISSING", "--async-save needs an interval.", flag="--save-every", hint="Add --save-every 100."
        )


def _require_new(path: str) -> None:
    """A run folder is made by its run. Raises InputError EXISTS and what `check_target` raises."""
    if os.path.isdir(path):
        raise InputError(
            "EXISTS",
            f"--out: {shown(path)} exists; it was not touched.",
            flag="--out",
            value=path,
            hint="Choose another name, or go on with that run: `strategist resume RUN`.",
        )
    check_target(path.rstrip("/"), "--out", force=False)


def _job(options: Namespace) -> JobRecord:
    return JobRecord(
        steps=whole_number(options, "--steps", DEFAULT_STEPS, low=LEAST_STEPS if options.observe else 1),
        save_every=whole_number(options, "--save-every", 1) if options.save_every else None,
        keep=whole_number(options, "--keep", DEFAULT_KEEP),
        observe=options.observe,
        async_save=options.async_save,
        tensorboard=options.tensorboard,
    )


def _begin(folder: RunFolder, plan: Plan, job: JobRecord, options: Namespace) -> int:
    with locked(folder.lock):
        write_whole(folder.job, dump(job))
        return train_in(folder, plan, job, options)


def _foreign(folder: RunFolder, plan: Plan, command: Sequence[str], options: Namespace) -> int:
    """Somebody's own program, once per rank. What it says is passed through."""
    launch = Launch(
        command=lambda _: _as_program(command), world=plan.processes, folder=folder, reports=False, saves=False, heartbeat_s=0.0
    )  # fmt: skip
    supervise(launch, note, note)
    if options.json:
        show_document({"plan": plan.seal, "command": command, "ranks": plan.processes, "exit": 0})
    return 0


def _as_program(command: Sequence[str]) -> list[str]:
    """The command as it was typed, except that `python` is the Python that runs us, which has torch; a script alone is run
    by it too."""
    first = os.path.basename(command[0])
    if first.startswith("python"):
        return [sys.executable, *command[1:]]
    return [sys.executable, *command] if first.endswith(".py") else list(command)
