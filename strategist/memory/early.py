"""Interleaved pipelines under ZeRO-3: what other chunks hold that was gathered too early, and the passes in which a rank holds most.

A chunk's backward pass ends with the gathering of what ran before its first layer in any forward pass, its last layer, or norm and
head (PyTorch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _backward_prefetch: the unit before in
post_forward_order). Nothing gives that buffer back before a pass of the same chunk uses it, while other chunks work. The pass that
comes down to the first forward pass of all finds nothing before it. The last backward pass of a chunk gives all of its units back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from strategist.columns import entries, stage_by_stage
from strategist.memory.situations import NEVER, Schedule, Situation
from strategist.memory.sorts import record_of
from strategist.memory.step import Step
from strategist.records import names_of, replace
from strategist.space.candidates import Column, Mask, Reals
from strategist.space.shares import Group


class EarlySchedule(Schedule):
    """The passes of interleaved chunks, and what lies gathered too early beside them."""

    def backwards(self, numbers: Column) -> Situation:
        """Backward passes by their numbers (K, C, S)."""
        found = self.at(*numbers)
        k = self._numbered(tuple(numbers))
        own = self.v - 1 - k // self.turn % self.v
        return replace(self._beside(found, k, self._begun(k), own), finds_early=NEVER)

    def forwards(self, numbers: Column) -> Situation:
        """The forward passes that run just before."""
        before = self.at(*numbers)
        k = self._numbered(tuple(numbers))
        begun = self._begun(k)
        own = (begun - 1) // self.turn % self.v
        is_first, is_last = own == 0, own == self.v - 1
        found = replace(
            before,
            others_first=before.others_first + before.is_first - is_first,
            others_last=before.others_last + before.is_last - is_last,
            is_first=is_first,
            is_last=is_last,
            stands=self._ran(k, self.v - 1 - own) > 0,
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

    def _begun(self, k: Column) -> Column:
        return np.minimum(self.ahead + k, self.passes)

    def _ran(self, passes: Column, place: Column | int) -> Column:
        """How many of some passes, one turn behind the other, were those of the chunk in that place of a round."""
        around = self.turn * self.v
        return passes // around * self.turn + np.clip(passes % around - place * self.turn, 0, self.turn)

    def _holds(self, chunk: Column | int, begun: Column, k: Column) -> Mask:
        """Whether a unit of a chunk lies gathered too early when so many forward passes and `k` backward passes ran."""
        back = self.v - 1 - chunk
        done = self._ran(k, back)
        last, left = self._left(chunk, done - 1)
        _, least = self._left(chunk, np.minimum(done - 2, self.turn - 1))
        finds = (left > 0) | ((done > 1) & (least == 0))  # not the pass that comes down to the first one
        unused = self._ran(begun, chunk) == self._ran(self._begun(last), chunk)
        return np.asarray((done > 0) & (done < self.m) & finds & unused, np.bool_)

    def _first_ran(self, begun: Column, k: Column) -> Mask:
        """Whether the chunk with the embedding ran forward and not backward since."""
        done = self._ran(k, self.v - 1)
        last, _ = self._left(0, done - 1)
        return np.asarray((done == 0) | (self._ran(begun, 0) > self._ran(self._begun(last), 0)), np.bool_)

    def _left(self, chunk: Column | int, number: Column) -> tuple[Column, Column]:
        """A chunk's backward pass by its number in the chunk: its number among all, and how many passes of the chunk it leaves."""
        number = np.maximum(number, 0)
        last = number // self.turn * self.turn * self.v + (self.v - 1 - chunk) * self.turn + number % self.turn
        return last, self._ran(self._begun(last), chunk) - number - 1

    def _beside(self, found: Situation, k: Column, begun: Column, own: Column) -> Situation:
        early = np.zeros(k.shape)
        ends = {}
        for chunk in range(int(self.v.max())):
            holds = self._holds(chunk, begun, k) & (own != chunk) & (chunk < self.v)
            early += holds
            if chunk == 0:
                ends["early_first"] = stage_by_stage(holds * 1.0)
            last = np.where(self.v - 1 == chunk, holds, 0.0)
            ends["early_last"] = stage_by_stage(last if chunk == 0 else ends["early_last"] + last)
        return replace(found, early=stage_by_stage(early), **ends)


def early_passes(group: Group, in_situation: Callable[..., Step]) -> tuple[Situation, Situation, Column]:
    """The passes to look at of candidates all of whose chunks hold units early (space/shares.py, groups). Backward, (5, D, S): the first, those
    in which they hold most of the chunk with the head, the first of that with the embedding, the fullest of that, and of those between.
    Forward, (4, D, S): the fullest of the first, the last and those between. Where there are none between, these are any. And the place of
    every candidate's passes among the D choices that there are, (C,)."""
    c = group.candidates
    firsts, place = c.sorts((c["accumulation"], c["virtual_stages"]))
    schedule = EarlySchedule(replace(group, candidates=c.where(firsts)))
    backward = schedule.backwards(schedule.turns_of_backward())
    forward = schedule.forwards(schedule.turns_of_forward())
    fullest = [_possible(group, passes) for passes in (backward, forward)]
    looked_at = _joined(
        *(_chosen(passes, np.concatenate(own)) for passes, own in zip((backward, forward), fullest, strict=True))
    )
    held, numbers = in_situation(looked_at, place).moving, [*fullest[0], *fullest[1]]
    ends = np.cumsum([len(own) for own in numbers])[:-1]
    best = [own.argmax(axis=0) for own in np.split(held, ends)]
    choices, at = c.sorts((place, *(own[:, stage] for own in best for stage in range(len(group.stages)))))
    of = place[choices]
    stages = np.arange(len(group.stages))
    last, first, between, *forwards = (
        own[most[choices], of[:, None], stages] for own, most in zip(numbers, best, strict=True)
    )
    backwards = np.stack([np.zeros_like(last), last, np.ones_like(last), first, between])
    found = _chosen(record_of(backward, of), backwards), _chosen(record_of(forward, of), np.stack([*forwards, forwards[-1]]))
    return *found, at


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


def _joined(*parts: Situation) -> Situation:
    """Passes behind others."""
    every = (np.concatenate([getattr(part, name) for part in parts]) for name in names_of(Situation))
    return Situation(*(stage_by_stage(each) for each in every))
