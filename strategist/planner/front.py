"""The front of time, memory and cost: which fitting layouts no other beats in all three, on all of the machines or a part."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from strategist.columns import Column
from strategist.document.front import Front, FrontRow
from strategist.document.plan import Request
from strategist.planner.fewer import parts
from strategist.planner.rank import complexity
from strategist.planner.search import Found, search
from strategist.planner.write import price_of
from strategist.records import replace
from strategist.rulebook.apply import family_of
from strategist.space.grammar import layout


def front(found: Found, request: Request) -> Front:
    """The rows that nothing dominates among what fits on the machines of a search and on their parts: one, two, four ...
    devices or nodes, the same job on each. On one cluster cost is time, so it is the parts that make cost a third axis."""
    searches = [*_on_parts(found), found]
    pairs = [(one, row) for one in searches for row in _in_two(one)]
    points = np.array([_point(one, row) for one, row in pairs], np.int64).reshape(len(pairs), 3)
    return Front(
        sizes=tuple(one.question.job.cluster.world for one in searches),
        fitting=sum(len(one.fitting) for one in searches),
        rows=tuple(_row(*pairs[number], request) for number in undominated(points)),
    )


def _on_parts(found: Found) -> Iterator[Found]:
    """The same question on every part of the machines, smallest first."""
    job = found.question.job
    for cluster in parts(job.cluster, whole_nodes=False):
        yield search(replace(found.question, job=replace(job, cluster=cluster)))


def _in_two(found: Found) -> Column:
    """Rows of one search that nothing of it dominates in time and memory; of equals the simplest."""
    step, held = found.times.step, found.device_bytes
    order = np.lexsort((complexity(found.candidates), held, step))
    least = np.minimum.accumulate(held[order])
    leaner = np.ones(len(order), np.bool_)
    leaner[1:] = least[1:] < least[:-1]
    return order[leaner]


def _point(found: Found, row: int) -> tuple[int, int, int]:
    """(step ns, peak bytes, device-ns) of a row: less is better."""
    step = int(found.times.step[row])
    return step, int(found.device_bytes[row]), step * found.question.job.cluster.world


def undominated(points: Column) -> list[int]:
    """Rows of some points (N, K) that no other beats or equals everywhere and undercuts somewhere, in ascending order of
    their values; of equal points the first."""
    kept: list[int] = []
    for row in np.lexsort(points.T[::-1]):  # whatever dominates a point stands in front of it
        if not (points[kept] <= points[row]).all(axis=1).any():
            kept.append(int(row))
    return kept


def _row(found: Found, row: int, request: Request) -> FrontRow:
    job = found.question.job
    step, held, device_ns = _point(found, row)
    hours = device_ns / 3600e9
    price, _ = price_of(job, request)
    return FrontRow(
        gpus=job.cluster.world,
        nodes=job.cluster.nodes,
        family=family_of(found.families, row),
        layout=layout(found.candidates.row(row)),
        step_ns=step,
        peak_bytes=held,
        gpu_hours_per_step=hours,
        cost_per_step=None if price is None else hours * price,
    )
