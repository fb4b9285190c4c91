"""An uneven batch once more: the step of the kind that is last, and the best of all ways to hand out micro-batches, tried one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from strategist.facts.job import Job
from tests.oracle.memory import memory_of, usable_bytes
from tests.oracle.stages import Layout
from tests.oracle.time import time_of


def kinds_of(job: Job) -> list[Job]:
    """The job on the nodes of each kind; its replicas meet those of the others on all machines."""
    return [
        replace(job, cluster=replace(job.cluster, groups=(group,)), all_machines=job.cluster)
        for group in job.cluster.groups
    ]


def replicas_of(job: Job, layout: Layout) -> list[int]:
    """Replicas on the nodes of each kind."""
    return [group.count * group.node.gpus // layout["tp"] for group in job.cluster.groups]


def ends_of(job: Job, layout: Layout, numbers: Sequence[int]) -> list[int]:
    """When each kind is through with a step, in nanoseconds, if its replicas run so many micro-batches."""
    rows = [dict(layout) | {"accumulation": number} for number in numbers]
    return [time_of(kind, row).step_ns for kind, row in zip(kinds_of(job), rows, strict=True)]


def step_of(job: Job, layout: Layout, numbers: Sequence[int]) -> int:
    """The kind that is last decides."""
    return max(ends_of(job, layout, numbers))


def fits(job: Job, layout: Layout, numbers: Sequence[int]) -> bool:
    """Whether every kind of devices holds its own micro-batches."""
    each = zip(kinds_of(job), numbers, strict=True)
    return all(
        memory_of(kind, dict(layout) | {"accumulation": number}).device <= usable_bytes(kind) for kind, number in each
    )


def ways(replicas: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each replica of a kind as many of `total` micro-batches as its neighbours, and at least one."""
    if not replicas:
        yield from [()] if total == 0 else []
        return
    for number in range(1, total // replicas[0] + 1):
        yield from ((number, *rest) for rest in ways(replicas[1:], total - number * replicas[0]))
