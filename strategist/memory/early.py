"""Interleaved pipelines under ZeRO-3: what other chunks hold that was gathered too early, and the passes in which a rank holds most.

A chunk's backward pass ends with the gathering of what ran before its first layer in any forward pass, its last layer, or norm and
head (PyTorch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _backward_prefetch: the unit before in
post_forward_order). Nothing gives that buffer back before a pass of the same chunk uses it, while other chunks work. The pass that
comes down to the first forward pass of all finds nothing before it. The last backward pass of a chunk gives all of its units back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from strategist.columns import entries, stage_by_stage
from strategist.memory.situations import NEVER, Schedule, Situation
from strategist.memory.sorts import record_of
from strategist.memory.step import Step
from strategist.records import names_of, replace
from strategist.space.candidates import Column, Mask, Reals
from strategist.space.interleaved import Rounds
from strategist.space.shares import Group


EARLY = "early", "early_first", "early_last"
"""Of a situation what lies gathered too early beside it: of any chunk, of that with the embedding, of that with the head."""


class EarlySchedule(Schedule):
    """The passes of interleaved chunks, and what lies gathered too early beside them."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.rounds = Rounds(self.turn, self.v, self.passes, self.ahead)

    def backwards(self, numbers: Column) -> Situation:
        """Backward passes by their numbers (K, C, S)."""
        found = self.at(*numbers)
        k = self._numbered(tuple(numbers))
        own = self.v - 1 - k // self.turn % self.v
        return replace(self._beside(found, k, self.rounds.begun(k), own), finds_early=NEVER)

    def forwards(self, numbers: Column) -> Situation:
        """The forward passes that run just before."""
        before = self.at(*numbers)
        k = self._numbered(tuple(numbers))
        begun = self.rounds.begun(k)
        own = (begun - 1) // self.turn % self.v
        is_first, is_last = own == 0, own == self.v - 1
        found = replace(
            before,
            others_first=before.others_first + before.is_first - is_first,
            others_last=before.others_last + before.is_last - is_last,
            is_first=is_first,
            is_last=is_last,
            stands=self.rounds.ran(k, self.v - 1 - own) > 0,
            holds_first=is_first | self._first_ran(begun, k),
            finds_early=self._holds(own, begun - 1, k),
        )
        return self._beside(found, k, begun, own)

    def turns_of_backward(self) -> Column:
        """The first pass of all, that of the chunk with the embedding, and among which those with most are, (K, C, S): the second of each
        chunk, whose gradients stand then; of turns of the second and the third round, when what lies gathered does so in every round,
        and of as many as can be left when no forward passes are, the first and those behind the last forward pass of a turn."""
        turn, v, count = self.turn, self.v, self.passes // self.turn
        places, chunks = np.arange(2 * int(v.max()))[:, None, None], int(v.max())
        early = np.minimum(v + np.minimum(places, 2 * v - 1), count - 1)
        late = np.maximum(count - 1 - np.minimum(places[: chunks + 1], v), 0)
        first = turn * np.concatenate([early, late])
        seconds = turn * np.minimum(places[:chunks], v - 1) + 1
        ends = np.stack([self.first_pass(), self.first_of_first_chunk()])
        return np.concatenate([ends, *(self._each(every) for every in (seconds, first, first + -self.ahead % turn))])

    def turns_of_forward(self) -> Column:
        """The backward passes behind the first and the last forward passes of turns, (K, C, S): of two rounds when all gradients stand,
        and of the last."""
        turn, v, count = self.turn, self.v, self.passes // self.turn
        places, chunks = np.arange(2 * int(v.max()))[:, None, None], int(v.max())
        standing = -(-(self.ahead - 1 + turn * v) // turn)
        early, late = standing + np.minimum(places, 2 * v - 1), count - 1 - np.minimum(places[:chunks], v - 1)
        first = turn * np.concatenate([np.minimum(early, count - 1), self._each(late)])
        passes = np.concatenate([first, first + turn - 1])
        return np.clip(passes - self.ahead + 1, 0, self.passes - self.ahead)

    def _each(self, numbers: Column) -> Column:
        return np.broadcast_to(numbers, (len(numbers), *self.ahead.shape))

    def _holds(self, chunk: Column | int, begun: Column, k: Column) -> Mask:
        """Whether a unit of a chunk lies gathered too early when so many forward passes and `k` backward passes ran."""
        back = self.v - 1 - chunk
        done = self.rounds.ran(k, back)
        last, left = self.rounds.left(chunk, done - 1)
        _, least = self.rounds.left(chunk, np.minimum(done - 2, self.turn - 1))
        finds = (left > 0) | ((done > 1) & (least == 0))  # not the pass that comes down to the first one
        unused = self.rounds.ran(begun, chunk) == self.rounds.ran(self.rounds.begun(last), chunk)
        return np.asarray((done > 0) & (done < self.m) & finds & unused, np.bool_)

    def _first_ran(self, begun: Column, k: Column) -> Mask:
        """Whether the chunk with the embedding ran forward and not backward since."""
        done = self.rounds.ran(k, self.v - 1)
        last, _ = self.rounds.left(0, done - 1)
        return np.asarray((done == 0) | (self.rounds.ran(begun, 0) > self.rounds.ran(self.rounds.begun(last), 0)), np.bool_)

    def _beside(self, found: Situation, k: Column, begun: Column, own: Column) -> Situation:
        chunks = np.arange(int(self.v.max()))[:, None, None, None]
        holds = self._holds(chunks, begun, k) & (own != chunks) & (chunks < self.v)
        last = (holds & (chunks == self.v - 1)).any(axis=0)
        every = holds.sum(axis=0), holds[0], last
        return replace(found, **{name: stage_by_stage(part * 1.0) for name, part in zip(EARLY, every, strict=True)})


class LookedAt(NamedTuple):
    """Passes until the layers' backward begins, from there on, and forward, (P, D, S); and which of the D each candidate's are, (C,)."""

    heads: Situation
    bodies: Situation
    forwards: Situation
    at: Column


def in_company(step: Step, others: Situation, at: Column | None, rows: Column) -> LookedAt:
    """The passes to look at where the chunks of some candidates hold units early (space/shares.py, holds_early_C), those in `rows`, and
    all `others` look at the same five, which lie at the places `at`."""
    backward, forward, own = early_passes(step, rows)
    count = others.others.shape[1]
    place = np.arange(count) if at is None else at.copy()
    place[rows] = count + own
    bodies = slice(1, None)
    every = _joined(others, backward, axis=1)
    return LookedAt(every.of(slice(2)), every.of(bodies), _joined(others.of(bodies), forward, axis=1), place)


def early_passes(step: Step, rows: Column) -> tuple[Situation, Situation, Column]:
    """Of candidates whose chunks hold units early, in `rows`, the backward passes to look at, (5, D, S): the first, those in which they hold
    most of the chunk with the head, the first of that with the embedding, the fullest of that, and of those between. Forward, (4, D, S):
    the fullest of the first, the last and those between. Where there are none between, these are any. And which of these D choices is that
    of each of them."""
    group, c = step.group, step.c.where(rows)
    firsts, place = c.sorts((c["accumulation"], c["virtual_stages"]))
    schedule = EarlySchedule(replace(group, candidates=c.where(firsts)))
    passes = schedule.backwards(schedule.turns_of_backward()), schedule.forwards(schedule.turns_of_forward())
    numbers = [own for each in passes for own in _possible(group, each)]
    possible = [_chosen(each, np.concatenate(numbers[n : n + 3])) for n, each in zip((0, 3), passes, strict=True)]
    held = step.among(rows, _joined(*possible, axis=0), place).moving
    ends = np.cumsum([len(own) for own in numbers])[:-1]
    most = [own.argmax(axis=0) for own in np.split(held, ends)]
    choices, at = c.sorts((place, *(own[:, stage] for own in most for stage in range(len(group.stages)))))
    alike, stages = place[choices], np.arange(len(group.stages))
    fullest = [own[best[choices], alike[:, None], stages] for own, best in zip(numbers, most, strict=True)]
    last, first, between = fullest[:3]
    looked_at = np.zeros_like(last), last, np.ones_like(last), first, between
    backward, forward = (record_of(each, alike) for each in passes)
    return _chosen(backward, np.stack(looked_at)), _chosen(forward, np.stack([*fullest[3:], fullest[-1]])), at


def _possible(group: Group, passes: Situation) -> tuple[Column, Column, Column]:
    """Of passes (K, F, S) the numbers of those that can be first with most of the chunk with the head, that with the embedding, and others,
    (N, F, S): those before which no pass of such a chunk holds as much of everything. Where a rank has fewer the first of them stands for
    the rest, and where it has none the first of all."""
    sort = passes.is_last + 2 * passes.is_first
    no_less = _pairs(sort, np.equal) & (np.arange(len(sort))[:, None] < np.arange(len(sort)))[..., None, None]
    for amount in _amounts(group, passes):
        no_less &= _pairs(amount, np.greater_equal)
    left = ~no_less.any(axis=0)
    return _numbers(left & passes.is_last), _numbers(left & passes.is_first), _numbers(left & (sort == 0))


def _pairs(values: Any, relation: Callable[[Any, Any], Any]) -> Mask:
    """Whether each of the values (K, F, S) is in relation to each, (K, K, F, S)."""
    return np.asarray(relation(values[:, None], values[None]), np.bool_)


def _amounts(group: Group, s: Situation) -> Iterator[Reals]:
    """What a rank holds the more bytes by the more of it a pass has, as `Step.moving` reads it."""
    first, last = group.is_first[None, :], group.is_last[None, :]
    early_first, early_last = s.early_first * first, s.early_last * last
    yield from (s.others, s.others_first * first, s.others_last * last, -s.others_last * last)  # the head's may be less than nothing
    yield from (s.standing, s.first_stands & first, s.last_stands & last, s.reduced, s.last_reduced & last)
    yield from (s.early - early_first - early_last, early_first, early_last, s.finds_early)


def _numbers(marked: Mask) -> Column:
    """The numbers of marked passes (K, F, S), as many as any rank has, (N, F, S)."""
    count = marked.sum(axis=0)
    order = (~marked).argsort(axis=0, kind="stable")[: max(1, int(count.max()))]
    return np.where(np.arange(len(order))[:, None, None] < count, order, order[:1])


def _chosen(passes: Situation, best: Column) -> Situation:
    at = best, *np.indices(best.shape[1:], sparse=True)
    parts = (entries(getattr(passes, name), at) for name in names_of(Situation))
    return Situation(*(stage_by_stage(np.broadcast_to(part, best.shape)) for part in parts))


def _joined(*parts: Situation, axis: int) -> Situation:
    """Passes behind others, or of other candidates."""
    sizes = [part.others.shape for part in parts]
    every = (
        np.concatenate([np.broadcast_to(getattr(part, name), size) for part, size in zip(parts, sizes, strict=True)], axis=axis)
        for name in names_of(Situation)
    )
    return Situation(*(stage_by_stage(each) for each in every))
