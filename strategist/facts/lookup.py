"""Find one thing by name: blanks, dashes, underscores and case do not matter; nothing is ever guessed silently."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Generic, TypeVar

from strategist.errors import InputError, did_you_mean, shown
from strategist.records import dataclass
from strategist.units import plain_text

T = TypeVar("T")

NAME_LIMIT = 200

MOST_WORDS = 4
"""Of a name whose words are tried in every order."""

OTHER_PRODUCTS = ("ti", "s", "d")
"""Letters behind a number that make another product of it: an RTX 2080 is no 2080 Ti, a V100 no V100S."""


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """What a name stands for. `assumed` is a sentence when the name was shorter than the thing it was taken for."""

    value: T
    assumed: str | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """Everything that may be said for one kind of thing.

    `exact` maps folded names and aliases to canonical names; `short` holds the closed list of shorthands; `parts`
    holds, per canonical name, the word sequences a shorter name may be made of.
    """

    exact: Mapping[str, str]
    short: Mapping[str, str]
    parts: Mapping[str, tuple[tuple[str, ...], ...]]
    flag: str
    unknown: str
    noun: str
    table: str


def fold(name: str) -> str:
    """`name` in the form in which names are compared."""
    return re.sub(r"[\s_-]+", "", name).lower()


def words(name: str) -> tuple[str, ...]:
    """The words of a name, folded."""
    return tuple(word for word in re.split(r"[\s_-]+", name.lower()) if word)


def resolve(name: str, names: Names) -> Found[str]:
    """The canonical name that `name` stands for.

    A canonical name or an alias is exact. A shorthand of the closed list, or a name that fits exactly one row, is
    found with `assumed` set. Raises InputError AMBIGUOUS with every choice, or the table's unknown code with up to
    three near names.
    """
    said = plain_text(name, names.flag)
    if len(said) > NAME_LIMIT:
        raise InputError("NAME_TOO_LONG", f"{names.flag} has more than {NAME_LIMIT} characters.", flag=names.flag, value=said, hint="Give a name.")  # fmt: skip
    choices = possible(said, names)
    if len(choices) == 1:
        return Found(choices[0], None if fold(said) in names.exact else _assumed(said, choices[0], names))
    if choices:
        raise InputError(
            "AMBIGUOUS",
            f"{names.flag} {shown(said)} fits {len(choices)} rows of the catalogue: {', '.join(choices)}.",
            flag=names.flag,
            value=said,
            hint="Write one of these names.",
        )
    raise InputError(
        names.unknown,
        f"{names.flag}: no {names.noun} is called {shown(said)}.",
        flag=names.flag,
        value=said,
        hint=f"{did_you_mean(said, names.parts)} `strategist catalog {names.table}` lists them.",
    )


def possible(name: str, names: Names) -> tuple[str, ...]:
    """The canonical names that `name` may stand for: one where it is known, several where it is not clear, none where it is unknown."""
    folded = fold(name)
    for known in (names.exact, names.short):
        if folded in known:
            return (known[folded],)
    return tuple(
        _choices(folded, names, whole=True) or _choices(folded, names, whole=False) or _in_another_order(name, names)
    )


def _in_another_order(name: str, names: Names) -> list[str]:
    """What whole words of `name` stand for in some other order: an 80GB H100 SXM is an h100-sxm-80gb."""
    said = words(name)
    if len(said) > MOST_WORDS:
        return []
    orders = sorted({"".join(order) for order in permutations(said)})
    known = [names.exact[one] for one in orders if one in names.exact]
    return list(dict.fromkeys(known or (found for one in orders for found in _choices(one, names, whole=True))))


def _assumed(said: str, canonical: str, names: Names) -> str:
    return f"{names.noun} {shown(said)} was taken as {canonical}"


def _choices(folded: str, names: Names, *, whole: bool) -> list[str]:
    return [name for name, spellings in names.parts.items() if any(_fits(folded, p, whole) for p in spellings)]


def _fits(folded: str, parts: Sequence[str], whole: bool) -> bool:
    """True when `folded` is made of beginnings of `parts` in order, the first part included.

    With `whole`, parts must be used completely: `a100-80gb` then fits a100-sxm-80gb and `a100-80` does not. Without it
    a number is still not cut: `g2-standard-4` is not g2-standard-48.
    """
    return bool(folded) and bool(parts) and any(_rest_fits(folded[n:], parts[1:], whole) for n in _taken(folded, parts[0], whole))  # fmt: skip


def _rest_fits(folded: str, parts: Sequence[str], whole: bool) -> bool:
    if not folded:
        return True
    return any(
        _rest_fits(folded[n:], parts[i + 1 :], whole)
        for i, part in enumerate(parts)
        for n in _taken(folded, part, whole)
    )


def _taken(folded: str, part: str, whole: bool) -> Iterator[int]:
    """How many characters of `folded` may come from `part`, most first."""
    lengths: Iterable[int] = (len(part),) if whole else range(len(part), 0, -1)
    return (n for n in lengths if len(folded) >= n and folded.startswith(part[:n]) and _may_end(part, n))


def _may_end(part: str, n: int) -> bool:
    """True where the beginning of a part may stand for it: not within a number, nor before letters that make another product of it."""
    rest = part[n:]
    return not (part[n - 1].isdigit() and (rest[:1].isdigit() or rest in OTHER_PRODUCTS))
