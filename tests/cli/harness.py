"""Running the command line: in this process for speed, as a process of its own where the process matters."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from strategist.cli import main
from strategist.document.plan import Plan
from strategist.document.write import dump
from tests.plans import make_plan

ROOT = Path(__file__).parents[2]
PROGRAM = (sys.executable, "-m", "strategist")
PLAIN = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "STRATEGIST_DEBUG")
"""Variables that change what is printed; every run starts without them."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout; anything else there is a failure."""
        return json.loads(self.out)

    @property
    def error(self) -> Mapping[str, Any]:
        """The error object that --json prints."""
        assert list(self.document) == ["error"], self.out
        return dict(self.document["error"])


def call(*words: str) -> Outcome:
    """`strategist WORDS` in this process."""
    out, err = _stream(), _stream()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(list(words))
    return Outcome(code, _written(out), _written(err))


def _stream() -> io.TextIOWrapper:
    """A stream that refuses what cannot be encoded, as a real one does."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8")


def _written(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


def environment(**changes: str | None) -> dict[str, str]:
    """This process' variables with our package in front, nothing that changes the output, and some changes."""
    kept = {name: value for name, value in os.environ.items() if name not in PLAIN}
    changed = {name: value for name, value in changes.items() if value is not None}
    return {k: v for k, v in kept.items() if k not in changes} | {"PYTHONPATH": str(ROOT)} | changed


def process(*words: str, cwd: Path | None = None, **variables: str | None) -> Outcome:
    """`strategist WORDS` as a process of its own; a variable set to None is taken away."""
    return completed((*PROGRAM, *words), cwd=cwd, **variables)


HANGS_S = 240
"""Seconds after which a command hangs: one that traces took 78 beside other tests on a machine at a third of its speed."""


def completed(command: Sequence[str], *, cwd: Path | None = None, **variables: str | None) -> Outcome:
    """Any command, run to its end."""
    ran = subprocess.run(
        command, env=environment(**variables), cwd=cwd, capture_output=True, timeout=HANGS_S, check=False
    )
    letters = (variables.get("PYTHONIOENCODING") or "utf-8").partition(":")[0]
    return Outcome(ran.returncode, ran.stdout.decode(letters), ran.stderr.decode(letters))


@cache
def plan_text(*words: str) -> str:
    """The Plan that a question is answered with, as `plan --json` prints it."""
    ran = call("plan", "--json", *words)
    assert ran.code == 0, ran.out
    return ran.out


def plan_file(folder: Path, *words: str, name: str = "plan.json") -> str:
    """The path of a new file with a sealed Plan; of a small question when no words are given."""
    path = folder / name
    path.write_text(plan_text(*(words or SMALL)), encoding="utf-8")
    return str(path)


def hand_written(folder: Path, name: str = "plan.json", **choices: Any) -> str:
    """The path of a new file with a Plan written by hand, without a seal."""
    plan: Plan = make_plan(**choices)
    path = folder / name
    path.write_text(dump(plan), encoding="utf-8")
    return str(path)


@dataclass(frozen=True)
class Refusal:
    """How a command refuses: its exit code, its error's code, further words, and what was done to the plan before."""

    exit_code: int
    code: str
    words: tuple[str, ...] = ()
    edit: Callable[[Path], None] | None = None


def edited(**changes: Any) -> Callable[[Path], None]:
    """Changes some fields of a document in its file."""

    def edit(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")

    return edit


def refused(folder: Path, command: str, *words: str, **variables: str | None) -> Outcome:
    """`strategist COMMAND plan.json --out seen.json --json` where it must refuse and leave the folder as it was."""
    before = sorted(folder.iterdir())
    ran = process(command, "plan.json", "--out", "seen.json", "--json", *words, cwd=folder, **variables)
    assert sorted(path for path in folder.iterdir() if path.name != "__pycache__") == before
    return ran


def assert_refuses(folder: Path, command: str, refusal: Refusal, **variables: str | None) -> None:
    """Edit the plan, ask, and compare code and exit code; there is always a hint."""
    if refusal.edit is not None:
        refusal.edit(folder / "plan.json")
    ran = refused(folder, command, *refusal.words, **variables)
    assert (ran.code, ran.error["code"]) == (refusal.exit_code, refusal.code), ran.out
    assert ran.error["hint"]


def runs_file(folder: Path, *rows: Mapping[str, str], name: str = "runs.csv") -> str:
    """The path of a new table of measured runs; of one run when no rows are given."""
    path = folder / name
    written = rows or (RUN,)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, sorted({column for row in written for column in row}), restval="")
        table.writeheader()
        table.writerows(written)
    return str(path)


RUN: Mapping[str, str] = {
    "id": "run-1", "source": "ours", "quality": "A", "framework": "torchtitan", "hardware": "h100-sxm-80gb",
    "gpus_total": "8", "gpus_per_node": "8", "model": "llama-3-8b", "seq_len": "8192", "global_batch_seqs": "8",
    "micro_batch_seqs": "1", "precision": "bf16", "dp": "8", "zero_class": "3", "recompute_class": "full",
    "step_time_s": "1.2",
}  # fmt: skip
"""A measured run that can be predicted."""

MANY: tuple[Mapping[str, str], ...] = tuple(
    {
        **RUN,
        "id": f"run-{n}",
        "source": f"lab {n % 3}",
        "seq_len": str(1024 * (n + 1)),
        "step_time_s": f"{0.2 * (n + 1):.1f}",
    }
    for n in range(12)
)
"""Measured runs of three sources."""

SMALL = ("--model", "llama-debug", "--hardware", "cpu:2")
"""A question that is answered at once."""
