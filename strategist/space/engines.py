"""Layouts of one job that other programs run: each is weighed as whoever runs it works."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from strategist.facts.job import Job
from strategist.records import names_of, replace
from strategist.space.candidates import Candidates, Column

T = TypeVar("T")


def own_job(job: Job, candidate: Candidates) -> Job:
    """The job of one layout, under the profile that it runs under."""
    if job.by_layout is None:
        return job
    ((profile, _),) = job.by_layout(job, candidate)
    return replace(job, profile=profile, by_layout=None)


def as_run(weigh: Callable[[Job, Candidates], T], job: Job, candidates: Candidates) -> T:
    """What `weigh` finds of layouts, of those that run under one profile together. It gives a column or table whose first axis is that of
    the layouts, or a record of such."""
    if job.by_layout is None or not len(candidates):
        return weigh(job, candidates)
    parts = job.by_layout(job, candidates)
    jobs = [replace(job, profile=profile, by_layout=None) for profile, _ in parts]
    if len(parts) == 1:
        return weigh(jobs[0], candidates)
    found = [weigh(own, candidates.where(rows)) for own, (_, rows) in zip(jobs, parts, strict=True)]
    place = np.concatenate([rows for _, rows in parts]).argsort(kind="stable")
    return cast(T, _together(found, place))


def _together(found: Sequence[Any], place: Column) -> Any:
    """Findings about parts of some layouts as those of all, in the order of these."""
    first = found[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(found)[place]
    if isinstance(first, Mapping):
        return {name: _together([own[name] for own in found], place) for name in first}
    return type(first)(
        **{name: _together([getattr(own, name) for own in found], place) for name in names_of(type(first))}
    )
