"""The smallest machines that would do the same job: what to say to somebody who has none yet."""

from __future__ import annotations

from collections.abc import Iterator

from strategist.catalog import rows
from strategist.document.plan import Alternative
from strategist.facts.clusters import cluster_from_flags
from strategist.planner.search import Question, search
from strategist.records import replace
from strategist.rulebook.apply import family_of
from strategist.space.grammar import layout
from strategist.units import format_gib

MAX_RUNGS = 3


def smallest_machines(asked: Question, step_seconds: float) -> tuple[Alternative, ...]:
    """The first rungs of the catalogue's ladder of machines that can do the job, smallest first, with their slowdown."""
    rungs = []
    for rung in _rungs(asked, step_seconds):
        rungs.append(rung)
        if len(rungs) == MAX_RUNGS:
            break
    return tuple(rungs)


def _rungs(asked: Question, step_seconds: float) -> Iterator[Alternative]:
    for row in rows("ladder"):
        cluster = cluster_from_flags(row["gpu"], row["gpus"], 1).cluster
        if cluster.world >= asked.job.cluster.world:
            return
        found = search(replace(asked, job=replace(asked.job, cluster=cluster), pins=()), bests=True)
        best = found.best_of()
        if best is None:
            continue
        seconds, size = found.step_seconds(best), int(found.device_bytes[best])
        chosen = layout(found.candidates.row(best))
        words = (
            f"{seconds / step_seconds:.1f}x slower, {format_gib(size)}: {family_of(found.families, best)} ({chosen})"
        )
        title = f"{row['gpus']} x {cluster.smallest.title}"
        yield Alternative(
            family=title,
            layout=chosen,
            fits=True,
            step_s=seconds,
            peak_bytes=size,
            relative_time=seconds / step_seconds,
            sentence=words,
        )
