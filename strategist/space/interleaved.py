"""Interleaved chunks: how many passes of which chunk a stage has worked on after so many passes.

Source: PyTorch 2.13 torch/distributed/pipelining/schedules.py, ScheduleInterleaved1F1B (Narayanan et al. 2021, arXiv 2104.04473, section
2.2): (v - 1) pp + 2 (pp - 1 - stage) forward passes, then a forward and a backward in turn, pp micro-batches of one chunk after another,
backwards from the last chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from strategist.columns import clamped
from strategist.space.candidates import Column


class Rounds(NamedTuple):
    """Passes of a stage that takes `turn` of one chunk, then as many of the next of its `v` chunks; `passes` of either kind, of which
    `ahead` forward ones have begun when the first backward one runs. Numbers or columns of one shape."""

    turn: Any
    v: Any
    passes: Any
    ahead: Any

    def begun(self, k: Any) -> Any:
        """Forward passes that have begun when the `k`-th backward pass runs."""
        return np.minimum(self.ahead + k, self.passes)

    def ran(self, passes: Any, place: Any) -> Any:
        """How many of some passes were those of the chunk in that place of a round."""
        around = self.turn * self.v
        return passes // around * self.turn + clamped(passes % around - place * self.turn, 0, self.turn)

    def left(self, chunk: Any, number: Any) -> tuple[Any, Any]:
        """A chunk's backward pass by its number in the chunk: its number among all, and how many passes of the chunk it leaves in
        flight."""
        number = np.maximum(number, 0)
        last = number // self.turn * self.turn * self.v + (self.v - 1 - chunk) * self.turn + number % self.turn
        return last, self.ran(self.begun(last), chunk) - number - 1


def interleaved_ahead(pp: int, stages: Column, v: Any) -> Any:
    """How many forward passes a stage has begun when its first backward pass runs, if there are as many."""
    return (v - 1) * pp + 2 * (pp - 1 - stages) + 1


def interleaved_rounds(pp: int, stages: Column, m: Any, v: Any) -> Rounds:
    """The passes of `m` micro-batches on stages with `v` chunks."""
    return Rounds(pp, v, m * v, np.minimum(interleaved_ahead(pp, stages, v), m * v))
