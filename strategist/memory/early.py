"""Interleaved pipelines under ZeRO-3: what other chunks hold that was gathered too early, and the passes in which a rank holds most.

A chunk's backward pass ends with the gathering of what ran before its first layer in any forward pass, its last layer, or norm and
head (PyTorch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _backward_prefetch: the unit before in
post_forward_order). Nothing gives that buffer back before a pass of the same chunk uses it, while other chunks work. The pass that
comes down to the first forward pass of all finds nothing before it. The last backward pass of a chunk gives all of its units back.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from operator import and_
from typing import NamedTuple

import numpy as np

from strategist.columns import stage_by_stage
from strategist.memory.instant import NONE
from strategist.memory.situations import NEVER, Pipeline, Schedule, Situation
from strategist.memory.step import Step
from strategist.records import names_of, replace
from strategist.space.candidates import Candidates, Column, Mask, Reals, code
from strategist.space.interleaved import Rounds
from strategist.space.shares import Group

Ends = tuple[Mask, Mask]
"""Which stages hold the embedding and the head, (S,) each."""
KEPT = 2**4
"""Spaces of which the passes to compare are kept."""


class EarlySchedule(Schedule):
    """The passes of interleaved chunks, and what lies gathered too early beside them."""

    def __init__(self, group: Group | Pipeline) -> None:
        super().__init__(group)
        self.rounds = Rounds(self.turn, self.v, self.passes, self.ahead)

    def of_both(self, backward: Column, forward: Column) -> Situation:
        """Backward passes by their numbers (K, C, S), and behind them the forward passes that run just before others."""
        k = self._numbered(np.concatenate([backward, forward]))
        is_forward = np.arange(len(k))[:, None, None] >= len(backward)
        found, begun = self.in_passes(k), self.rounds.begun(k)
        own = np.where(is_forward, (begun - 1) // self.turn % self.v, self.v - 1 - k // self.turn % self.v)
        is_first, is_last = own == 0, own == self.v - 1
        chunks = np.arange(int(self.v.max()))[:, None, None, None]
        holds = self._holds(chunks, begun, k) & (own != chunks) & (chunks < self.v)
        return replace(
            found,
            others_first=found.others_first + found.is_first - is_first,
            others_last=found.others_last + found.is_last - is_last,
            is_first=is_first,
            is_last=is_last,
            stands=self.rounds.ran(k, self.v - 1 - own) > 0,
            holds_first=np.where(is_forward, is_first | self._first_ran(begun, k), found.holds_first),
            early=stage_by_stage(holds.sum(axis=0) * 1.0),
            early_first=stage_by_stage(holds[0] * 1.0),
            early_last=stage_by_stage((holds & (chunks == self.v - 1)).any(axis=0) * 1.0),
            finds_early=is_forward & self._holds(own, begun - 1, k),
        )

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
        return np.asarray(
            (done == 0) | (self.rounds.ran(begun, 0) > self.rounds.ran(self.rounds.begun(last), 0)), np.bool_
        )


class LookedAt(NamedTuple):
    """Passes until the layers' backward begins, from there on, and forward, (P, D, S); and which of the D each candidate's are, (C,)."""

    heads: Situation
    bodies: Situation
    forwards: Situation
    at: Column


def in_company(step: Step, others: Situation, at: Column | None, rows: Column) -> LookedAt:
    """The passes to look at where the chunks of some candidates hold units early (space/shares.py, holds_early_C), those in `rows`, and
    all `others` look at the same five, the last of them twice, which lie at the places `at`."""
    backward, forward, own = early_passes(step, rows)
    count = others.others.shape[1]
    place = np.arange(count) if at is None else at.copy()
    place[rows] = count + own
    every = _joined(others.of([*range(len(others.others)), -1]), backward)
    return LookedAt(every.of(slice(2)), every, _joined(others.of(slice(1, None)), forward), place)


def early_passes(step: Step, rows: Column) -> tuple[Situation, Situation, Column]:
    """Of candidates whose chunks hold units early, in `rows`, the backward passes to look at, (6, D, S): the first, those in which they hold
    most of the chunk with the head, the first of that with the embedding, the fullest of that, of those between, and of the first ones of
    those between, whose gradients come beside what is held. Forward, (4, D, S): the fullest of the first, the last and those between.
    Where there are none between, these are any. And which of these D choices is that of each of them."""
    group, c = step.group, step.c.where(rows)
    firsts, place = c.sorts(("accumulation", "virtual_stages"))
    counts = (tuple(c[name][firsts].tolist()) for name in ("accumulation", "virtual_stages"))
    possible, begins = passes_to_compare(group.pp, tuple(group.stages.tolist()), *counts)
    held = step.among(rows, possible.of(slice(begins[0], None)), place).moving.total(NONE)
    most = [own.argmax(axis=0) for own in np.split(held, [begin - begins[0] for begin in begins[1:]])]
    stages = np.arange(len(group.stages))
    choices, at = c.sorts((place, *(own[:, stage] for own in most for stage in stages)))
    alike = place[choices][:, None]
    last, first, between, anew, *forward = (begin + best[choices] for begin, best in zip(begins, most, strict=True))
    backward = np.zeros_like(last), last, np.ones_like(last), first, between, anew
    looked_at = _chosen(possible, (np.stack([*backward, *forward, forward[-1]]), alike, stages))
    return looked_at.of(slice(len(backward))), looked_at.of(slice(len(backward), None)), at


@lru_cache(maxsize=KEPT)
def passes_to_compare(
    pp: int, stages: tuple[int, ...], micro_batches: tuple[int, ...], chunks: tuple[int, ...]
) -> tuple[Situation, tuple[int, ...]]:
    """Passes (N, F, S) of F numbers of micro-batches and of chunks on some stages, in which a rank can hold most: the first of all, that of
    the chunk with the embedding, and then, from the numbers that are given on, each sort of `_possible` of backward, and the same of
    forward but for the last. Nothing of it depends on a model or its ranks, and searches ask for the same again."""
    words = np.full(len(chunks), code("schedule", "interleaved"))
    own = {"accumulation": np.array(micro_batches), "virtual_stages": np.array(chunks), "schedule": words}
    places = np.array(stages)
    schedule, ends = EarlySchedule(Pipeline(Candidates(own), pp, places)), (places == 0, places == pp - 1)
    turns = schedule.turns_of_backward(), schedule.turns_of_forward()
    passes, count = schedule.of_both(*turns), len(turns[0])
    back, (*there, _) = _possible(ends, passes.of(slice(count))), _possible(ends, passes.of(slice(count, None)))
    firsts = [np.full((1, len(chunks), len(stages)), number) for number in range(2)]
    numbers = [*firsts, *back, *(count + forward for forward in there)]
    begins = np.cumsum([len(each) for each in numbers])[1:-1].tolist()
    at = np.concatenate(numbers), np.arange(len(chunks))[:, None], np.arange(len(stages))
    return _chosen(passes, at), tuple(begins)


def _possible(ends: Ends, passes: Situation) -> tuple[Column, Column, Column, Column]:
    """Of passes (K, F, S) the numbers of those that can be first with most of the chunk with the head, that with the embedding, others,
    and others that are the first of theirs, (N, F, S): those before which no pass of such a chunk, first of it or not as this one is, holds
    as much of everything. Where a rank has fewer the first of them stands for the rest, and where it has none the first of all."""
    earlier = np.tri(len(passes.others), k=-1, dtype=np.bool_).T[..., None, None]
    sorts = passes.is_last, passes.is_first, passes.stands
    no_less = reduce(and_, (own[:, None] == own for own in sorts), earlier)
    for amount in _amounts(ends, passes):
        no_less &= amount[:, None] >= amount
    left = ~no_less.any(axis=0)
    others = ~(passes.is_last | passes.is_first)
    marks = passes.is_last, passes.is_first, others, others & ~passes.stands
    last, first, between, anew = (_numbers(left & mark) for mark in marks)
    return last, first, between, anew


def _amounts(ends: Ends, s: Situation) -> tuple[Reals | Mask, ...]:
    """What a rank holds the more bytes by the more of it a pass has, as `Step.moving` reads it; twice what must be the same: others of the chunk
    with the head, which may keep less than chunks between."""
    first, last = (own[None, :] for own in ends)
    others_last = s.others_last * last
    early_first, early_last = s.early_first * first, s.early_last * last
    return (
        *(others_last, -others_last, s.others, s.others_first * first),
        *(s.standing, s.first_stands & first, s.last_stands & last, s.reduced, s.last_reduced & last),
        *(s.early - early_first - early_last, early_first, early_last, s.finds_early),
    )


def _numbers(marked: Mask) -> Column:
    """The numbers of marked passes (K, F, S), as many as any rank has, (N, F, S)."""
    count = marked.sum(axis=0)
    order = (~marked).argsort(axis=0, kind="stable")[: max(1, int(count.max()))]
    return np.where(np.arange(len(order))[:, None, None] < count, order, order[:1])


def _chosen(passes: Situation, at: tuple[Column, ...]) -> Situation:
    """Passes (K, F, S) by their places along these axes."""
    return Situation(*(stage_by_stage(getattr(passes, name)[at]) for name in names_of(Situation)))


def _joined(*parts: Situation) -> Situation:
    """Passes of some candidates, and of others behind them."""

    def of_all(name: str) -> Reals:
        own = [getattr(part, name) for part in parts]
        full = (one if one is not NEVER else np.zeros_like(part.is_first) for one, part in zip(own, parts, strict=True))
        return np.concatenate([*full], axis=1)

    return Situation(*(stage_by_stage(of_all(name)) for name in names_of(Situation)))
