"""What does not stop a run but should be known: a loss that leaps, a rank that keeps the others waiting.

Rows of steps are read as the ranks write them. Nothing is changed because of a warning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import Any

from strategist.records import dataclass
from strategist.runs.folder import RunFolder, rows_in

RECENT, LEAST = 20, 6
"""Steps that are looked back over, and how many there must be."""
LEAP, RISE = 10.0, 0.1
"""A leap lies above the median of recent losses by so many times their median distance from it, and by that share of it."""
LATE = 0.1
"""A rank is slow when it is late by more than this share of a step, in the median of recent steps."""

MOST_BYTES = 2**20
"""Read in one look: thousands of rows."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A warning: what, where, and a sentence. `score` is 1 for a rank in time and 0 for one that is late by a whole step; for a
    loss, how many times the usual distance it leapt."""

    kind: str
    step: int
    rank: int | None
    score: float
    sentence: str


class Health:
    """Looks at one attempt of a run. Each rank is told of once; each leap too."""

    def __init__(self, folder: RunFolder, world: int) -> None:
        self._paths = [folder.of_rank(rank, "steps") for rank in range(world)]
        self._read = [path.stat().st_size if path.is_file() else 0 for path in self._paths]
        self._waiting: list[deque[Row]] = [deque() for _ in range(world)]
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._late: list[deque[float]] = [deque(maxlen=RECENT) for _ in range(world)]
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._told: set[int] = set()

    def look(self) -> Iterator[Remark]:
        """What the steps since the last look have to say."""
        for rank in range(len(self._paths)):
            self._waiting[rank].extend(self._new_rows(rank))
        while all(self._waiting):
            rows = [rows.popleft() for rows in self._waiting]
            yield from self._leap(rows[0])
            yield from self._slow(rows)

    def _new_rows(self, rank: int) -> Iterator[Row]:
        """Whole lines that were written since the last look; none of what is no file, which may have no end."""
        if not self._paths[rank].is_file():
            return
        with open(self._paths[rank], "rb") as file:
            file.seek(self._read[rank])
            data = file.read(MOST_BYTES)
        whole = data[: data.rfind(b"\n") + 1]
        self._read[rank] += len(whole)
        yield from rows_in(whole.decode("utf-8", "replace"))

    def _leap(self, row: Row) -> Iterator[Remark]:
        loss, before = float(row["loss"]), list(self._losses)
        self._losses.append(loss)
        if len(before) < LEAST:
            return
        middle = median(before)
        usual = median(abs(other - middle) for other in before)
        if loss - middle > max(LEAP * usual, RISE * abs(middle)):
            times = (loss - middle) / usual if usual else float("inf")
            sentence = f"the loss leapt to {loss:.4f} in step {row['step']}, from {middle:.4f}; nothing was changed"
            yield Remark(kind="leap", step=row["step"], rank=None, score=round(min(times, 1e9), 2), sentence=sentence)

    def _slow(self, rows: list[Row]) -> Iterator[Remark]:
        self._seconds.append(median(float(row["seconds"]) for row in rows))
        for rank, lateness in enumerate(latenesses([row.get("began", {}) for row in rows])):
            self._late[rank].append(lateness)
            late, step = median(self._late[rank]), median(self._seconds)
            if len(self._late[rank]) < LEAST or rank in self._told or late <= LATE * step:
                continue
            self._told.add(rank)
            score = max(0.0, 1.0 - late / step)
            sentence = f"rank {rank} is late by {late:.3f} s in a step of {step:.3f} s: score {score:.2f}; the others wait for it"
            yield Remark(kind="slow", step=rows[0]["step"], rank=rank, score=round(score, 4), sentence=sentence)


def latenesses(began: list[dict[str, float]]) -> Iterator[float]:
    """By how many seconds each rank began a phase later than the median of the others; of its phases the one where it was latest.
    `began` are moments of the monotonic clock by phase."""
    for rank, own in enumerate(began):
        others = [each for other, each in enumerate(began) if other != rank]
        gaps = [at - median(other[phase] for other in others) for phase, at in own.items() if others]
        yield max(0.0, *gaps) if gaps else 0.0
