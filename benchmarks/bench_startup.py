"""Start-up and search, held against bars: `make bench` runs this and writes results/startup.json.

Other work on the machine moves every time, so the bars on start-up are ratios: two commands run in turn, pair by pair, and
the median over the pairs' ratios counts. Byte code must be compiled first, as an installation does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from statistics import median
from typing import Any, NamedTuple

import strategist
from benchmarks.record import circumstances, write
from strategist.document.write import dump
from strategist.emitters import EMITTERS
from tests.cli.bad_inputs import APART, OWED, Row, case_of, corpus
from tests.cli.harness import call
from tests.emitters.grid import written

PROGRAM = str(Path(sysconfig.get_path("scripts")) / "strategist")
PLAN = (PROGRAM, "plan", "--model-size", "7B")
HELP = (PROGRAM, "--help")
LARGE = (PROGRAM, "plan", "--model", "llama-3.1-405b", "--hardware", "dgx-h100:256")
IMPORTS = (sys.executable, "-c", "import numpy, pydantic")
NOTHING = (sys.executable, "-c", "pass")

HEAVY = ("torch", "transformers", "networkx", "scipy")
BARS = {
    "plan_ratio": 1.8,
    "help_ratio": 4.0,
    "large_seconds": 3.0,
    "large_peak_MB": 600.0,
    "refusal_seconds": 0.5,
    "emit_seconds": 0.3,
}
"""What the figures must stay under; a MB is 10^6 bytes."""


class Ran(NamedTuple):
    """One process: seconds from start to end, and its largest resident set in bytes."""

    seconds: float
    peak_bytes: int


def run(command: Sequence[str]) -> Ran:
    """Run a command to its end, its output thrown away. Raises ChildProcessError when it fails."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise ChildProcessError(f"{' '.join(command)} ended with {child.returncode}")
    return Ran(seconds, usage.ru_maxrss * 1024)


def paired(ours: Sequence[str], other: Sequence[str], pairs: int) -> dict[str, Any]:
    """Two commands in turn, the first one changing sides: the medians of both and of the pairs' ratios."""
    run(ours), run(other)  # both files are in memory from here on
    both = [(run(ours), run(other)) if number % 2 else (run(other), run(ours))[::-1] for number in range(pairs)]
    ratios = sorted(first.seconds / second.seconds for first, second in both)
    return {
        "pairs": pairs,
        "median_ratio": round(median(ratios), 3),
        "quartile_ratios": [round(ratios[pairs // 4], 3), round(ratios[-1 - pairs // 4], 3)],
        "median_seconds": round(median(first.seconds for first, _ in both), 4),
        "other_median_seconds": round(median(second.seconds for _, second in both), 4),
    }


def large_search(repeats: int) -> dict[str, Any]:
    """The largest search that has a bar: whole processes."""
    runs = [run(LARGE) for _ in range(repeats)]
    return {
        "repeats": repeats,
        "median_seconds": round(median(ran.seconds for ran in runs), 3),
        "worst_seconds": round(max(ran.seconds for ran in runs), 3),
        "peak_MB": round(max(ran.peak_bytes for ran in runs) / 1e6, 1),
    }


def heavy_imports(words: Sequence[str]) -> set[str]:
    """Heavy packages that a process has loaded which ran a command line."""
    program = "import sys; from strategist.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    ran = subprocess.run((sys.executable, "-c", program, *words), capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in ran.stderr.split()} & set(HEAVY)


def emits(repeats: int) -> dict[str, Any]:
    """Seconds of `emit` for each target, of a plan that it can say, beyond those of `--help`: medians over runs of both in turn."""
    heavy: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        seconds = {}
        for target in (emitter.name for emitter in EMITTERS):
            file, plan = Path(folder) / f"{target}.json", next(plan for plan, _ in written(target))
            file.write_text(dump(plan), encoding="utf-8")
            words = ("emit", str(file), "--to", target, "--out", str(Path(folder) / target), "--force", "--quiet")
            heavy |= heavy_imports(words)
            seconds[target] = median(run((PROGRAM, *words)).seconds - run(HELP).seconds for _ in range(repeats))
    slowest = max(seconds, key=lambda name: seconds[name])
    return {
        "targets": len(seconds),
        "repeats": repeats,
        "median_seconds": round(median(seconds.values()), 4),
        "worst_seconds": round(seconds[slowest], 4),
        "worst_target": slowest,
        "heavy_imports": sorted(heavy),
    }


def refusals() -> dict[str, Any]:
    """Seconds until each refused row of the corpus is refused, after imports: every row in a fork of its own, so that no
    row finds what another one left in memory."""
    for module in walk_packages(strategist.__path__, "strategist."):
        if not module.name.startswith(("strategist.executor.", "strategist.__main__")):
            import_module(module.name)
    for name in ("numpy", "pydantic", "yaml", "difflib", "tomllib"):
        import_module(name)
    seconds = {str(row): _in_a_fork(lambda row=row: _refusal_seconds(row)) for row in _refused()}
    slowest = max(seconds, key=lambda name: seconds[name])
    return {
        "rows": len(seconds),
        "median_seconds": round(median(seconds.values()), 4),
        "worst_seconds": round(seconds[slowest], 4),
        "worst_row": slowest,
    }


def _refused() -> Iterator[Row]:
    rows = (row for row in corpus() if (row.flag, row.value) not in (*OWED, *APART))
    yield from (row for row in rows if row.ends[0])


def _refusal_seconds(row: Row) -> float:
    with tempfile.TemporaryDirectory() as folder:
        words = case_of(row)(Path(folder))
        start = time.perf_counter()
        code = call(*words).code
        seconds = time.perf_counter() - start
    if code != row.ends[0]:
        raise ValueError(f"{row} ended with {code}")
    return seconds


def _in_a_fork(measure: Callable[[], float]) -> float:
    """A measurement in a copy of this process. Raises ChildProcessError when it fails."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writer, repr(measure()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    if os.waitpid(child, 0)[1]:
        raise ChildProcessError("a refusal did not end as the corpus says")
    return float(said)


def figures(result: dict[str, Any]) -> dict[str, float]:
    """What is held against each bar."""
    return {
        "plan_ratio": result["plan"]["median_ratio"],
        "help_ratio": result["help"]["median_ratio"],
        "large_seconds": result["large"]["median_seconds"],
        "large_peak_MB": result["large"]["peak_MB"],
        "refusal_seconds": result["refusals"]["worst_seconds"],
        "emit_seconds": result["emits"]["worst_seconds"],
    }


def measured(pairs: int, repeats: int) -> dict[str, Any]:
    """All figures with the circumstances under which they were found."""
    return {
        **circumstances(("strategist", "numpy", "pydantic")),
        "load_before": round(os.getloadavg()[0], 2),
        "plan": paired(PLAN, IMPORTS, pairs),
        "help": paired(HELP, NOTHING, pairs),
        "large": large_search(repeats),
        "heavy_imports": sorted(heavy_imports(PLAN[1:])),
        "emits": emits(repeats),
        "refusals": refusals(),
        "load_after": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    """Measure, write and print; exit 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=31, help="pairs of runs per ratio (31)")
    parser.add_argument(
        "--repeats", type=int, default=5, help="runs of the large search, and of `emit` for each target (5)"
    )
    options = parser.parse_args()
    result = measured(options.pairs, options.repeats)
    found = figures(result)
    missed = (
        [name for name, bar in BARS.items() if found[name] > bar]
        + result["heavy_imports"]
        + result["emits"]["heavy_imports"]
    )
    for name, bar in BARS.items():
        print(f"{name:16} {found[name]:8.3f}   bar {bar}")
    print(f"missed: {', '.join(missed) or 'none'}; written to {write('startup', result)}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
