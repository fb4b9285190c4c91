"""Where a plan with offload = nvme keeps the optimizer's state: a plan names machines, not their folders."""

from __future__ import annotations

from strategist.document.plan import Plan
from strategist.emitters.emitter import Emitter, Options
from strategist.errors import ImpossibleError, InputError
from strategist.records import replace

VARIABLE = "TMPDIR"
"""What tells strategist's executor the folder; the system's folder for temporary files without it."""


def on_drive(emitter: Emitter, plan: Plan, options: Options) -> Options:
    """The options as a target takes them: its files name the folder, or jobs on our executor get it as a variable.

    Raises InputError MISSING where the files need a folder and none is told, CONFLICT where it is told twice, and ImpossibleError
    UNSUPPORTED where nothing of the plan lies on a drive.
    """
    folder = options.nvme_path
    if plan.strategy.offload != "nvme":
        if folder is not None:
            raise ImpossibleError(
                "UNSUPPORTED",
                "This plan keeps nothing on a drive; --nvme-path has no place in its files.",
                flag="--nvme-path",
                value=folder,
                hint="Leave --nvme-path away, or plan with --pin offload=nvme.",
            )
        return options
    if emitter.names_drive and folder is None:
        raise InputError(
            "MISSING",
            f"{emitter.name} needs --nvme-path: its files name the folder on each node's drive that strategy.offload = nvme keeps "
            "the optimizer's state in, and the plan names none.",
            flag="--nvme-path",
            hint="Example: --nvme-path /local_nvme.",
        )
    if emitter.names_drive or folder is None:
        return options
    if any(name == VARIABLE for name, _ in options.env):
        raise InputError(
            "CONFLICT",
            f"--nvme-path and --env {VARIABLE} both name the folder on the drive.",
            flag="--nvme-path",
            value=folder,
            hint="Keep one of them.",
        )
    return replace(options, env=(*options.env, (VARIABLE, folder)))
