"""The long suite: every test, generated cases tenfold; writes results/nightly.json.

`python -m benchmarks.nightly [PYTEST_ARGUMENTS]`; further arguments go to pytest, and a run that was narrowed by them says so. The
tests run folder by folder, and what a folder gave is written at once with its date and commit: after Ctrl-C the same command goes on
with the folders that lack a result of this commit, the oldest first, so that nights too short for all of them still come round.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.record import RESULTS, ROOT, circumstances, read, write

WORKERS = (
    "-n",
    "2",
    "--dist=worksteal",
    "--reruns",
    "1",
    "--only-rerun",
    "exit code -11",
    "--only-rerun",
    r"signal\s+11\s",
)
"""Two at a time; long tests stand side by side, so a worker that has none left takes over what lies before the other."""
LONGEST = 12
"""Tests whose seconds are written down: which to split next."""
PACKAGES = ("strategist", "torch", "numpy", "pydantic", "transformers", "hypothesis", "pytest")
ENDS = ("passed", "failed", "error", "skipped")
ELSEWHERE = "frameworks"
"""Tests that need environments of their own (`make test-frameworks`)."""
LAST = ("measure", "executor")
"""Folders that start processes with torch in them, which takes longest."""
STOPPED, NO_TESTS = 2, 5
"""pytest's exit codes of a run that was stopped by hand, and of one that had nothing to run."""


def nightly(arguments: Sequence[str], name: str = "nightly") -> int:
    """Run the folders without a result of this commit, the oldest results first, write the whole after each, and return pytest's exit
    code of the first that was not well. Ctrl-C reaches pytest too, which ends; its folder is not counted, and no further one begins."""
    signal.signal(signal.SIGINT, _wait_for_pytest)
    head = circumstances(PACKAGES)
    done = known(arguments, name)
    for part in to_run(head, done):
        found = _run(folders()[part], arguments)
        if found is None:
            return STOPPED
        done[part] = {**head, **found}
        print(f"{part}: {', '.join(f'{found[how]} {how}' for how in ENDS)}; {write(name, whole(arguments, done))}")
    return next((one["exit_code"] for one in done.values() if one["exit_code"] not in (0, NO_TESTS)), 0)


def folders(tests: Path = ROOT / "tests") -> dict[str, list[Path]]:
    """What runs at one go, in order: the tests beside all folders, ".", and each folder by its name."""
    names = {path.relative_to(tests).parts[0] for path in tests.glob("*/**/test_*.py")} - {ELSEWHERE}
    inside = (*sorted(names - set(LAST)), *LAST)
    return {".": sorted(tests.glob("test_*.py"))} | {name: [tests / name] for name in inside}


def known(arguments: Sequence[str], name: str) -> dict[str, dict[str, Any]]:
    """What the last run of each folder with these arguments gave, and on which commit; folders that are gone are left out."""
    before = read(name) if (RESULTS / f"{name}.json").exists() else {}
    parts: dict[str, dict[str, Any]] = before.get("folders", {}) if before.get("arguments") == list(arguments) else {}
    still = folders()
    return {part: found for part, found in parts.items() if part in still}


def to_run(head: Mapping[str, Any], done: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The folders whose result is none of this commit and these versions, those never run first and then by age."""
    same = ("commit", "changed_files", "versions")
    fresh = {
        part for part, one in done.items() if not head["changed_files"] and all(one[key] == head[key] for key in same)
    }
    return sorted(
        (part for part in folders() if part not in fresh), key=lambda part: done.get(part, {}).get("date", "")
    )


def _run(paths: Iterable[Path], arguments: Sequence[str]) -> dict[str, Any] | None:
    """pytest's exit code, and what its report says; None where it was stopped by hand."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = (sys.executable, "-m", "pytest", "--hypothesis-profile=nightly", f"--junitxml={report}")
        code = subprocess.run((*command, *WORKERS, *map(str, paths), *arguments), cwd=ROOT, check=False).returncode
        return None if code == STOPPED else {"exit_code": code, **counts(report)}


def _wait_for_pytest(number: int, frame: object) -> None:
    """Nothing: a handler of our own, unlike SIG_IGN, is not inherited by pytest."""


def whole(arguments: Sequence[str], done: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The counts of all folders together, which are missing, the commits that they ran on, and each folder's own."""
    seconds = {name: value for one in done.values() for name, value in one["longest"].items()}
    return {
        "arguments": list(arguments),
        "dates": sorted({one["date"] for one in done.values()}),
        "commits": sorted({one["commit"] for one in done.values()}),
        "missing": [part for part in folders() if part not in done],
        **{how: sum(one[how] for one in done.values()) for how in (*ENDS, "seconds")},
        "longest": _longest(seconds),
        "not_passed": [name for one in done.values() for name in one["not_passed"]],
        "folders": dict(done),
    }


def counts(report: Path) -> dict[str, Any]:
    """How many tests ended how, their seconds, those that took longest, and the names of those that did not pass, from
    pytest's XML."""
    suite = ElementTree.parse(report).getroot()
    cases = {_name(case): _ended(case) for case in suite.iter("testcase")}
    seconds = {_name(case): round(float(case.get("time", 0))) for case in suite.iter("testcase")}
    ended = Counter(cases.values())
    return {
        **{how: ended[how] for how in ENDS},
        "seconds": round(sum(float(part.get("time", 0)) for part in suite.iter("testsuite"))),
        "longest": _longest(seconds),
        "not_passed": sorted(name for name, how in cases.items() if how != "passed"),
    }


def _longest(seconds: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1])[:LONGEST])


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}.{case.get('name')}"


def _ended(case: ElementTree.Element) -> str:
    ways = {"failure": "failed", "error": "error", "skipped": "skipped"}
    return next((ways[part.tag] for part in case if part.tag in ways), "passed")


if __name__ == "__main__":
    sys.exit(nightly(sys.argv[1:]))
