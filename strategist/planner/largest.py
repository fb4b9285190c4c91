"""The largest of something that still fits on given machines: sequence, model or micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Literal, TypeVar

from strategist.document.sizing import Largest
from strategist.errors import NoPlanError
from strategist.planner.search import Found, Question, search
from strategist.rulebook.apply import family_of
from strategist.space.grammar import layout

What = Literal["seq-len", "model-size", "micro-batch"]
T = TypeVar("T")
Ask = Callable[[int], Question]
BEYOND = 8
"""Sizes of models that are tried above the first that does not fit: a larger one may have fewer layers or a smaller vocabulary, and 13B
fits where 9.8B does not. Sizes that are names of real models are tried up to twice it, because their shapes are their own: 65B fits where
35B, with a vocabulary eight times as large, does not."""


def largest(
    what: What, ladder: Sequence[int], ask: Ask, *, is_ordered: bool = True, named: Collection[int] = ()
) -> Largest:
    """The last value of an ascending ladder for which something is legal and fits, and the one after it, which does not.

    Where every value below one that fits fits too the ladder is halved; of models, whose shapes are those of real ones, only nearly, so
    that some more above are tried, those that are `named` further up; otherwise it is climbed down. Raises NoPlanError when not even the first fits.
    """
    beyond = partial(_halved_and_beyond, named=named)
    find = _climbed_down if not is_ordered else beyond if what == "model-size" else halved
    place, found = find(ladder, cache(partial(_search, ask)))  # what did not fit may be asked again from further up
    if found is None:
        raise NoPlanError(
            f"Not even a {what} of {ladder[0]:,} fits.", flag="--max", value=what, hint="Name larger machines."
        )
    row = found.best_of() or 0
    return Largest(
        what=what,
        value=ladder[place],
        too_large=ladder[place + 1] if place + 1 < len(ladder) else None,
        family=family_of(found.families, row),
        layout=layout(found.candidates.row(row)),
        step_s=found.step_seconds(row),
        peak_bytes=int(found.device_bytes[row]),
        usable_bytes=found.question.job.usable_bytes,
    )


def _search(ask: Ask, value: int) -> Found | None:
    """What fits at a value; None when nothing does."""
    found = search(ask(value), bests=True)
    return found if len(found.fitting) else None


def halved(ladder: Sequence[int], try_: Callable[[int], T | None]) -> tuple[int, T | None]:
    """The last place for which something is found, and what; by steps that double until nothing is, and then halve."""
    place, best, step, is_growing = -1, None, 1, True
    while step:
        found = try_(ladder[place + step]) if place + step < len(ladder) else None
        if found is not None:
            place, best = place + step, found
        is_growing = is_growing and found is not None
        step = step * 2 if is_growing else step // 2
    return place, best


def _halved_and_beyond(
    ladder: Sequence[int], try_: Callable[[int], T | None], named: Collection[int]
) -> tuple[int, T | None]:
    """The same as `halved`, and then the last of some more places for which something is found after all, until above it nothing is."""
    place, best = halved(ladder, try_)
    while best is not None:
        above = range(place + 1, len(ladder))
        near = [at for at in above if at <= place + 1 + BEYOND]
        far = [at for at in above if at > place + 1 + BEYOND and ladder[at] in named and ladder[at] <= 2 * ladder[place + 1]]  # fmt: skip
        further, other = _climbed_down([ladder[at] for at in (*near, *far)], try_)
        if other is None:
            break
        place, best = (*near, *far)[further], other
    return place, best


def _climbed_down(ladder: Sequence[int], try_: Callable[[int], T | None]) -> tuple[int, T | None]:
    """The last place for which something is found, from above."""
    for place in reversed(range(len(ladder))):
        found = try_(ladder[place])
        if found is not None:
            return place, found
    return -1, None
