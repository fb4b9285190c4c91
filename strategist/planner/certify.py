"""The account of a finished search, for a Plan that carries its own certificate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from strategist.document.certificate import Certificate, Dimension, FamilyBest, RuledOut
from strategist.errors import InternalError
from strategist.planner.search import FRONTEND, Found
from strategist.space.candidates import OF_LAYERS, WORDS, Candidates
from strategist.space.grammar import layout


def certificate(found: Found, among: Sequence[str], whole_sequences: bool) -> Certificate:
    """What became of every layout of a search, counted before anything else is asked of it.

    `among` and `whole_sequences` say in which scope the plan's own layout was chosen. Raises InternalError when nothing fits.
    """
    row = found.best_of()
    if row is None:
        raise InternalError(
            "INTERNAL", "A search without fitting candidates was certified.", hint="Please report this."
        )
    weighed = int(found.weights.known.sum())
    return Certificate(
        enumerated=found.enumerated,
        refused=(*(RuledOut(each.rule.id, each.count) for each in found.refused), *_unsaid(found)),
        legal=found.slower + len(found.legal),
        slower=found.slower,
        bounded=len(found.legal) - weighed,
        weighed=weighed,
        over=weighed - len(found.fitting),
        evaluated=len(found.fitting),
        dimensions=dimensions(found.enumerated_candidates),
        best_layout=layout(found.candidates.row(row)),
        best_step_ns=int(found.times.step[row]),
        best_peak_bytes=int(found.device_bytes[row]),
        among=tuple(among),
        whole_sequences=whole_sequences,
        bests=tuple(_bests(found)),
    )


def _unsaid(found: Found) -> tuple[RuledOut, ...]:
    """What the front end cannot say of what rules allow, beside what each rule refused."""
    return () if found.unsaid is None else (RuledOut(FRONTEND, found.unsaid.layouts),)


def _bests(found: Found) -> Iterator[FamilyBest]:
    """The best of every family, and of its layouts with cp = 1, where something of it fits."""
    is_whole = found.candidates["cp"] == 1
    for name, members in found.families.items():
        for whole_sequences, among in ((False, members), (True, members & is_whole)):
            row = found.best_of(among)
            if row is not None:
                own = layout(found.candidates.row(row))
                step_ns = int(found.times.step[row])
                yield FamilyBest(family=name, whole_sequences=whole_sequences, layout=own, step_ns=step_ns)


def dimensions(candidates: Candidates) -> tuple[Dimension, ...]:
    """Every choice with the values that it takes somewhere, in the order of the columns; which layers run again where that differs."""
    differ = (name for name in OF_LAYERS if name in candidates.columns and np.ptp(candidates[name]))
    return tuple(
        Dimension(name, tuple(_word(name, int(value)) for value in np.unique(candidates[name])))
        for name in (*candidates.choices, *differ)
    )


def _word(name: str, value: int) -> str:
    return WORDS[name][value] if name in WORDS else str(value)
