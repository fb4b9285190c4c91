"""A run folder as one document: how far it is, how fast, what it holds, what went wrong."""

from __future__ import annotations

from statistics import median
from typing import Any

from strategist.document.load import load_plan
from strategist.errors import StrategistError
from strategist.records import dataclass
from strategist.runs.beats import Beat, read_beat
from strategist.runs.checkpoints import Checkpoint, checkpoints_in, read_manifest
from strategist.runs.folder import RunFolder, rows_of
from strategist.runs.job import read_job
from strategist.runs.lock import is_held

RECENT = 20
"""Steps that the median step time looks back over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank: where it stands, whether its process lives, its median step time in seconds and its memory in bytes."""

    rank: int
    alive: bool
    phase: str | None
    step: int | None
    step_seconds: float | None
    resident_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    """One checkpoint; `bytes` is None when its manifest cannot be read. Digests are compared when a run resumes."""

    step: int
    path: str
    bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The whole folder. `losses` are (step, loss) of the latest steps; `faults` are the verdicts of all attempts, `warnings`
    what did not stop it."""

    folder: str
    state: str
    layout: str
    steps: int
    done: int
    loss: float | None
    losses: tuple[tuple[int, float], ...]
    ranks: tuple[RankStatus, ...]
    checkpoints: tuple[CheckpointStatus, ...]
    faults: tuple[dict[str, Any], ...]
    warnings: tuple[dict[str, Any], ...] = ()


def status_of(folder: RunFolder) -> RunStatus:
    """The status of a run folder, from its files alone. Raises InputError for a folder that is none."""
    job, plan = read_job(folder), load_plan(str(folder.plan), "RUN")
    state, world = _state(folder), plan.processes
    beats = {rank: read_beat(folder.of_rank(rank, "beat")) for rank in range(world)}
    rows = {int(row["step"]): row for row in rows_of(folder.of_rank(0, "steps"))}  # repeated steps: the last one counts
    losses = tuple((step, float(row["loss"])) for step, row in sorted(rows.items()))[-RECENT:]
    return RunStatus(
        folder=folder.path,
        state=state,
        layout=" x ".join(f"{axis} {plan.mesh.size(axis)}" for axis in plan.mesh.order if plan.mesh.size(axis) > 1)
        or "one rank",
        steps=job.steps,
        done=max(rows, default=-1) + 1,
        loss=losses[-1][1] if losses else None,
        losses=losses,
        ranks=tuple(_rank(folder, rank, beat, state) for rank, beat in beats.items()),
        checkpoints=tuple(map(_checkpoint, checkpoints_in(folder.checkpoints))),
        faults=tuple(rows_of(folder.verdicts)),
        warnings=tuple(rows_of(folder.warnings)),
    )


def _state(folder: RunFolder) -> str:
    if is_held(folder.lock):
        return "running"
    return "finished" if folder.report.exists() else "stopped"


def _rank(folder: RunFolder, rank: int, beat: Beat | None, state: str) -> RankStatus:
    seconds = [float(row["seconds"]) for row in rows_of(folder.of_rank(rank, "steps"))][-RECENT:]
    return RankStatus(
        rank=rank,
        alive=state == "running" and beat is not None and beat.phase != "done",
        phase=beat.phase if beat else None,
        step=beat.step if beat else None,
        step_seconds=median(seconds) if seconds else None,
        resident_bytes=beat.resident_bytes if beat else None,
    )


def _checkpoint(found: Checkpoint) -> CheckpointStatus:
    try:
        size = sum(mark.size for mark in read_manifest(found.path).files.values())
    except StrategistError:
        size = None
    return CheckpointStatus(step=found.step, path=str(found.path), bytes=size)
