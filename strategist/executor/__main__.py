"""`torchrun --nproc-per-node N -m strategist.executor PLAN`: train under a plan; rank 0 writes the report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from strategist.document.load import load_plan
from strategist.document.write import as_document
from strategist.errors import StrategistError
from strategist.executor.processes import is_collateral
from strategist.executor.session import StepResult
from strategist.executor.train import TrainingReport, train


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is that of the error, 0 without one."""
    options = _parser().parse_args(arguments)
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        report = train(load_plan(options.plan), options.steps, seed=options.seed, on_step=_say if is_first else None)
        if is_first and options.report:
            write_report(report, options.report)
    except StrategistError as error:
        if is_first or not is_collateral(error.__cause__):
            sys.stderr.write(f"E_{error.code}: {error.message}\n{error.hint or ''}\n")
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m strategist.executor", description=__doc__)
    parser.add_argument("plan", metavar="PLAN", help="a strategist-plan/1 document")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default 0)")
    parser.add_argument("--report", metavar="FILE", help="where rank 0 writes losses, seconds, memory, versions (JSON)")
    return parser


def _say(number: int, result: StepResult) -> None:
    sys.stdout.write(
        f"step {number}: loss {result.loss:.4f}, gradient norm {result.gradient_norm:.3f}, "
        f"{result.tokens} tokens in {result.seconds:.3f} s\n"
    )
    sys.stdout.flush()


def write_report(report: TrainingReport, path: str) -> None:
    """The report as JSON, in place at once or not at all."""
    document = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    partial = f"{path}.{os.getpid()}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump({name: as_document(value) for name, value in document.items()}, file, indent=1)
        file.write("\n")
    Path(partial).replace(path)


if __name__ == "__main__":
    sys.exit(main())
