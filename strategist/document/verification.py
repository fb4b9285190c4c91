"""What a trace of the real program said of a Plan's memory before the Plan was written."""

from __future__ import annotations

from typing import Literal

from strategist.document.estimate import StageMemory
from strategist.document.substitution import Substitution
from strategist.records import dataclass

Role = Literal["chosen", "runner-up", "ruled out"]
"""The layout of the Plan; the one that would be chosen without it; one that was chosen until its trace did not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLayout:
    """One layout that was looked at: bytes missing from the device of its fullest stage, predicted and traced.

    `traced_bytes` is None where there is no program to trace; `sentence` says how it went.
    """

    role: Role
    family: str
    layout: str
    fits: bool
    predicted_bytes: int
    traced_bytes: int | None
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The trace behind the bytes of a Plan: which ranks ran under which torch, and what stood for what in them.

    `predicted` are the ledgers that the formulas gave, one per stage; `layouts` are in the order of their traces.
    """

    torch: str
    ranks: tuple[str, ...]
    predicted: tuple[StageMemory, ...]
    layouts: tuple[TracedLayout, ...]
    substitutions: tuple[Substitution, ...] = ()

    def predicted_of(self, stage: int) -> StageMemory:
        """The formulas' ledger of one stage."""
        return next(ledger for ledger in self.predicted if ledger.stage == stage)
