"""Ports between nodes: what runs behind compute there takes them in turn, whichever axis it belongs to. Columns (C, S)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np

from strategist.records import dataclass
from strategist.space.candidates import Reals
from strategist.space.traffic import Hidden

Pass = Literal["forward", "backward"]
Shares = Mapping[Pass, Reals | float]
"""The part of some seconds in either pass."""

IN_TURN: tuple[Hidden, ...] = ("matmul", "attention", "pairs", "compute", "forward", "backward")
"""Covers in the order in which their traffic gets the ports. What a layer or a stage at work waits for goes first (tp, cp, ep, then pp); gathers and
reductions of dp, which are sent ahead or not waited for until the update, run behind what time is left."""


@dataclass(frozen=True, slots=True, eq=False)
class _Carried:
    """Seconds that ports carried behind compute, in so many micro-batches of a step, and their part in either pass."""

    seconds: Reals
    rounds: Reals
    shares: Shares

    def each(self, function: Callable[[Any], Any]) -> _Carried:
        """The same of every column."""
        return _Carried(function(self.seconds), function(self.rounds), _each(self.shares, function))


class Ports:
    """The ports of a stage while it computes. Seconds of a collective between nodes are those in which it fills a device's part of the ports, so
    those of two axes add up, whatever compute each of them hides behind."""

    def __init__(self, room: Mapping[Pass, Reals], carried: Iterable[_Carried] = ()) -> None:
        """`room` are the seconds of each pass over one micro-batch that anything may run behind; some may have `carried` traffic already."""
        self._room, self._carried = room, list(carried)

    def too_much(self, seconds: Reals, rounds: Reals, shares: Shares) -> Reals:
        """What of `seconds`, in `rounds` micro-batches and in the passes of `shares`, finds the ports taken by what came before; the
        rest is carried."""
        room: Reals = rounds * sum(self._room[name] for name in shares)
        for before in self._carried:
            part = sum(before.shares[name] for name in shares if name in before.shares)
            room = room - part * before.seconds * np.minimum(1.0, rounds / np.maximum(before.rounds, 1.0))
        left = np.maximum(0.0, seconds - np.maximum(0.0, room))
        self._carried.append(_Carried(seconds - left, rounds, shares))
        return left

    def each(self, function: Callable[[Any], Any]) -> Ports:
        """Ports whose room and whose traffic so far are the same of every column."""
        return Ports(_each(self._room, function), (carried.each(function) for carried in self._carried))


def _each(columns: Mapping[Pass, Any], function: Callable[[Any], Any]) -> dict[Pass, Any]:
    return {which: function(column) for which, column in columns.items()}
