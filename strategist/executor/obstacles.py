"""A reason not to run, as data first and as an error second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from strategist.errors import ImpossibleError
from strategist.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """One reason why the executor will not run a plan. `place` is its path in the Plan."""

    code: str
    place: str
    value: object
    sentence: str
    hint: str = "Plan again without it, or emit the plan for a framework that has it."


def indivisible(place: str, value: int, sentence: str, axis: str) -> Obstacle:
    """A number that the degree of an axis does not divide."""
    return Obstacle(
        code="DIVISIBILITY", place=place, value=value, sentence=f"{sentence}.", hint=f"Choose a {axis} that divides it."
    )


def lacking(place: str, value: object, said: str, reasons: Mapping[str, bool], hint: str) -> Iterator[Obstacle]:
    """What is not built, once for each of the reasons that holds; `said` begins the sentence that the reason ends."""
    for reason, holds in reasons.items():
        if holds:
            yield Obstacle(code="UNSUPPORTED", place=place, value=value, sentence=f"{said} {reason}.", hint=hint)


def refuse(obstacles: tuple[Obstacle, ...]) -> None:
    """Raise ImpossibleError for the first obstacle, with the others in `also`; do nothing when there is none."""
    errors = [ImpossibleError(o.code, o.sentence, flag=f"$.{o.place}", value=o.value, hint=o.hint) for o in obstacles]
    if errors:
        first, *rest = errors
        raise ImpossibleError(first.code, first.message, flag=first.flag, value=first.value, hint=first.hint, also=rest)
