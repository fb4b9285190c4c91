"""How far a rank is in its schedule when it works on one micro-batch: what else is in flight, whose gradients stand.

A rank works on passes: one micro-batch through one of its v runs of layers (chunks). Order of passes, PyTorch 2.13
torch/distributed/pipelining/schedules.py: Schedule1F1B runs min(m, pp - stage) forwards, then a backward and a forward in
turn; ScheduleGPipe all forwards first; ScheduleInterleaved1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)
(v - 1) pp + 2 (pp - 1 - stage) forwards, then a forward and a backward in turn, pp micro-batches of one chunk after
another, backwards from the last chunk; ScheduleLoopedBFS (Lamy-Poirier 2023, arXiv 2211.05953) all forwards, then all
backwards, every micro-batch of one chunk after another. A chunk's gradients stand from its first backward pass on and are reduced right
behind its last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from strategist.columns import rows_of, stage_by_stage
from strategist.records import dataclass
from strategist.space.candidates import Candidates, Column, Mask, Reals, code
from strategist.space.interleaved import interleaved_ahead
from strategist.space.shares import Group

NEVER: Any = np.zeros((1, 1, 1), np.bool_)
"""In no pass of any candidate."""


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """Some backward passes, one behind the other along the first axis (P): each (P, C, S) or broadcast against it.

    `others`, `others_first`, `others_last`: passes in flight beside this one, of any chunk, of the chunk with the embedding,
    of the chunk with the head. `is_first`, `is_last`: whether this one is of those chunks. `stands`: whether its chunk has
    gradients already; `standing`, `first_stands`, `last_stands`: the share of the layers, and the ends, that have.
    `reduced`, `last_reduced`: the share of the layers, and the head, that are reduced already. `is_begun`: some backward
    pass has ended. `alternates`: a forward pass ran just before. `holds_first`: the chunk with the embedding ran forward and not
    backward since. `early`, `early_first`, `early_last`: other chunks of which ZeRO-3 gathered a unit too early that no pass has used
    yet, any, the one with the embedding, the one with the head. `finds_early`: a forward pass at work finds such a unit of its chunk's.
    """

    others: Reals
    others_first: Reals
    others_last: Reals
    is_first: Mask
    is_last: Mask
    stands: Mask
    standing: Reals
    first_stands: Mask
    last_stands: Mask
    reduced: Reals
    last_reduced: Mask
    is_begun: Mask
    alternates: Mask
    holds_first: Mask
    early: Reals = NEVER
    early_first: Reals = NEVER
    early_last: Reals = NEVER
    finds_early: Mask = NEVER

    def of(self, passes: slice | list[int]) -> Situation:
        """Some of the passes."""
        return self._each(lambda part: part[passes])

    def rows(self, at: Column) -> Situation:
        """The passes of some candidates."""
        return self._each(lambda part: rows_of(part, at))

    def _each(self, function: Callable[[Any], Any]) -> Situation:
        parts = (getattr(self, name) for name in self.__match_args__)
        return Situation(*(part if part is NEVER else function(part) for part in parts))


class SpreadSituation(Situation):
    """The passes of candidates whose places among those of another situation are `at`. What nobody reads is not spread: a field
    without a value is asked for here, once."""

    __slots__ = ("_at", "_every")

    def __init__(self, every: Situation, at: Column) -> None:
        object.__setattr__(self, "_every", every)
        object.__setattr__(self, "_at", at)

    def __getattr__(self, name: str) -> Any:
        found = rows_of(getattr(self._every, name), self._at)
        object.__setattr__(self, name, found)
        return found


def distinct_situations(situations: Sequence[Situation], at: Column) -> tuple[Sequence[Situation], Column]:
    """The same passes of candidates whose places are `at`, where no two places are alike in all of some situations: most numbers of
    micro-batches make no difference to passes that are looked at."""
    fields = (getattr(one, name) for one in situations for name in one.__match_args__)
    every = [np.moveaxis(part, -2, 0).reshape(part.shape[-2], -1) for part in fields if part is not NEVER]
    rows = np.concatenate([part for part in every if len(part) == len(every[0])], axis=1, dtype=np.float64)
    found: dict[bytes, int] = {}
    place = np.array([found.setdefault(row.tobytes(), len(found)) for row in rows])
    if len(found) == len(rows):
        return situations, at
    firsts = np.flatnonzero(np.diff(np.maximum.accumulate(place), prepend=-1))
    return [one.rows(firsts) for one in situations], place[at]


def one_pass(accumulation: Column) -> Situation:
    """Without a pipeline: the last micro-batch, after others if there are any."""
    several = (accumulation > 1)[None, :, None]
    none, yes = np.zeros((1, 1, 1)), np.ones((1, 1, 1), np.bool_)
    return Situation(
        none,
        none,
        none,
        yes,
        yes,
        several,
        several * 1.0,
        several,
        several,
        none,
        np.logical_not(yes),
        several,
        yes,
        yes,
    )


class Pipeline(NamedTuple):
    """What a schedule reads of a group: candidates that share `pp`, and the numbers of the stages that are looked at, (S,)."""

    candidates: Candidates
    pp: int
    stages: Column


class Schedule:
    """The passes of every candidate of a group on every stage, (C, S). `turn` is how many micro-batches of one chunk follow each
    other before the next chunk's."""

    def __init__(self, group: Group | Pipeline) -> None:
        c = group.candidates
        self.pp = group.pp
        self.begins: Mask = group.stages[None, :] == 0
        self.m, self.v = c["accumulation"][:, None], c["virtual_stages"][:, None]
        self.passes = self.m * self.v
        behind = group.pp - group.stages[None, :]
        schedule = c["schedule"][:, None]
        interleaved = interleaved_ahead(self.pp, group.stages[None, :], self.v)
        ahead = np.where(schedule == code("schedule", "interleaved"), interleaved, self.passes)
        ahead = np.where(schedule == code("schedule", "1f1b"), behind, ahead)
        self.splits = bool((schedule == code("schedule", "zb_h1")).any())
        if self.splits:
            ahead = np.where(schedule == code("schedule", "zb_h1"), self.pp, ahead)
        self.ahead = stage_by_stage(np.minimum(ahead, self.passes))
        breadth_first: Mask = schedule == code("schedule", "looped_bfs")
        self.turn: int | Column = np.where(breadth_first, self.m, self.pp) if breadth_first.any() else self.pp

    @property
    def has_chunks(self) -> bool:
        """Whether some candidate has several chunks per rank."""
        return bool((self.v > 1).any())

    def first_pass(self) -> Column:
        """The first backward pass of all."""
        return np.zeros_like(self.ahead)

    def second_of_last_chunk(self) -> Column:
        """The chunk with the head, once it has gradients: in the second round, when all others have some too, if there is one."""
        second_round = np.where(self.m >= 2 * self.turn, self.turn * self.v, 1)
        return self._everywhere(np.where(self.v > 1, second_round, 1))

    def fullest(self) -> Column:
        """The last backward pass with as many in flight as ever; where the embedding is, of those when every weight has a gradient the
        last with which a turn of its chunk begins: that chunk keeps more than others, and most of it is in flight then. Where each
        chunk has one turn, the second of the next chunk, when a chunk more has gradients and little less is in flight: as many as ever
        are in the second of the last chunk, too."""
        last = self.passes - self.ahead
        turn_begins = self.passes - self.turn * (self.v + 1)
        is_later = turn_begins > self.turn * (self.v - 1)
        is_only = (self.passes == self.turn * self.v) & (last > 0)
        return np.where(is_only, self.turn + 1, np.where(self.begins & is_later, turn_begins, last))

    def first_of_first_chunk(self) -> Column:
        """The first backward pass of the chunk with the embedding."""
        return self._everywhere(self.turn * (self.v - 1))

    def second_of_first_chunk(self) -> Column:
        """The second one: from here on every weight has a gradient."""
        return self._everywhere(self.turn * (self.v - 1) + 1)

    def _everywhere(self, number: Column) -> Column:
        return np.broadcast_to(number, self.ahead.shape)

    def at(self, *numbers: Column) -> Situation:
        """Backward passes by their numbers (C, S), counted from 0; the last one when there are fewer."""
        return self.in_passes(self._numbered(np.stack(numbers)))

    def in_passes(self, k: Column) -> Situation:
        """Backward passes by numbers (P, C, S) that there are."""
        forwards = np.minimum(self.ahead + k, self.passes)
        turn, v = self.turn, self.v if self.has_chunks else 1
        around = turn * v
        of_chunk = k // turn
        done, begun = of_chunk // v, forwards // turn // v
        in_chunk, in_round, ahead_in_round = k - of_chunk * turn, k - done * around, forwards - begun * around
        own = of_chunk - done * v  # chunks from the last
        is_first, is_last = own == v - 1, own == 0
        other_chunks = (v - 1) * turn
        done_first = done * turn + np.maximum(0, in_round - other_chunks)
        done_last = done * turn + np.minimum(in_round, turn)
        first = begun * turn + np.minimum(ahead_in_round, turn) - done_first
        last = begun * turn + np.maximum(0, ahead_in_round - other_chunks) - done_last
        reduced = np.maximum(0, k - (self.m - turn) * v) // turn
        started = np.minimum(v, of_chunk + (in_chunk > 0))
        before = np.minimum(self.ahead + done * around - 1, self.passes)  # when that chunk's last backward pass ran
        first_then = before // around * turn + np.minimum(before % around, turn)
        holds_first = is_first | (done == 0) | (begun * turn + np.minimum(ahead_in_round, turn) > first_then)
        return Situation(
            others=(forwards - k - 1).astype(np.float64),
            others_first=(first - is_first).astype(np.float64),
            others_last=(last - is_last).astype(np.float64),
            is_first=is_first,
            is_last=is_last,
            stands=(done > 0) | (in_chunk > 0),
            standing=(started - reduced) / v,
            first_stands=done_first > 0,
            last_stands=(done_last > 0) & (reduced == 0),
            reduced=reduced / v,
            last_reduced=reduced > 0,
            is_begun=k > 0,
            alternates=self.ahead + k <= self.passes,
            holds_first=holds_first,
            finds_early=(k > 0) & ((self.ahead > 1) | (self.m > 2)),
        )

    def _numbered(self, numbers: Column) -> Column:
        return stage_by_stage(np.minimum(numbers, self.passes - 1))
