"""The long suite: every test, generated cases tenfold; writes results/nightly.json.

`python -m benchmarks.nightly [PYTEST_ARGUMENTS]`; further arguments go to pytest, and a run that was narrowed by them says so.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.record import ROOT, circumstances, write

WORKERS = ("-n", "2", "--dist=worksteal")
"""Two at a time; long tests stand side by side, so a worker that has none left takes over what lies before the other."""
LONGEST = 12
"""Tests whose seconds are written down: which to split next."""
PACKAGES = ("strategist", "torch", "numpy", "pydantic", "transformers", "hypothesis", "pytest")


def nightly(arguments: Sequence[str], name: str = "nightly") -> int:
    """Run the suite, write what came out, and return pytest's exit code (2: stopped by hand; what had run is written).

    Ctrl-C reaches pytest too, which ends its tests and writes its report; only then is there a result to write.
    """
    signal.signal(signal.SIGINT, _wait_for_pytest)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = (sys.executable, "-m", "pytest", "--hypothesis-profile=nightly", f"--junitxml={report}")
        code = subprocess.run((*command, *WORKERS, *arguments), cwd=ROOT, check=False).returncode
        result = {**circumstances(PACKAGES), "arguments": list(arguments), "exit_code": code, **counts(report)}
    print(f"{result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped; {write(name, result)}")
    return code


def _wait_for_pytest(number: int, frame: object) -> None:
    """Nothing: a handler of our own, unlike SIG_IGN, is not inherited by pytest."""


def counts(report: Path) -> dict[str, Any]:
    """How many tests ended how, their seconds, those that took longest, and the names of those that did not pass, from
    pytest's XML."""
    suite = ElementTree.parse(report).getroot()
    cases = {_name(case): _ended(case) for case in suite.iter("testcase")}
    seconds = {_name(case): round(float(case.get("time", 0))) for case in suite.iter("testcase")}
    ended = Counter(cases.values())
    return {
        **{how: ended[how] for how in ("passed", "failed", "error", "skipped")},
        "seconds": round(sum(float(part.get("time", 0)) for part in suite.iter("testsuite"))),
        "longest": dict(sorted(seconds.items(), key=lambda item: -item[1])[:LONGEST]),
        "not_passed": sorted(name for name, how in cases.items() if how != "passed"),
    }


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}.{case.get('name')}"


def _ended(case: ElementTree.Element) -> str:
    ways = {"failure": "failed", "error": "error", "skipped": "skipped"}
    return next((ways[part.tag] for part in case if part.tag in ways), "passed")


if __name__ == "__main__":
    sys.exit(nightly(sys.argv[1:]))
