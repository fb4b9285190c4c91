"""Do our tests see faults? `make mutants` plants each row of mutants.toml in a copy and demands that its test fails.

`python -m benchmarks.mutants [NAME ...]`; with names only the mutants whose names contain them, and nothing is written. A row
whose text does not stand in its file exactly once any more is refused: it would prove nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import ROOT, circumstances, write

ROWS = Path(__file__).parent / "mutants.toml"
FAILED = 1
"""pytest's exit code when tests ran and some failed; a test that cannot even be collected does not count as one that saw."""


class Mutant(NamedTuple):
    """A fault: its name, the file, the text that stands there, the text of the fault, and the test that must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


def mutants() -> list[Mutant]:
    """Every row."""
    return [Mutant(**row) for row in tomllib.loads(ROWS.read_text(encoding="utf-8"))["mutant"]]


def planted(mutant: Mutant, root: Path = ROOT) -> str:
    """The text of the file with the fault. Raises ValueError when the text that it replaces does not stand there exactly once."""
    text = (root / mutant.file).read_text(encoding="utf-8")
    times = text.count(mutant.old)
    if times != 1:
        raise ValueError(f"{mutant.name}: the text to replace stands {times} times in {mutant.file}")
    return text.replace(mutant.old, mutant.new)


def copied(folder: Path) -> Path:
    """A copy of the repository's own files, without history."""
    names = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return folder


def tested(root: Path, *tests: str) -> tuple[int, str]:
    """pytest's exit code for some tests of a copy, and the last line of what it says."""
    command = (sys.executable, "-m", "pytest", "-x", "--hypothesis-profile=hunt", *tests)
    ran = subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=False)  # fmt: skip
    lines = [
        line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
    ] or ran.stdout.splitlines()[-1:]
    return ran.returncode, lines[0] if lines else ""


def killed(mutant: Mutant, root: Path) -> dict[str, Any]:
    """Plant a fault in a copy, run its test, and take the fault out again."""
    file, sound = root / mutant.file, (root / mutant.file).read_text(encoding="utf-8")
    compiled = Path(cache_from_source(str(file)))
    try:
        _put(file, planted(mutant, root), compiled)
        code, said = tested(root, mutant.test)
    finally:
        _put(file, sound, compiled)
    return {"name": mutant.name, "file": mutant.file, "test": mutant.test, "killed": code == FAILED, "said": said[:200]}


def _put(file: Path, text: str, compiled: Path) -> None:
    """Another text, and no byte code of the one before: both may be of the same second and size."""
    file.write_text(text, encoding="utf-8")
    compiled.unlink(missing_ok=True)


def hunted(chosen: Sequence[Mutant]) -> list[dict[str, Any]]:
    """Plant faults one after the other in a copy of the repository. Raises AssertionError when their tests fail without them."""
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        code, said = tested(root, *dict.fromkeys(mutant.test for mutant in chosen))
        if code:
            raise AssertionError(f"the tests fail without any fault: {said}")
        return [killed(mutant, root) for mutant in chosen]


def survivors(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the mutants that no test saw."""
    return [row["name"] for row in found if not row["killed"]]


def main(wanted: Sequence[str]) -> int:
    """Plant all, or some; write what came out when it was all; exit 1 when one survived."""
    chosen = [mutant for mutant in mutants() if not wanted or any(word in mutant.name for word in wanted)]
    found = hunted(chosen)
    for row in found:
        print(f"{'killed  ' if row['killed'] else 'SURVIVED'}  {row['name']}  ({row['said']})")
    result = {**circumstances(("strategist", "pytest", "hypothesis")), "mutants": found}
    left = survivors(found)
    print(f"{len(found) - len(left)} of {len(found)} killed" + ("" if wanted else f"; {write('mutants', result)}"))
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
