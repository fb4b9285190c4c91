"""Is a part of the cluster faster than all of it? Answered by a bound first, and by a search only where the bound allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from strategist.document.plan import Hint
from strategist.facts.hardware import Cluster, NodeGroup
from strategist.facts.job import Job
from strategist.planner.search import Found, search
from strategist.space.grammar import layout
from strategist.timing.estimate import model_FLOP
from strategist.timing.rates import matmul_rates
from strategist.units import format_seconds


def smaller_cluster_hint(found: Found, chosen: int) -> tuple[Hint, ...]:
    """A hint when fewer nodes finish a step sooner; otherwise nothing."""
    best_seconds, best = found.step_seconds(chosen), None
    for part in _parts(found.question.job.cluster):
        job = replace(found.question.job, cluster=part)
        if _least_seconds(job) >= best_seconds:
            continue
        smaller = search(replace(found.question, job=job))
        row = smaller.best_of()
        if row is not None and smaller.step_seconds(row) < best_seconds:
            best_seconds, best = smaller.step_seconds(row), (part, layout(smaller.candidates.row(row)))
    if best is None:
        return ()
    part, words = best
    nodes = "one node is" if part.nodes == 1 else f"{part.nodes} nodes are"
    whole = format_seconds(found.step_seconds(chosen))
    text = f"Fewer machines are faster: {nodes} predicted at {format_seconds(best_seconds)} per step with {words}, all {found.question.job.cluster.nodes} at {whole}. Ask again with --nodes {part.nodes} or --hardware NODE:{part.nodes}."
    return (Hint(code="W_FEWER_NODES", sentence=text),)


def _parts(cluster: Cluster) -> Iterator[Cluster]:
    """One node, two, four ... of a cluster of equal nodes, up to half of it."""
    if len(cluster.groups) != 1:
        return
    group, count = cluster.groups[0], 1
    while count <= cluster.nodes // 2:
        yield replace(cluster, groups=(NodeGroup(node=group.node, count=count, name=group.name),))
        count *= 2


def _least_seconds(job: Job) -> float:
    """No layout can beat the useful FLOP at the best rate any matmul of any shape reaches on every device."""
    rates = [
        (group.count * group.node.gpus, float(matmul_rates(group.node.gpu, job.workload.precision).rate.max()))
        for group in job.cluster.groups
    ]
    return model_FLOP(job) / sum(count * rate for count, rate in rates)
