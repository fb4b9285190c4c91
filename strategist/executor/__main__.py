"""`torchrun --nproc-per-node N -m strategist.executor PLAN`: train under a plan; rank 0 writes the report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from strategist.document.load import load_plan
from strategist.document.write import as_document
from strategist.errors import InputError, InternalError, InterruptError, StrategistError, shown
from strategist.executor.processes import is_collateral
from strategist.executor.session import StepResult
from strategist.executor.train import Observer, TrainingReport, train
from strategist.executor.watch import Saving, Watch
from strategist.runs.folder import RunFolder, write_whole
from strategist.units import parse_integer


def main(arguments: Sequence[str] | None = None, make_observer: Callable[[RunFolder], Observer] | None = None) -> int:
    """Run the command; the exit code is that of the error, 0 without one. `make_observer` makes what looks at the steps of a
    supervised run."""
    options = _parser().parse_args(arguments)
    is_first, watch = os.environ.get("RANK", "0") == "0", _watch(options)
    try:
        steps = parse_integer(options.steps, "--steps", high=10**9, example="20")
        seed = parse_integer(options.seed, "--seed", low=0, high=2**31, example="0")
        plan, path = load_plan(options.plan), _writable(options.report)
        observer = make_observer(watch.folder) if make_observer and watch else None
        report = train(plan, steps, seed=seed, on_step=_say if is_first else None, watch=watch, observer=observer)
        if is_first and path is not None:
            write_report(report, path)
    except StrategistError as error:
        if watch is not None and not isinstance(error, InterruptError):
            watch.failed(error)
        if is_first or not is_collateral(error.__cause__):
            sys.stderr.write(f"E_{error.code}: {error.message}\n{error.hint or ''}\n")
        return error.exit_code
    if watch is not None:
        watch.phase("done")
    return 0


def _watch(options: argparse.Namespace) -> Watch | None:
    """This rank's side of a supervised run, when it is part of one."""
    if options.run_folder is None:
        return None
    saving = (
        Saving(every=int(options.save_every), keep=int(options.keep), in_background=options.async_save)
        if options.save_every
        else None
    )
    return Watch(
        RunFolder(options.run_folder),
        start=Path(options.start) if options.start else None,
        saving=saving,
        scalars=options.tensorboard,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m strategist.executor", description=__doc__)
    parser.add_argument("plan", metavar="PLAN", help="a strategist-plan/1 document")
    parser.add_argument("--steps", default="20", help="optimizer steps (default 20)")
    parser.add_argument("--seed", default="0", help="seed of weights and data (default 0)")
    parser.add_argument("--report", metavar="FILE", help="where rank 0 writes losses, seconds, memory, versions (JSON)")
    supervised = parser.add_argument_group("as part of `strategist run`, which gives these")
    supervised.add_argument("--run-folder", metavar="RUN", help="where this rank writes about itself")
    supervised.add_argument("--start", metavar="CHECKPOINT", help="go on from there")
    supervised.add_argument("--save-every", metavar="N", help="save after every N steps and when asked to stop")
    supervised.add_argument("--keep", metavar="N", help="checkpoints that stay")
    supervised.add_argument("--tensorboard", action="store_true", help="write scalars into the run folder")
    supervised.add_argument("--async-save", action="store_true", help="train on while a checkpoint is written")
    return parser


def _say(number: int, result: StepResult) -> None:
    norm, scale = result.gradient_norm, result.loss_scale
    said = f"gradients overflowed at loss scale {scale:.0f}" if norm is None else f"gradient norm {norm:.3f}"
    sys.stdout.write(
        f"step {number}: loss {result.loss:.4f}, {said}, {result.tokens} tokens in {result.seconds:.3f} s\n"
    )
    sys.stdout.flush()


def _writable(path: str | None) -> Path | None:
    """The place of the report, asked about before hours of training rather than after."""
    if path is not None and not os.access(Path(path).parent, os.W_OK):
        raise InputError(
            "FILE_NOT_FOUND",
            f"--report: the folder of {shown(path)} does not exist or may not be written.",
            flag="--report",
            value=path,
            hint="Make the folder first.",
        )
    return None if path is None else Path(path)


def write_report(report: TrainingReport, path: Path) -> None:
    """The report as JSON, in place at once or not at all. Raises InternalError IO when it cannot be written."""
    document = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    text = json.dumps({name: as_document(value) for name, value in document.items()}, indent=1)
    try:
        write_whole(path, text + "\n")
    except OSError as problem:
        raise InternalError(
            "IO", f"--report: {shown(path)} cannot be written ({problem}).", flag="--report", hint="Free some space."
        ) from problem


if __name__ == "__main__":
    sys.exit(main())
