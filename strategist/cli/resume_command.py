"""`strategist resume`: go on with a run from its newest complete checkpoint, under its Plan or another one."""

from __future__ import annotations

import os

from strategist.cli.arguments import Command, Namespace, Positional
from strategist.cli.flags import COMMON, Flag
from strategist.cli.launching import ACCEPT, WATCHING, train_in
from strategist.cli.output import note, show_document, show_text
from strategist.cli.preflight import preflight, require_tensorboard
from strategist.document.load import load_plan
from strategist.errors import InputError, shown
from strategist.runs.checkpoints import Checkpoint, newest_complete
from strategist.runs.folder import RunFolder
from strategist.runs.job import read_job, require_same_job
from strategist.runs.lock import locked

COMMAND = Command(
    "resume",
    "Go on with a run from its newest complete checkpoint.",
    (
        Flag("--plan", "another Plan for the same job, with other ranks or another layout", "FILE"),
        *WATCHING,
        *ACCEPT,
        *COMMON,
    ),
    (Positional("run", "a folder that `run --out` made"),),
    examples=("strategist resume RUN", "strategist resume RUN --plan other.json"),
)


def run(options: Namespace) -> int:
    """Find the checkpoint, check the plan against the job and this machine, and train on."""
    folder = run_folder(options.run)
    with locked(folder.lock):  # before anything is read: whoever runs in there takes old checkpoints away
        return _resume(folder, options)


def _resume(folder: RunFolder, options: Namespace) -> int:
    checkpoint = _checkpoint(folder)
    job, before = read_job(folder), load_plan(str(folder.plan), "RUN")
    plan = before if options.plan is None else load_plan(options.plan, "--plan")
    require_same_job(before, plan)
    if job.tensorboard:
        require_tensorboard()
    preflight(plan, allow_edited=options.allow_edited, accept_hardware=options.accept_hardware, own_job=True)
    if checkpoint.step >= job.steps:
        return _nothing_left(checkpoint, options)
    note(f"going on after step {checkpoint.step} of {job.steps}", quiet=options.quiet or options.json)
    return train_in(folder, plan, job, options)


def run_folder(path: str) -> RunFolder:
    """The run folder that a user names. Raises InputError FILE_NOT_FOUND or NOT_A_FILE."""
    if not os.path.isdir(path):
        code, words = (
            ("NOT_A_FILE", "is not a folder") if os.path.lexists(path) else ("FILE_NOT_FOUND", "does not exist")
        )
        raise InputError(code, f"RUN: {shown(path)} {words}.", flag="RUN", value=path, hint="Name the folder of a run.")
    return RunFolder(os.path.abspath(path))


def _checkpoint(folder: RunFolder) -> Checkpoint:
    """The newest complete checkpoint. Raises InputError NO_CHECKPOINT, with what is wrong with each that is there."""
    checkpoint, passed = newest_complete(folder.checkpoints)
    if checkpoint is None:
        found = " ".join(f"{each.path.name}: {each.why}" for each in passed) or "There is none at all."
        raise InputError(
            "NO_CHECKPOINT",
            f"{shown(folder.path)} holds no complete checkpoint. {found}",
            flag="RUN",
            value=folder.path,
            hint="Start again with `strategist run PLAN --out RUN --save-every N`.",
        )
    return checkpoint


def _nothing_left(checkpoint: Checkpoint, options: Namespace) -> int:
    if options.json:
        show_document({"done": checkpoint.step, "checkpoint": str(checkpoint.path), "exit": 0})
    else:
        show_text(f"All {checkpoint.step} steps are done.")
    return 0
