"""One instant at which memory can peak, and sums of what is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from strategist.columns import on_stages_of, rows_of
from strategist.document.estimate import MOMENTS
from strategist.records import cached_property, dataclass
from strategist.space.candidates import Column, Mask, Reals, total_of

Terms = Mapping[str, Reals]

LOSS, LAYERS, END, UPDATE = range(len(MOMENTS))
"""Places in MOMENTS."""


NONE: Reals = np.zeros(())
NEVER = -(2.0**60)
"""Bytes where there is no such instant: less than at any other, and a number that can be counted."""
NOWHERE: Mask = np.zeros((), np.bool_)
"""No bytes, or no candidate: a part that no candidate of a group has is not worked out."""


def added(*parts: Reals) -> Reals:
    """The sum of the parts that are there."""
    there = [part for part in parts if part is not NONE]
    return total_of(there) if there else NONE


@dataclass(frozen=True, eq=False)
class Part:
    """What a formula that was asked once for each sort of candidates says of terms: bytes (..., D, S) of the sorts, and the `place` of
    every candidate's sort among these, (C,); None where each candidate was asked."""

    terms: Terms
    place: Column | None

    def of_all(self) -> Terms:
        """The same of every candidate."""
        return (
            self.terms if self.place is None else {name: rows_of(held, self.place) for name, held in self.terms.items()}
        )

    @cached_property
    def together(self) -> Reals:
        """All terms added up."""
        return added(*self.terms.values())

    def total(self) -> Reals:
        """The same of every candidate."""
        return self.together if self.place is None else rows_of(self.together, self.place)

    def at(self, rows: Column) -> Column:
        """Where the sorts of some candidates stand."""
        return rows if self.place is None else self.place.take(rows)


@dataclass(frozen=True, eq=False)
class Instant:
    """Instants of one moment, and bytes by term: (C, S) each, with axes in front along which instants of one sort lie. `is_loss`:
    forward is over and nothing is on its way between ranks. Beside the `terms` are those of some `parts`, spread over the candidates only
    when they are added up."""

    moment: int
    terms: Terms
    is_loss: bool = False
    parts: tuple[Part, ...] = ()

    def where(self, mask: Mask) -> Instant:
        """The same where a mask of stages, (C, S) or (S,), is set, and nothing elsewhere."""
        whole = self.whole()
        kept = {name: held if held is NONE else np.where(mask, held, 0.0) for name, held in whole.terms.items()}
        return Instant(self.moment, kept, self.is_loss)

    def whole(self) -> Instant:
        """The same with all bytes in `terms`."""
        if not self.parts:
            return self
        terms = dict(self.terms)
        for part in self.parts:
            for name, held in part.of_all().items():
                terms[name] = added(terms.get(name, NONE), held)
        return Instant(self.moment, terms, self.is_loss)

    def total(self, beside: Reals) -> Reals:
        """All of it and what is held `beside` it at every instant, (C, S), at each of these instants, (..., C, S)."""
        return added(beside, *self.terms.values(), *(part.total() for part in self.parts))

    def on(self, beside: Reals, rows: Column, stages: Column) -> Reals:
        """The same of some candidates on a stage of each, (..., N)."""
        own = (held for held in self.terms.values() if held is not NONE)
        every = (
            (beside, rows),
            *((held, rows) for held in own),
            *((part.together, part.at(rows)) for part in self.parts),
        )
        return added(*(on_stages_of(held, at, stages) for held, at in every))

    def apart(self, rows: Column) -> Iterator[tuple[Terms, Column]]:
        """Terms, and where some candidates stand among those that they are of."""
        yield self.terms, rows
        for part in self.parts:
            yield part.terms, part.at(rows)

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """How many instants lie along each of the axes in front."""
        every = (self.terms, *(part.terms for part in self.parts))
        return np.broadcast_shapes(*(held.shape[:-2] for terms in every for held in terms.values()))


def only(where: Mask, instants: Iterable[Instant]) -> Iterator[Instant]:
    """The instants where a mask of stages is set, and nothing elsewhere."""
    return (instant.where(where) for instant in instants)
