"""Nodes of several kinds: all of them wait for the kind that is last, whatever it is slow in."""

from __future__ import annotations

from strategist.facts.hardware import Cluster, PacedCluster
from strategist.facts.job import Job
from strategist.facts.tiers import tiers_by_kind
from strategist.records import names_of, replace


def paced_jobs(job: Job) -> tuple[Job, ...]:
    """The job as each kind of its nodes would pace it, or as it is where all are alike or links are listed one by one."""
    cluster = job.cluster
    if len(cluster.groups) == 1 or isinstance(cluster, PacedCluster) or len(kinds := tiers_by_kind(cluster)) == 1:
        return (job,)
    fields = {name: getattr(cluster, name) for name in names_of(Cluster)}
    return tuple(replace(job, cluster=PacedCluster(**fields, pace=node)) for node in kinds)
