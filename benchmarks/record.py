"""What every result says about itself, and where results lie."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"


def circumstances(packages: Sequence[str]) -> dict[str, Any]:
    """Date, commit, versions and machine of a measurement; of the machine only what the figures depend on. Results that were written since
    the commit are no changed files."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": len(
            _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results").splitlines()
        ),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "machine": {"cores": len(os.sched_getaffinity(0)), "architecture": platform.machine()},
    }


def _git(*words: str) -> str:
    """What git says; empty outside a checkout, and where there is no git."""
    if shutil.which("git") is None:
        return ""
    ran = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write(name: str, result: Mapping[str, Any]) -> Path:
    """Write a result as results/NAME.json and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path


def read(name: str) -> dict[str, Any]:
    """The committed result of that name."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result
