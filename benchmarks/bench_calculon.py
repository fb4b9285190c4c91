"""Calculon's J1 beside ours in one run: `python -m benchmarks.bench_calculon CHECKOUT` writes results/calculon.json.

CHECKOUT is a checkout of calculon-ai/calculon, which is not part of this repository; `--python` an interpreter that has what it
needs (pandas and psutil). Its search of GPT-3 13B on 64 A100 with batch 64, without offload and without overlap, runs on one
worker; ours is a process too, start-up and imports included. What counts is CPU seconds: other work on the machine moves the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench_search import FIRST, JOBS
from benchmarks.record import ROOT, circumstances, write

CONFIGURATIONS = 20_900
"""Of Calculon's J1."""
RATIO = 150.0
NEEDED = ("bin/calculon", "models/gpt3-13B.json", "systems/a100_80g.json")


def require_checkout(path: Path) -> None:
    """Leave with a sentence when a path is no checkout of Calculon."""
    missing = [name for name in NEEDED if not (path / name).is_file()]
    if missing:
        raise SystemExit(f"{path} is no checkout of Calculon: {missing[0]} is not there. Fetch calculon-ai/calculon and give its path.")  # fmt: skip


def theirs(path: Path, python: str) -> dict[str, Any]:
    """Calculon's search: CPU seconds of it and its worker, and how many configurations it went through."""
    with tempfile.TemporaryDirectory() as folder:
        system = json.loads((path / "systems/a100_80g.json").read_text(encoding="utf-8"))
        system["mem2"]["GiB"] = 0
        one_memory = Path(folder) / "nomem2.json"
        one_memory.write_text(json.dumps(system), encoding="utf-8")
        words = ("loe", "models/gpt3-13B.json", "64", "64", "float16", str(one_memory), str(Path(folder) / "out.json"), "-c", "1", "-t", "1", "--no-tp-overlap", "--no-dp-overlap")  # fmt: skip
        said, cpu = timed((python, "bin/calculon", *words), path)
    counted = re.search(r"Total executions: (\d+)", said)
    if counted is None:
        raise SystemExit(f"Calculon did not say how much it tried: {said[-300:]}")
    return {"cpu_seconds": round(cpu, 2), "configurations": int(counted[1])}


def ours() -> dict[str, Any]:
    """Our search of the same job, and the CPU seconds of its whole process."""
    command = (
        sys.executable,
        "-m",
        "benchmarks.bench_search",
        "--fields",
        json.dumps(JOBS[FIRST].question),
        "--again",
        "0",
    )
    said, cpu = timed(command, ROOT)
    return {**json.loads(said), "process_cpu_seconds": round(cpu, 3)}


def timed(command: Sequence[str], folder: Path) -> tuple[str, float]:
    """What a process says on both streams, and its CPU seconds with those of its children. Raises ChildProcessError when it
    fails."""
    variables = {**os.environ, "PYTHONPATH": str(folder), "OPENBLAS_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ran.returncode:
        raise ChildProcessError(f"{' '.join(command)} ended with {ran.returncode}: {ran.stdout[-300:]}")
    return ran.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Run both, write and print; exit 1 when the ratio is missed or a search was not of the size that it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of calculon-ai/calculon")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that can run it (this one)")
    options = parser.parse_args()
    require_checkout(options.checkout)
    other, own = theirs(options.checkout.resolve(), options.python), ours()
    result = {**circumstances(("strategist", "numpy")), "calculon": other, "strategist": own}
    result["ratio"] = round(other["cpu_seconds"] / own["process_cpu_seconds"], 1)
    print(f"Calculon: {other['configurations']:,} configurations in {other['cpu_seconds']} CPU s")
    print(
        f"ours: {own['enumerated']:,} enumerated, {own['evaluated']:,} evaluated in {own['process_cpu_seconds']} CPU s"
    )
    print(f"ratio {result['ratio']}, bar {RATIO}; written to {write('calculon', result)}")
    return int(result["ratio"] < RATIO or other["configurations"] != CONFIGURATIONS)


if __name__ == "__main__":
    sys.exit(main())
