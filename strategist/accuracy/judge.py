"""Predict many runs at once: those that share a job but for the batch become rows of the same columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

import numpy as np

from strategist.accuracy.express import Case, express
from strategist.accuracy.table import Run, Unexpressed
from strategist.document.calibration import Calibration, factors_for
from strategist.facts.job import Job
from strategist.memory.estimate import Peaks, peak_memory
from strategist.records import dataclass
from strategist.space.candidates import MESH_COLUMNS, OPTION_COLUMNS, Candidates
from strategist.timing.calibrated import part_seconds
from strategist.timing.estimate import StepTimes, step_times


@dataclass(frozen=True, slots=True)
class Judged:
    """One run with its prediction, or with the reason why there is none. `peak_bytes` is all that is missing from the
    device, `slack_bytes` and `runtime_bytes` the parts of it that no tensor holds, `last_bytes` what tensors hold on the last
    stage; `parts` are the seconds of the step that
    a calibration moves together."""

    run: Run
    case: Case | None = None
    step_s: float = 0.0
    peak_bytes: int = 0
    slack_bytes: int = 0
    runtime_bytes: int = 0
    last_bytes: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    skipped: str = ""

    @property
    def job(self) -> Job:
        """The question. Raises ValueError for a run without a prediction."""
        if self.case is None:
            raise ValueError(f"{self.run['id']} has no prediction")
        return self.case.job

    @property
    def measured_s(self) -> float:
        """The measured step, 0 where there is none."""
        return 0.0 if self.case is None else self.case.measured.step_s or 0.0

    def comparable_bytes(self, kind: str) -> int:
        """The predicted bytes of the kind that a published figure counts: allocated, reserved, or the device's."""
        said = kind.lower()
        if "last pipeline stage" in said:
            return self.last_bytes
        if "reserved" in said:
            return self.peak_bytes - self.runtime_bytes
        is_tensors = any(word in said for word in ("allocated", "active", "alloc"))
        return self.peak_bytes - self.runtime_bytes - self.slack_bytes if is_tensors else self.peak_bytes


def judge(runs: Sequence[Run], calibration: Calibration | None = None) -> tuple[Judged, ...]:
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
    for plain, members in groups.items():
        job = plain if calibration is None else calibrated(plain, calibration)
        times, peaks = predictions(job, [dict(case.layout) for _, case in members])
        parts = part_seconds(times.exposed)
        for row, (place, case) in enumerate(members):
            held = {name: int(peaks.terms[name][row]) for name in ("slack", "runtime")}
            answers[place] = Judged(
                runs[place],
                case,
                float(times.step[row]) / 1e9,
                int(peaks.device[row]),
                held["slack"],
                held["runtime"],
                int(peaks.last_allocated[row]),
                {part: float(seconds[row]) for part, seconds in parts.items()},
            )
    return tuple(answers[place] for place in range(len(runs)))


def _but_batch(job: Job) -> Job:
    """The job with one batch for all: how many sequences a step has stands in the layout's own columns."""
    return replace(job, workload=replace(job.workload, global_batch=1))


def calibrated(job: Job, calibration: Calibration) -> Job:
    """The job under the factors for its device and framework."""
    return replace(job, factors=factors_for(calibration, job.cluster.slowest.gpu.name, job.profile.name))


def predictions(job: Job, layouts: Sequence[Mapping[str, int]]) -> tuple[StepTimes, Peaks]:
    """Times and peaks of some layouts, as rows of the same columns."""
    names = (*MESH_COLUMNS, *OPTION_COLUMNS)
    columns = {name: np.array([layout[name] for layout in layouts], np.int64) for name in names}
    candidates = Candidates(columns)
    return step_times(job, candidates), peak_memory(job, candidates)
