"""Where things lie in a run folder, and how a file comes into being: whole, or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strategist.records import dataclass


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run. Making this object touches nothing."""

    path: str

    @property
    def root(self) -> Path:
        """The folder itself."""
        return Path(self.path)

    @property
    def plan(self) -> Path:
        """The Plan of the latest launch."""
        return self.root / "plan.json"

    @property
    def job(self) -> Path:
        """What the run was asked to do."""
        return self.root / "job.json"

    @property
    def report(self) -> Path:
        """Rank 0's account of a training that came to its end."""
        return self.root / "report.json"

    @property
    def observed(self) -> Path:
        """What an observed run saw of its Plan."""
        return self.root / "run.json"

    @property
    def verdicts(self) -> Path:
        """One verdict per line, the latest last."""
        return self.root / "verdicts.jsonl"

    @property
    def warnings(self) -> Path:
        """One warning per line: what did not stop the run."""
        return self.root / "warnings.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Scalars, a folder per rank."""
        return self.root / "tensorboard"

    @property
    def log(self) -> Path:
        """All that the ranks said."""
        return self.root / "log.txt"

    @property
    def lock(self) -> Path:
        """Held by the one supervisor that may write here."""
        return self.root / "lock"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.root / "checkpoints"

    @property
    def ranks(self) -> Path:
        """The folder in which each rank writes about itself."""
        return self.root / "ranks"

    def of_rank(self, rank: int, kind: str) -> Path:
        """A file that one rank writes about itself: beat, steps, failure, stack or observed."""
        return self.ranks / f"{rank}.{kind}"


def write_whole(path: Path, text: str) -> None:
    """Write a file through a temporary one beside it and force it to the disk; a reader sees the old one or the new one.

    Raises OSError; nothing is left behind then.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def append_row(path: Path, row: Any) -> None:
    """Add one JSON value as a line. Raises OSError."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=True) + "\n")


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file with one per line; a line that a dying process left unfinished is passed over."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    yield from rows_in(text)


def rows_in(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects of some lines, as `rows_of`."""
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row
