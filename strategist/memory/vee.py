"""The turns of a V-shaped schedule: how far each rank is with its two runs of layers, the one on the way down and the one on the way up.

Order of work of rank r of p with m micro-batches (PyTorch 2.13 torch/distributed/pipelining/schedules.py). ScheduleZBVZeroBubble (Qi
et al. 2023, arXiv 2401.10241, section 6): 2 (p - r) - 1 forwards of the first run; r times a forward of the second and one of the
first; p - r times a forward of the second run, its first part of backward and the second part right behind; then in turn a forward of
the first run and both parts of its backward, and the same of the second. When no forwards are left, r times the first parts of both
runs, p - r times both parts of the first run, then the second parts that are left, those of the second run first. So no rank holds
more than 2 p of the halves of micro-batches.

ScheduleDualPipeV (https://github.com/deepseek-ai/DualPipe): 2 (p - r - 1) forwards of the first run; r + 1 times a forward of both;
p - r - 1 times both parts of backward of the second run and a forward of it; m - 2 p + r + 1 times a forward of the first run, a whole
backward of the second, a forward of the second and a whole backward of the first; p - r - 1 times the same without the first of them.
Then backward of the second run and of the first in turn, r + 1 of each, the first half of those passes whole and in the other half
first parts alone; p - r - 1 times the oldest second part that waits and a first part of the first run; the second parts that are left.
The pairs that torch calls overlapped run one behind the other (_PipelineScheduleRuntime, _step_microbatches), the forward first: no
rank holds more than 2 p + 1 halves.

A run is reduced right behind its last backward pass that makes gradients of weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np

from strategist.columns import stage_by_stage
from strategist.facts.job import Job
from strategist.memory.instant import END, Instant, only
from strategist.memory.layers import joins_at_once
from strategist.memory.situations import Situation
from strategist.memory.step import Step
from strategist.memory.weight_passes import (
    Progress,
    beside,
    elements_of_run,
    first_part,
    kept,
    loose,
    second_part,
)
from strategist.records import dataclass, replace
from strategist.space.candidates import Mask, Reals
from strategist.space.shares import Group

Work = tuple[str, int]
"""F, I (gradients of inputs), W (of weights) or B (both), and the run of layers: 0 on the way down, 1 on the way up."""


def zbv_order(pp: int, count: int, rank: int) -> Iterator[Work]:
    """The work of a rank in order; with fewer micro-batches than fill the pipeline, torch leaves out those that are not there."""
    done: dict[Work, int] = {}
    for work in _filled(pp, max(2 * pp - 1, count), rank):
        number = done[work] = done.get(work, 0) + 1
        if number <= count:
            yield work


def dual_order(pp: int, count: int, rank: int) -> Iterator[Work]:
    """The same, second parts in the order of their first ones."""
    waiting = deque[Work]()
    for kind, chunk in _paired(pp, count, rank):
        if kind == "I":
            waiting.append(("W", chunk))
        yield waiting.popleft() if kind == "W" else (kind, chunk)


def _paired(pp: int, count: int, rank: int) -> Iterator[Work]:
    """With a W for whichever second part waits longest."""
    behind = pp - rank - 1
    yield from [("F", 0)] * (2 * behind)
    yield from (("F", 0), ("F", 1)) * (rank + 1)
    yield from (("I", 1), ("W", 1), ("F", 1)) * behind
    yield from (("F", 0), ("B", 1), ("F", 1), ("B", 0)) * (count - 2 * pp + rank + 1)
    yield from (("B", 1), ("F", 1), ("B", 0)) * behind
    for number in range(2 * (rank + 1)):
        yield "B" if number <= rank else "I", 1 - number % 2
    yield from (("W", 0), ("I", 0)) * behind
    yield from [("W", 0)] * (rank + 1)


ORDERS: Mapping[str, Callable[[int, int, int], Iterator[Work]]] = {"zbv": zbv_order, "dualpipev": dual_order}


def _filled(pp: int, count: int, rank: int) -> Iterator[Work]:
    behind, both = pp - rank, (("I", 0), ("I", 1))
    first, second = (("I", 0), ("W", 0)), (("I", 1), ("W", 1))
    yield from [("F", 0)] * (2 * behind - 1)
    yield from (("F", 1), ("F", 0)) * rank
    yield from (("F", 1), *second) * behind
    forwards = 2 * behind - 1 + rank
    yield from (("F", 0), *first, ("F", 1), *second) * (count - forwards)
    yield from (*first, ("F", 1), *second) * (forwards - pp)
    yield from both * rank
    yield from first * behind
    yield from [("W", 1)] * rank
    yield from [("W", 0)] * rank


@dataclass(frozen=True, slots=True)
class Turn:
    """A rank before a part of backward of run `chunk`, before both (B), or before that run is reduced (R). Of each run: micro-batches that
    are `held`, those of them whose first part is over, whether some gradients of weights are `done`, whether those that the last
    second part made lie `loose`, whether some were taken in, whether all is `reduced`. `sent`: first parts so far whose results went to another rank."""

    kind: str
    chunk: int
    held: tuple[int, int]
    waiting: tuple[int, int]
    done: tuple[bool, bool]
    loose: tuple[bool, bool]
    joined: tuple[bool, bool]
    reduced: tuple[bool, bool]
    sent: int

    @property
    def sort(self) -> tuple[object, ...]:
        """What turns share that differ in nothing but what they hold."""
        return self.chunk, self.done, self.loose, self.joined, self.reduced

    @property
    def size(self) -> tuple[int, ...]:
        """What bytes rise with."""
        return *self.held, *self.waiting, self.sent


class _Walk:
    """A rank's counts as it goes."""

    def __init__(self, schedule: str, pp: int, count: int, rank: int) -> None:
        self.schedule, self.pp, self.count, self.rank = schedule, pp, count, rank
        self.ran = {(kind, chunk): 0 for kind in "FIWB" for chunk in (0, 1)}
        self.loose, self.joined, self.reduced = [False, False], [False, False], [False, False]
        self.sent = 0

    def turns(self) -> Iterator[Turn]:
        """Before each part of backward and each reduction."""
        for kind, chunk in self._works():
            if kind != "F":
                yield self._turn(kind, chunk)
            self.ran[kind, chunk] += 1
            if kind in "IB":
                self.joined[chunk], self.loose[chunk] = self.joined[chunk] or self.loose[chunk] or kind == "B", False
                self.sent += kind == "I" and not self._stays(chunk)
            if kind == "W":
                self.loose[chunk] = True
            if kind in "WB" and self._done(chunk) == self.count:
                yield self._turn("R", chunk)
                self.loose[chunk], self.reduced[chunk] = False, True

    def _works(self) -> Iterator[Work]:
        """The first rank does all of the first run's backward in the second part, because no input of the model's needs a gradient."""
        for kind, chunk in ORDERS[self.schedule](self.pp, self.count, self.rank):
            whole = self.rank == chunk == 0
            if (kind, whole) != ("I", True):
                yield ("B" if whole and kind == "W" else kind), chunk

    def _done(self, chunk: int) -> int:
        """Micro-batches that are through with a run."""
        return self.ran["W", chunk] + self.ran["B", chunk]

    def _stays(self, chunk: int) -> bool:
        """Whether the last rank hands a gradient to itself."""
        return chunk == 1 and self.rank == self.pp - 1

    def _turn(self, kind: str, chunk: int) -> Turn:
        down, up = self._done(0), self._done(1)
        return Turn(
            kind,
            chunk,
            held=(self.ran["F", 0] - down, self.ran["F", 1] - up),
            waiting=(self.ran["I", 0] - self.ran["W", 0], self.ran["I", 1] - self.ran["W", 1]),
            done=(down > 0, up > 0),
            loose=(self.loose[0], self.loose[1]),
            joined=(self.joined[0], self.joined[1]),
            reduced=(self.reduced[0], self.reduced[1]),
            sent=self.sent,
        )


@cache
def turns(schedule: str, pp: int, count: int, rank: int, kind: str) -> tuple[Turn, ...]:
    """The turns of a kind in which a rank can hold most: none has another beside it that holds as much of everything."""
    kept: dict[object, list[Turn]] = {}
    for turn in _Walk(schedule, pp, count, rank).turns():
        if turn.kind != kind:
            continue
        alike = kept.setdefault(turn.sort, [])
        if not any(_is_within(turn, other) for other in alike):
            alike[:] = [other for other in alike if not _is_within(other, turn)] + [turn]
    return tuple(turn for alike in kept.values() for turn in alike)


def _is_within(turn: Turn, other: Turn) -> bool:
    return all(own <= theirs for own, theirs in zip(turn.size, other.size, strict=True))


class Turns:
    """The turns of every candidate of a group on every rank, (P, C, S) each; ranks with fewer say their last one again, and a rank
    without any, of a kind that it has none of, one of another kind's that nobody reads."""

    def __init__(self, group: Group, at_once: Mask) -> None:
        self.group, self.at_once = group, at_once
        self.counts, self._place = np.unique(group.candidates["accumulation"], return_inverse=True)

    def of(self, kind: str) -> Progress:
        """The turns of a kind, in the words of all backward passes in two parts."""
        column = self._columns(kind)
        up, sent = column("chunk") == 1, column("sent")
        held, waiting, done, loose, joined, reduced = (
            column(name) for name in ("held", "waiting", "done", "loose", "joined", "reduced")
        )
        stands = np.where(self.at_once, done, joined) & ~reduced
        m, turns_back = self.group.candidates["accumulation"][:, None], self.group.turns_back[None, :]
        situation = Situation(
            others=held.sum(axis=0) - 1.0,
            others_first=held[0] - 1.0 * ~up,
            others_last=held[1] - 1.0 * up,
            is_first=~up,
            is_last=up,
            stands=_of_run(up, stands),
            standing=stands.mean(axis=0),
            first_stands=stands[0],
            last_stands=stands[1],
            reduced=reduced.mean(axis=0),
            last_reduced=reduced[1],
            is_begun=done.any(axis=0),
            alternates=np.ones_like(up),
            holds_first=~up,
        )
        return Progress(
            situation=situation,
            waiting=_of_run(up, waiting),
            sent=sent + m * turns_back,
            loose=_of_run(up, loose),
            other_waiting=_of_run(~up, waiting),
            other_loose=_of_run(~up, loose),
            home=(m - held[0]) * turns_back,
        )

    def there(self, kind: str) -> Mask:
        """Which of them are of that kind."""
        return np.asarray(self._columns(kind)("kind") == kind, np.bool_)

    def _columns(self, kind: str) -> Callable[[str], Any]:
        """What fields of the turns are, (P, C, S), or with both runs in front."""
        pp, stages = self.group.pp, self.group.stages.tolist()
        asked = partial(turns, self.group.schedule, pp)
        every = [[asked(m, s, kind) or asked(m, s, "R") for s in stages] for m in self.counts.tolist()]
        longest = max(len(own) for row in every for own in row)
        padded = [[[*own, *own[-1:] * (longest - len(own))] for own in row] for row in every]

        def column(name: str) -> Any:
            read = np.array([[[getattr(turn, name) for turn in own] for own in row] for row in padded])
            found = np.moveaxis(read, 2, 0)[:, self._place]
            return stage_by_stage(np.moveaxis(found, -1, 0) if found.ndim > 3 else found)

        return column


def _of_run(up: Mask, both: Any) -> Any:
    """What both runs have, of the one at work."""
    return np.where(up, both[1], both[0])


def v_instants(
    job: Job,
    group: Group,
    in_situation: Callable[[Situation], Step],
    head: Callable[[Step], Iterable[Instant]],
    layers: Callable[[Step], Iterable[Instant]],
    update: Callable[[Step], Instant],
) -> Iterator[Instant]:
    """The instants of a V-shaped schedule. `head` and `layers` are those of a backward pass in one part, of which the first rank's first
    run has the latter alone."""
    found = Turns(group, joins_at_once(job, group))
    whole, first, second, over = (found.of(kind) for kind in "BIWR")
    yield from first_part(in_situation(first.situation), first)
    yield from second_part(in_situation(second.situation), second)
    step, there = in_situation(whole.situation), found.there("B")
    is_entry = group.is_first & whole.situation.is_first
    yield from only(there & ~is_entry, _in_one_part(step, whole, head(step)))
    yield from only(there, _in_one_part(step, whole, layers(step)))
    step = in_situation(over.situation)
    yield from _reductions(step, over)
    at_end = _added(update(step), "temporaries", np.max(over.sent, axis=0) * step.stream)
    yield _added(at_end, "activations", np.max(over.home, axis=0) * step.stream)


def _in_one_part(step: Step, at: Progress, instants: Iterable[Instant]) -> Iterator[Instant]:
    """Those of a backward pass in one part, beside what lies there of others; of the same run nothing waits then, and what its last
    second part has left loose is taken in as far as gradients stand."""
    waits = at.sent * step.stream + beside(step, at)
    left = np.where(at.loose, loose(step, elements_of_run(step, step.bare)), 0.0)
    for instant in (one.whole() for one in instants):
        taken = (instant.terms["gradients"] - step.earlier) * (step.compute / step.reduce)
        lies = waits + np.maximum(0.0, left - taken)
        yield _added(_added(instant, "temporaries", lies), "activations", at.home * step.stream)


def v_loss(
    job: Job, group: Group, in_situation: Callable[[Situation], Step], head: Callable[[Step], Iterable[Instant]]
) -> Iterator[Instant]:
    """Those of them that are at the loss."""
    found = Turns(group, joins_at_once(job, group))
    first, whole = found.of("I"), found.of("B")
    yield from (instant for instant in first_part(in_situation(first.situation), first) if instant.is_loss)
    step, there = in_situation(whole.situation), found.there("B") & ~(group.is_first & whole.situation.is_first)
    yield from only(there, (one for one in _in_one_part(step, whole, head(step)) if one.is_loss))


def _added(instant: Instant, term: str, held: Reals) -> Instant:
    return replace(instant, terms={**instant.terms, term: instant.terms.get(term, np.zeros(())) + held})


def _reductions(step: Step, at: Progress) -> Iterator[Instant]:
    """A run of layers behind its last second part: its units are reduced one after the other, each once its loose gradients have been
    taken into the reduce format, or copied there at once where nothing stands in it; the other run is in flight or reduced."""
    counts, whole, own = step.counts, np.maximum(step.counts.whole, 1.0), elements_of_run(step, step.counts)
    out = step.trained * np.where(step.shards_gradients, step.reduce / step.shards, 0.0)
    layer, gathered = np.minimum(step.widest, counts.layers), step.gathered(layers=0, head=False)
    waits = at.sent * step.stream + beside(step, at)
    units = (step.before, own, 0.0), (layer, own - step.before, 0.0), (step.behind, step.behind, out * step.behind)
    for unit, left, made in units:
        copied, done = step.trained * step.reduce * unit, own - left
        new = np.where(step.shards_gradients, 0.0, copied)
        stands = np.where(step.stands, -step.at_rest * (done / whole), new)
        yield Instant(
            END,
            {
                "gradients": step.earlier + stands + step.settled * (done / whole) + made,
                "activations": kept(step, at),
                "gather_buffers": np.where(step.managed, gathered + copied - step.compute * (done + unit), 0.0),
                "temporaries": waits + np.where(at.loose, loose(step, left - unit), 0.0),
            },
        )
