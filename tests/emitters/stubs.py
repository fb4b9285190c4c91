"""Launchers that start nothing: they write down how they were called."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TORCHRUN = """#!/usr/bin/env bash
call="$STUB_LOG/call-${SLURM_NODEID:-0}"
printf '%s\\0' "$@" > "$call.argv"
env -0 > "$call.env"
"""

SRUN = """#!/usr/bin/env bash
printf '%s\\0' "$@" > "$STUB_LOG/srun.argv"
while [[ "$1" == --* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" || exit; done
"""

SCONTROL = """#!/usr/bin/env bash
[[ "$1 $2" == "show hostnames" ]] || exit 1
for ((node = 0; node < SLURM_NNODES; node++)); do echo "node00$((node + 1))"; done
"""

BPSLAUNCH = """#!/usr/bin/env bash
printf '%s\\0' "$DMLC_NUM_WORKER" "$DMLC_NUM_SERVER" "$DMLC_PS_ROOT_URI" > "$STUB_LOG/role-$DMLC_ROLE"
[[ "$DMLC_ROLE" != worker ]] || sh -c "$*"
"""
"""As BytePS's launcher: a worker's words, joined by blanks, go to a shell; the other roles have none."""


@dataclass(frozen=True)
class Call:
    """How the launcher was called on one node."""

    argv: list[str]
    env: dict[str, str]

    def option(self, name: str) -> str:
        """The word after an option."""
        return self.argv[self.argv.index(name) + 1]

    @property
    def script(self) -> list[str]:
        """The training script and its arguments."""
        start = next(i for i, word in enumerate(self.argv) if word.endswith("train.py"))
        return self.argv[start:]


@dataclass(frozen=True)
class Ran:
    """A finished script: its exit code, what it said, and the calls of the launcher by node."""

    code: int
    err: str
    calls: list[Call]


def run_script(
    script: Path, *words: str, log: Path, cwd: Path, nodes: int = 1, variables: Mapping[str, str] | None = None
) -> Ran:
    """Run an emitted script with the stub launchers in front of everything else on PATH."""
    tools = log / "tools"
    tools.mkdir(parents=True)
    recorders = dict.fromkeys(("torchrun", "accelerate", "python3", "mpirun"), TORCHRUN)
    for name, text in (recorders | {"srun": SRUN, "scontrol": SCONTROL, "bpslaunch": BPSLAUNCH}).items():
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "STUB_LOG": str(log), "LC_ALL": "C.UTF-8", **(variables or {})}
    if script.suffix == ".sbatch":
        env |= {"SLURM_NNODES": str(nodes), "SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "node[001-009]"}
        env.setdefault("SLURM_SUBMIT_DIR", str(script.parent))
    done = subprocess.run(["bash", str(script), *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=30)
    return Ran(done.returncode, done.stderr, [_call(path) for path in sorted(log.glob("call-*.argv"))])


def _call(path: Path) -> Call:
    pairs = (word.partition("=") for word in zeros(path.with_suffix(".env")))
    return Call(zeros(path), {name: value for name, _, value in pairs})


def zeros(path: Path) -> Sequence[str] | list[str]:
    """The texts of a file, each ended by a zero byte."""
    return path.read_bytes().decode().split("\0")[:-1]
