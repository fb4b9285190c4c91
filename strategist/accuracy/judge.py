"""Predict many runs at once: those that share a job but for the batch become rows of the same columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from strategist.accuracy.express import Case, express
from strategist.accuracy.table import Run, Unexpressed
from strategist.facts.job import Job
from strategist.memory.estimate import Peaks, peak_memory
from strategist.records import dataclass
from strategist.space.candidates import MESH_COLUMNS, OPTION_COLUMNS, Candidates
from strategist.timing.estimate import StepTimes, step_times


@dataclass(frozen=True, slots=True)
class Judged:
    """One run with its prediction, or with the reason why there is none."""

    run: Run
    case: Case | None = None
    step_s: float = 0.0
    peak_bytes: int = 0
    skipped: str = ""


def judge(runs: Sequence[Run]) -> tuple[Judged, ...]:
    """Every run, in order: predicted, or skipped with its reason."""
    answers: dict[int, Judged] = {}
    groups: dict[Job, list[tuple[int, Case]]] = {}
    for place, run in enumerate(runs):
        try:
            case = express(run)
        except Unexpressed as reason:
            answers[place] = Judged(run, skipped=str(reason))
            continue
        groups.setdefault(_but_batch(case.job), []).append((place, case))
    for job, members in groups.items():
        times, peaks = predictions(job, [dict(case.layout) for _, case in members])
        for row, (place, case) in enumerate(members):
            step, peak = float(times.step[row]) / 1e9, int(peaks.device[row])
            answers[place] = Judged(runs[place], case, step, peak)
    return tuple(answers[place] for place in range(len(runs)))


def _but_batch(job: Job) -> Job:
    """The job with one batch for all: how many sequences a step has stands in the layout's own columns."""
    return replace(job, workload=replace(job.workload, global_batch=1))


def predictions(job: Job, layouts: Sequence[Mapping[str, int]]) -> tuple[StepTimes, Peaks]:
    """Times and peaks of some layouts, as rows of the same columns."""
    names = (*MESH_COLUMNS, *OPTION_COLUMNS)
    columns = {name: np.array([layout[name] for layout in layouts], np.int64) for name in names}
    candidates = Candidates(columns)
    return step_times(job, candidates), peak_memory(job, candidates)
