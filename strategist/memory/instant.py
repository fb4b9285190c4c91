"""One instant at which memory can peak, and sums of what is there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from strategist.document.estimate import MOMENTS
from strategist.records import dataclass
from strategist.space.candidates import Mask, Reals, total_of

LOSS, LAYERS, END, UPDATE = range(len(MOMENTS))
"""Places in MOMENTS."""


NONE: Reals = np.zeros(())
NOWHERE: Mask = np.zeros((), np.bool_)
"""No bytes, or no candidate: a part that no candidate of a group has is not worked out."""


def added(*parts: Reals) -> Reals:
    """The sum of the parts that are there."""
    there = [part for part in parts if part is not NONE]
    return total_of(there) if there else NONE


@dataclass(frozen=True, slots=True, eq=False)
class Instant:
    """Instants of one moment, and bytes by term: (C, S) each, with axes in front along which instants of one sort lie. `is_loss`:
    forward is over and nothing is on its way between ranks."""

    moment: int
    terms: Mapping[str, Reals]
    is_loss: bool = False
