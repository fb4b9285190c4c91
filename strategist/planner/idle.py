"""May some of the machines stay idle? Every part of them is searched that could win, and the best of all is taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

from strategist.document.plan import Hint, Policy
from strategist.facts.hardware import Cluster
from strategist.planner.fewer import halves, parts, seconds_at_best
from strategist.planner.kinds import is_mixed, kinds
from strategist.planner.recommend import choice
from strategist.planner.search import Found, Pace, Use, search
from strategist.records import replace
from strategist.space.grammar import layout
from strategist.units import format_seconds

EVERY = 64
"""Nodes, or devices of a node, up to which every number of them is looked at; of more, every 64th part."""
MIXTURES = 64
"""Mixtures of kinds of nodes up to which all are looked at."""


def best_use(whole: Found, policy: Policy, pace: Pace | None = None, *, bests: bool = False) -> Use:
    """The part of the machines of a search on which the policy's layout beats the one on all of them: sooner, or with objective
    cost in fewer device-seconds per step. All of them where no part does.

    Parts that no layout could win on are not searched; those that a `pace` leaves no time for are named there.
    """
    asked = whole.question
    by_cost = asked.objective == "cost"
    best, least = whole, _price(whole, policy)
    waiting = sorted(uses(asked.job.cluster), key=lambda cluster: -cluster.world)
    for number, cluster in enumerate(waiting):
        if pace is not None and pace.is_over:
            pace.left_out.append(f"{len(waiting) - number} of {len(waiting)} parts of the machines")
            break
        job = replace(asked.job, cluster=cluster)
        if seconds_at_best(job) * (cluster.world if by_cost else 1) * 1e9 >= least:
            continue
        found = search(replace(asked, job=job), pace=pace, bests=bests)
        price = _price(found, policy)
        if price < least:
            best, least = found, price
        if pace is not None:
            pace.tick("parts of the machines", number + 1, len(waiting))
    idle = asked.job.cluster.world - best.question.job.cluster.world
    return Use(best, idle, (_hint(whole, best, policy),)) if idle else Use(whole)


def uses(cluster: Cluster) -> Iterator[Cluster]:
    """Every part of the machines that is looked at: some of the nodes, or some devices of one; of several kinds of nodes each kind and
    its parts, and some nodes of each."""
    if is_mixed(cluster):
        for alone in kinds(cluster):
            yield alone
            yield from uses(alone)
        yield from _mixtures(cluster)
        return
    yield from parts(cluster, whole_nodes=False, counts=_counts)
    if cluster.nodes > 1:
        for alone in parts(cluster, whole_nodes=False, counts=lambda _: (1,)):
            yield from parts(alone, whole_nodes=False, counts=_counts)


def _mixtures(cluster: Cluster) -> Iterator[Cluster]:
    """Some nodes of several kinds, but not all of all: every number of each as long as that makes few mixtures, else none, all and
    the powers of two between."""
    each: list[Sequence[int]] = [range(group.count + 1) for group in cluster.groups]
    if prod(len(counts) for counts in each) > MIXTURES:
        each = [sorted({0, group.count, *halves(group.count)}) for group in cluster.groups]
    for counts in product(*each):
        chosen = [replace(group, count=count) for group, count in zip(cluster.groups, counts, strict=True) if count > 0]
        if len(chosen) > 1 and sum(counts) < cluster.nodes:
            yield replace(cluster, groups=tuple(chosen))


def _counts(count: int) -> Iterable[int]:
    """Numbers below a number, from 1."""
    return range(1, count) if count <= EVERY else sorted({count * part // EVERY for part in range(1, EVERY)})


def _price(found: Found, policy: Policy) -> float:
    """Nanoseconds of the step that the policy chooses, with objective cost those of all devices; infinite where nothing fits."""
    if not len(found.fitting):
        return float("inf")
    question = found.question
    weight = question.job.cluster.world if question.objective == "cost" else 1
    return float(found.times.step[choice(found, policy).row]) * weight


def _hint(whole: Found, best: Found, policy: Policy) -> Hint:
    """What is used, and what all of the machines would do."""
    used, every = best.question.job.cluster.world, whole.question.job.cluster.world
    now = format_seconds(best.step_seconds(choice(best, policy).row))
    if len(whole.fitting):
        row = choice(whole, policy).row
        other = f"all of them {format_seconds(whole.step_seconds(row))} with {layout(whole.candidates.row(row))}"
    else:
        other = "nothing that is allowed fits on all of them"
    sentence = f"{every - used} of {every} devices stay idle: {used} take {now} per step, {other}. Leave --allow-idle out to use them all."
    return Hint(code="W_IDLE", sentence=sentence)
