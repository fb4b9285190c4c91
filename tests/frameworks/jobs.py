"""Emitted jobs, started unchanged as processes on CPU ranks, and the losses that they print."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from strategist import emit
from strategist.document.plan import Plan
from strategist.emitters.emitter import Options
from tests.plans import FLOAT32, make_plan
from tests.source import ROOT

SHIM = Path(__file__).with_name("cpu_ranks")
STAND_INS = Path(__file__).with_name("stand_ins")
STEPS = 3
SEED = 5

FSDP: dict[str, Any] = {"dp_shard": 2, "zero": 3}
"""The layout with which launchers are tried: what runs inside the ranks does not depend on who started them."""


def job_environment(*paths: Path) -> dict[str, str]:
    """This process's environment for a job that is started from outside: its tools first, no rank of anybody, no hub.

    paths: folders of modules, besides the repository's own.
    """
    tools = Path(sys.executable).parent
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    env |= {"PATH": f"{tools}:{env['PATH']}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # Open MPI asks root twice
    return env | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *paths)))}


def write_job(folder: Path, target: str, plan: Plan, options: Options | None = None) -> Path:
    """The files of a target in a folder of their own."""
    job = folder / "job"
    job.mkdir(parents=True)
    for name, text in emit(plan, target, options).items():
        (job / name).write_text(text, encoding="utf-8")
    return job


def as_the_script_sets_it(monkeypatch: pytest.MonkeyPatch, script: str, world: int) -> None:
    """The environment of the first rank as a launch script of Megatron's makes it, in this process."""
    for name, value in {"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if "export CUDA_DEVICE_MAX_CONNECTIONS" in script:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def trained(
    folder: Path,
    target: str,
    plan: Plan,
    words: Sequence[str],
    variables: Mapping[str, str] | None = None,
    steps: int = STEPS,
) -> list[float]:
    """The losses that the emitted job prints when it is started from another folder."""
    job = write_job(folder, target, plan)
    shims = [SHIM] if plan.strategy.backend == "nccl" else []
    env = job_environment(*shims, *([STAND_INS] if "STAND_INS" in (variables or {}) else [])) | dict(variables or {})
    command = ["bash", str(job / "launch.sh"), *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return printed_losses(done.stdout, steps)


def trained_on_nodes(
    folder: Path, target: str, plan: Plan, words: Sequence[str], options: Options, steps: int = STEPS
) -> list[float]:
    """The same of a job whose script every node starts, all of them pretended on this machine."""
    job = write_job(folder, target, plan, options)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = job_environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = ["bash", str(job / "launch.sh"), *words]
    nodes = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=env | {"NODE_RANK": str(node)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(plan.cluster.nodes)
    ]
    try:
        said = [node.communicate(timeout=300)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0] * len(nodes), "\n".join(text[-3000:] for text in said)
    return printed_losses(said[0], steps)


def printed_losses(text: str, steps: int = STEPS) -> list[float]:
    """The loss of each step in the order of steps, of which none is missing; Ray puts the worker before a line."""
    found = re.findall(r"^(?:\S*\(\w+ pid=\d+\)\S* )?step (\d+)  loss ([\d.]+)\b", text, re.MULTILINE)
    assert [int(number) for number, _ in found] == list(range(steps)), text[-3000:]
    return [float(loss) for _, loss in found]


ALONE = make_plan(backend="gloo", formats=FLOAT32, micro_batch=2, accumulation=2)
"""The plan of one rank that layouts on strategist's executor are compared with."""

WORDS = ("--steps", str(STEPS), "--seed", str(SEED))


def executor_plan(choices: dict[str, Any]) -> Plan:
    """A plan of two ranks for the batch of the one alone."""
    batch = {"micro_batch": 2 if "tp" in choices else 1, "accumulation": 2, "backend": "gloo", "formats": FLOAT32}
    return make_plan(**batch | choices)
