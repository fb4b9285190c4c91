"""Every uneven batch of a question again: every layout of whole replicas with every way to hand out its micro-batches to the kinds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from strategist.document.plan import Plan
from strategist.facts.job import Job
from strategist.memory.estimate import peak_memory
from strategist.planner.kinds import UNEVEN
from strategist.planner.predict import predict_plan
from strategist.planner.search import Question, legality
from strategist.planner.situation import one, question
from strategist.planner.uneven import jobs_of_kinds
from strategist.planner.weigh import fits
from strategist.rulebook.apply import columns, family_masks
from strategist.space.brute_force import Row
from strategist.space.candidates import Candidates
from strategist.space.enumerate import MAX_MICRO_BATCH, divisors
from strategist.space.grammar import layout
from strategist.timing.estimate import step_times

PLAIN = {"pp": 1, "cp": 1, "ep": 1, "offload": 0, "tiling": 1}
"""What an uneven batch leaves as it is."""
BATCH = ("micro_batch", "accumulation")


class Way(NamedTuple):
    """One way to hand out the micro-batches of one layout: nanoseconds of its step, the layout, and the numbers by kind."""

    step_ns: int
    layout: str
    numbers: tuple[int, ...]


def uneven_claims(
    plan: Plan, asked: Question, rows: Iterable[Row], families: Sequence[str], even_ns: int
) -> Iterator[tuple[str, bool]]:
    """What a plan with an uneven batch says, and whether it is true. `rows` are the layouts of its question as they are for an even batch,
    `even_ns` is the soonest of these that its policy may choose."""
    judged = predict_plan(plan)
    own = plan.time.step_ns
    yield (
        "the plan's uneven batch takes as long and as much as it says",
        (judged.time.step_ns, judged.memory.worst.device) == (own, plan.memory.worst.device),
    )
    every = list(_ways(asked, rows, families))
    better = [way for way in every if way.step_ns < own]
    sentence = f"nothing of the {len(every):,} uneven batches that fit is sooner than the plan's"
    if better:
        nearest = min(better)
        sentence += f", but {len(better):,} are, such as {nearest.layout} with {nearest.numbers}"
    yield sentence, not better
    yield "the plan's uneven batch is sooner than every even one", own < even_ns


def _ways(asked: Question, rows: Iterable[Row], families: Sequence[str]) -> Iterator[Way]:
    """Every uneven batch that is legal, of some families or of all, and fits every kind."""
    rules, facts = legality(asked), question(asked.job)
    for row in _layouts(asked, rows):
        alone = one(**row)
        values = facts | columns(alone)
        if any(bool(np.all(rule.holds(values))) for rule in rules) or not _is_sayable(asked, alone):
            continue
        masks = family_masks(alone, facts)
        if not families or any(masks[name][0] for name in families):
            yield from _of_layout(asked.job, alone)


def _is_sayable(asked: Question, alone: Candidates) -> bool:
    return asked.frontend is None or not asked.frontend.obstacles(asked.job, alone, 0)


def _layouts(asked: Question, rows: Iterable[Row]) -> Iterator[Row]:
    """The layouts of whole replicas that tp does not spread over nodes, each once with micro-batches of every size."""
    job, seen = asked.job, dict[tuple[tuple[str, int], ...], None]()
    for row in rows:
        is_whole = (
            all(row[name] == value for name, value in PLAIN.items()) and row["dp_replicate"] * row["dp_shard"] > 1
        )
        if is_whole and all(group.node.gpus % row["tp"] == 0 for group in job.cluster.groups):
            seen[tuple((name, value) for name, value in row.items() if name not in BATCH)] = None
    pinned = [pin.value for pin in asked.pins if pin.key == "micro_batch"]
    sizes = pinned or [size for size in divisors(job.workload.global_batch) if size <= MAX_MICRO_BATCH]
    for rest in seen:
        yield from (dict(rest) | {"micro_batch": size, UNEVEN: 1} for size in sizes)


def _of_layout(job: Job, alone: Candidates) -> Iterator[Way]:
    """Every way to hand out micro-batches in one layout; equal ones too, which would make an even batch of it."""
    total = job.workload.global_batch // int(alone["micro_batch"][0])
    kinds = jobs_of_kinds(job)
    replicas = [kind.cluster.world // int(alone["tp"][0]) for kind in kinds]
    tables = [_ends(kind, alone, total // own) for kind, own in zip(kinds, replicas, strict=True)]
    words = layout(alone.row(0))
    for numbers in _handed_out(replicas, total):
        ends = [table[number - 1] for table, number in zip(tables, numbers, strict=True)]
        if min(ends) >= 0:
            yield Way(max(ends), words, numbers)


def _ends(kind: Job, alone: Candidates, most: int) -> list[int]:
    """Nanoseconds of a kind's step with 1, 2 ... micro-batches; -1 where its devices do not hold them."""
    if most < 1:
        return []
    repeated = alone.where(np.zeros(most, np.int64))
    many = Candidates({**repeated.columns, "accumulation": np.arange(1, most + 1)})
    peaks = peak_memory(kind, many)
    has_room = fits(kind, many, peaks.device, peaks.host)
    ends: list[int] = np.where(has_room, step_times(kind, many).step, -1).tolist()
    return ends


def _handed_out(replicas: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each replica of a kind as many as its neighbours, at least one, until all are given out."""
    first, *others = replicas
    if not others:
        if total % first == 0 and total >= first:
            yield (total // first,)
        return
    for number in range(1, total // first + 1):
        yield from ((number, *rest) for rest in _handed_out(others, total - number * first))
