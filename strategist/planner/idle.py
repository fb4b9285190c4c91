"""May some of the machines stay idle? Every part of them is searched that could win, and the best of all is taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

from strategist.document.plan import Hint, Objective, Policy
from strategist.facts.hardware import Cluster
from strategist.facts.job import Job
from strategist.planner.fewer import halves, parts, price, seconds_at_best
from strategist.planner.kinds import is_mixed, kinds
from strategist.planner.recommend import choice
from strategist.planner.search import Found, Pace, Use, has_bound, search
from strategist.records import replace
from strategist.space.grammar import layout
from strategist.units import format_gib, format_seconds

EVERY = 64
"""Nodes, or devices of a node, up to which every number of them is looked at; of more, every 64th part."""
MIXTURES = 64
"""Mixtures of kinds of nodes up to which all are looked at."""


def best_use(whole: Found, policy: Policy, pace: Pace | None = None, *, bests: bool = False) -> Use:
    """The part of the machines of a search on which the policy's layout beats the one on all of them by the objective: sooner, in fewer
    device-seconds per step, in less memory of a device, or with less that is asked of people. All of them where no part does.

    Parts that no layout could win on are not searched; those that a `pace` leaves no time for are named there.
    """
    asked = whole.question
    best, least = whole, _price(whole, policy)
    waiting = sorted(uses(asked.job.cluster), key=lambda cluster: -cluster.world)
    for number, cluster in enumerate(waiting):
        if pace is not None and pace.is_over:
            pace.left_out.append(f"{len(waiting) - number} of {len(waiting)} parts of the machines")
            break
        job = replace(asked.job, cluster=cluster)
        if has_bound(asked) and _at_best(asked.objective, job) >= least:
            continue
        found = search(replace(asked, job=job), pace=pace, bests=bests)
        paid = _price(found, policy)
        if paid < least:
            best, least = found, paid
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


def _price(found: Found, policy: Policy) -> tuple[float, ...]:
    """The price of what the policy chooses; infinite where nothing fits."""
    return price(found, choice(found, policy).row) if len(found.fitting) else (float("inf"),)


def _at_best(objective: Objective, job: Job) -> tuple[float]:
    """What no layout costs less than, where time decides."""
    return (seconds_at_best(job) * 1e9 * (job.cluster.world if objective == "cost" else 1),)


def _hint(whole: Found, best: Found, policy: Policy) -> Hint:
    """What is used, and what all of the machines would do: as the policy takes them, and of any family where that beats the part."""
    used, every = best.question.job.cluster.world, whole.question.job.cluster.world
    row, any_row = choice(best, policy).row, whole.best_of()
    if any_row is None:
        other = (
            "nothing that is allowed fits on all of them."
            if len(whole.legal)
            else "no layout of all of them is allowed."
        )
    else:
        other = f"all of them {_takes(whole, choice(whole, policy).row)}"
        if price(whole, any_row) < price(best, row):
            other += f", or {_takes(whole, any_row)}, which the rules do not prefer (--policy fastest)"
        other += ". Leave --allow-idle out to use them all."
    sentence = f"{every - used} of {every} devices stay idle: {'one takes' if used == 1 else f'{used} take'} {_words(best, row)}, {other}"
    return Hint(code="W_IDLE", sentence=sentence)


def _takes(found: Found, row: int) -> str:
    return f"{_words(found, row)} with {layout(found.candidates.row(row))}"


def _words(found: Found, row: int) -> str:
    """A step, and where the objective is memory what a device holds."""
    time = f"{format_seconds(found.step_seconds(row))} per step"
    is_memory = found.question.objective == "memory"
    return f"{time} and {format_gib(int(found.device_bytes[row]))} of a device" if is_memory else time
