"""Interleaved pipelines under ZeRO-3: what other chunks hold that was gathered too early, and the passes in which a rank holds most.

A chunk's backward pass ends with the gathering of what ran before its first layer in any forward pass, its last layer, or norm and
head (PyTorch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _backward_prefetch: the unit before in
post_forward_order). Nothing gives that buffer back before a pass of the same chunk uses it, while other chunks work. The pass that
comes down to the first forward pass of all finds nothing before it. The last backward pass of a chunk gives all of its units back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strategist.columns import entries, stage_by_stage
from strategist.memory.situations import NEVER, Schedule, Situation
from strategist.memory.sorts import record_of
from strategist.memory.step import Step
from strategist.records import names_of, replace
from strategist.space.candidates import Column, Mask, Reals


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


def fullest_passes(step: Step, rows: Column) -> tuple[Situation, Situation]:
    """For some candidates (R) of a step backward passes, (5, R, S): the first, those in which they hold most of the chunk with the head,
    the first of that with the embedding, the fullest of that, and of those between. And forward passes, (4, R, S): the fullest of
    the first, the last and those between. Where there are none between, these are any."""
    own = step.c.where(rows)
    firsts, place = own.sorts((own["accumulation"], own["virtual_stages"]))
    schedule = EarlySchedule(replace(step.group, candidates=own.where(firsts)))
    backward = record_of(schedule.backwards(schedule.turns_of_backward()), place)
    forward = record_of(schedule.forwards(schedule.turns_of_forward()), place)
    last, first, between = _fullest(backward, step.moving_in(backward, rows))
    chosen = np.stack([np.zeros_like(last), last, np.ones_like(last), first, between])
    last, first, between = _fullest(forward, step.moving_in(forward, rows))
    return _chosen(backward, chosen), _chosen(forward, np.stack([last, first, between, between]))


def _fullest(passes: Situation, held: Reals) -> tuple[Column, Column, Column]:
    """Of passes (K, R, S) the place of those with most: of the chunk with the head, that with the embedding, and others."""
    sorts = passes.is_last, passes.is_first, ~(passes.is_last | passes.is_first)
    last, first, between = (np.where(sort, held, -1.0).argmax(axis=0) for sort in sorts)
    return last, first, between


def _chosen(passes: Situation, best: Column) -> Situation:
    at = best, *np.indices(best.shape[1:], sparse=True)
    parts = (entries(getattr(passes, name), at) for name in names_of(Situation))
    return Situation(*(stage_by_stage(np.broadcast_to(part, best.shape)) for part in parts))


def early_passes(step: Step) -> tuple[Situation, Situation]:
    """The backward passes to look at, and the forward passes, of candidates all of whose chunks hold units early (space/shares.py, groups)."""
    chunks = step.c["virtual_stages"]
    alike = [
        np.flatnonzero(chunks == number) for number in np.unique(chunks)
    ]  # few chunks have few passes to choose from
    order = np.concatenate(alike).argsort()
    backward, forward = zip(*(fullest_passes(step, own) for own in alike), strict=True)
    return _together(backward, order), _together(forward, order)


def _together(parts: Sequence[Situation], order: Column) -> Situation:
    """Passes of some candidates, and of others behind them, in an order."""
    every = (np.concatenate([getattr(part, name) for part in parts], axis=1) for name in names_of(Situation))
    return Situation(*(stage_by_stage(each[:, order]) for each in every))
