"""Predict many runs at once: those that share a job but for the batch become rows of the same columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from strategist.accuracy.express import Case, express
from strategist.accuracy.table import Run, Unexpressed
from strategist.facts.calibration import Factor, Part
from strategist.facts.job import Job
from strategist.memory.buffers import workspace_bytes
from strategist.memory.estimate import Peaks, peak_memory
from strategist.planner.search import Watch
from strategist.planner.write import peak_interval
from strategist.records import dataclass, field, replace
from strategist.space.candidates import MESH_COLUMNS, OPTION_COLUMNS, Candidates, code
from strategist.timing.calibrated import part_seconds
from strategist.timing.estimate import StepTimes, step_times

TOO_SLOW = 500.0
"""A step so many times as long as predicted is in another unit; small runs of Megatron's own tests take up to 40 times as long."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One run with its prediction, or with the reason why there is none. `peak_bytes` is all that is missing from the
    device, `slack_bytes` and `runtime_bytes` the parts of it that no tensor holds, `last_bytes` what tensors hold on the last
    stage; `parts` are the seconds of the step that
    a calibration moves together. `assumed` is the recompute policy that the bytes stand for where the run states none and
    its framework's default does not fit: the first of selective and full that does."""

    run: Run
    case: Case | None = None
    step_s: float = 0.0
    peak_bytes: int = 0
    slack_bytes: int = 0
    runtime_bytes: int = 0
    last_bytes: int = 0
    parts: Mapping[Part, float] = field(default_factory=dict)
    assumed: str = ""
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

    @property
    def needed_bytes(self) -> int:
        """What the device must have. The allocator gives back what it holds and does not use when memory runs out,
        as far as its segments can shrink: its slack counts where they are fixed."""
        return self.peak_bytes - (self.slack_bytes if self.job.profile.segments == "expandable" else 0)

    @property
    def fits(self) -> bool:
        """Whether the device is large enough."""
        return self.needed_bytes <= self.job.cluster.smallest.memory_bytes

    @property
    def is_tight(self) -> bool:
        """Whether the device's size lies within the interval of peaks, so that the other verdict is as good as the formulas can tell."""
        bounds, size = peak_interval(), self.job.cluster.smallest.memory_bytes
        return self.needed_bytes * bounds.low <= size <= self.needed_bytes * bounds.high

    def comparable_bytes(self, kind: str) -> int:
        """The predicted bytes of the kind that a published figure counts: allocated, reserved, or the device's."""
        said = kind.lower()
        workspaces = workspace_bytes(self.job)
        if "last pipeline stage" in said:
            return self.last_bytes + workspaces
        if "reserved" in said:
            return self.peak_bytes - self.runtime_bytes + workspaces
        is_tensors = any(word in said for word in ("allocated", "active", "alloc"))
        return self.peak_bytes - self.runtime_bytes - self.slack_bytes + workspaces if is_tensors else self.peak_bytes


def judge(runs: Sequence[Run], factors: tuple[Factor, ...] = (), watch: Watch | None = None) -> tuple[Judged, ...]:
    """Every run, in order: predicted under some factors, or skipped with its reason; `watch` hears how many are done."""
    answers: dict[int, Judged] = {}
    groups: dict[_Sort, list[tuple[int, Case]]] = {}
    for place, run in enumerate(runs):
        try:
            case = express(run)
        except Unexpressed as reason:
            answers[place] = Judged(run, skipped=str(reason))
            continue
        groups.setdefault(_sort(case), []).append((place, case))
    for (plain, _), members in groups.items():
        job = replace(plain, factors=factors)
        layouts = [dict(case.layout) for _, case in members]
        times, peaks = predictions(job, layouts)
        parts = part_seconds(times.exposed)
        found = [
            replace(
                _held(runs[place], case, peaks, row),
                step_s=float(times.step[row]) / 1e9,
                parts={part: float(seconds[row]) for part, seconds in parts.items()},
            )
            for row, (place, case) in enumerate(members)
        ]
        for (place, _), one in zip(members, _with_recompute(job, layouts, found), strict=True):
            answers[place] = _believed(one)
        if watch is not None:
            watch("predicting runs", len(answers), len(runs), None)
    return tuple(answers[place] for place in range(len(runs)))


def _believed(one: Judged) -> Judged:
    """A run, or nothing but the reason where its time must be in another unit."""
    if one.measured_s < TOO_SLOW * one.step_s:
        return one
    said = f"its step takes more than {TOO_SLOW:.0f} times what is predicted, as one in ms would"
    return Judged(one.run, skipped=f"the row contradicts itself: {said}")


def _held(run: Run, case: Case, peaks: Peaks, row: int) -> Judged:
    """A run with its bytes."""
    slack, runtime = (int(peaks.terms[name][row]) for name in ("slack", "runtime"))
    device, last = int(peaks.device[row]), int(peaks.last_allocated[row])
    return Judged(run, case, peak_bytes=device, slack_bytes=slack, runtime_bytes=runtime, last_bytes=last)


def _with_recompute(job: Job, layouts: Sequence[Mapping[str, int]], found: list[Judged]) -> list[Judged]:
    """Runs that state no recompute policy, of frameworks whose recipes pick one, under the first that fits, if one does."""
    if not job.profile.picks_recompute:
        return found
    for word in ("selective", "full"):
        open_rows = [row for row, one in enumerate(found) if one.case is not None and not one.case.states_recompute and not one.fits]  # fmt: skip
        if not open_rows:
            break
        leaner = [{**layouts[row], "recompute": code("recompute", word)} for row in open_rows]
        peaks = peak_memory(job, _columns(leaner))
        for number, row in enumerate(open_rows):
            one = found[row]
            held = _held(one.run, one.case, peaks, number) if one.case is not None else one
            if held.fits:
                found[row] = replace(held, step_s=one.step_s, parts=one.parts, assumed=word)
    return found


def parts_at(cases: Sequence[Case], overlap: float) -> list[Mapping[Part, float]]:
    """Seconds of the parts of some runs' steps by the formulas alone, were the share of compute that collectives may run behind so many times
    what it is, in order."""
    found: dict[int, Mapping[Part, float]] = {}
    groups: dict[_Sort, list[int]] = {}
    for place, case in enumerate(cases):
        groups.setdefault(_sort(case), []).append(place)
    for (job, _), places in groups.items():
        columns = _columns([dict(cases[place].layout) for place in places])
        parts = part_seconds(step_times(replace(job, overlap=overlap), columns).exposed)
        for row, place in enumerate(places):
            found[place] = {part: float(seconds[row]) for part, seconds in parts.items()}
    return [found[place] for place in range(len(cases))]


_Sort = tuple[Job, int]
"""What runs that are predicted together share: the job, and how its loss is computed."""


def _sort(case: Case) -> _Sort:
    """The job with one batch for all, since how many sequences a step has stands in the layout's own columns, and the loss, which all rows
    of some columns share."""
    job = replace(case.job, workload=replace(case.job.workload, global_batch=1))
    return job, dict(case.layout).get("loss", 0)


def predictions(job: Job, layouts: Sequence[Mapping[str, int]]) -> tuple[StepTimes, Peaks]:
    """Times and peaks of some layouts, as rows of the same columns."""
    candidates = _columns(layouts)
    return step_times(job, candidates), peak_memory(job, candidates)


def _columns(layouts: Sequence[Mapping[str, int]]) -> Candidates:
    names = (*MESH_COLUMNS, *OPTION_COLUMNS, *(("loss",) if "loss" in layouts[0] else ()))
    return Candidates({name: np.array([layout[name] for layout in layouts], np.int64) for name in names})
