"""What a search did with every layout of its space, so that somebody else can count it again."""

from __future__ import annotations

from strategist.records import dataclass


@dataclass(frozen=True, slots=True)
class Dimension:
    """One choice of the layout and every value of it that was enumerated."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RuledOut:
    """How many layouts one rule refused, those of earlier rules not counted."""

    rule: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyBest:
    """The best layout of a family that fits, or with `whole_sequences` of those of it with cp = 1."""

    family: str
    whole_sequences: bool
    layout: str
    step_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The account of a search: enumerated = refused + legal, legal = slower + bounded + weighed, weighed = over + evaluated.

    `bounded` were dropped because what they hold at the loss alone is more than fits (a peak is never less); `weighed` have
    their full ledger; `over` of them do not fit; `evaluated` have their step time too. `slower` were dropped, whether they fit or
    not, because a bound of their step (all of it but the traffic of dp, the update and offloading, or the step itself) is above
    the step of the best of every family they belong to, as `bests` names them; layouts with cp = 1 also above that of the
    best of these. `best_layout` is the best of what was evaluated
    by the plan's objective. `among` are the families that the rules named where they decided (none: the whole space), and
    with `whole_sequences` only layouts with cp = 1 of them: in that scope the plan's own layout is the best.
    """

    enumerated: int
    refused: tuple[RuledOut, ...]
    legal: int
    bounded: int
    weighed: int
    over: int
    evaluated: int
    dimensions: tuple[Dimension, ...]
    best_layout: str
    best_step_ns: int
    best_peak_bytes: int
    among: tuple[str, ...] = ()
    whole_sequences: bool = False
    slower: int = 0
    bests: tuple[FamilyBest, ...] = ()
