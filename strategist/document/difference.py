"""What differs between two documents, place by place. Nothing is ignored: without a difference their JSON is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from strategist.records import dataclass

Kind = Literal["changed", "added", "removed", "reordered"]

NAMES = ("name", "what", "rule", "family", "stage", "index", "code")
"""Fields that name an entry of a list. Entries with names are held against their namesakes, others against their neighbours
in number, so that one more term does not make every later one look different."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One place that differs. `path` is `$.time.terms[tp].exposed_ns`; `old` is None for what was added and `new` for what
    was removed; of a list in another order both are the names of its entries."""

    path: str
    kind: Kind
    old: Any
    new: Any


def differences(old: Any, new: Any, path: str = "$") -> Iterator[Difference]:
    """Every place where two JSON values differ, in the order of the old one."""
    if isinstance(old, dict) and isinstance(new, dict):
        yield from _of_entries(old, new, f"{path}.{{}}")
    elif isinstance(old, list) and isinstance(new, list):
        yield from _of_lists(old, new, path)
    elif json.dumps(old) != json.dumps(new):  # true is not 1
        yield Difference(path, "changed", old, new)


def _of_entries(old: Mapping[Any, Any], new: Mapping[Any, Any], place: str) -> Iterator[Difference]:
    """Differences of what has a key on both sides, and whatever has one on one side only."""
    for key, value in old.items():
        if key in new:
            yield from differences(value, new[key], place.format(key))
        else:
            yield Difference(place.format(key), "removed", value, None)
    for key, value in new.items():
        if key not in old:
            yield Difference(place.format(key), "added", None, value)


def _of_lists(old: Sequence[Any], new: Sequence[Any], path: str) -> Iterator[Difference]:
    naming = _naming(old, new)
    if naming is None:
        yield from _of_entries(dict(enumerate(old)), dict(enumerate(new)), f"{path}[{{}}]")
        return
    left, right = ({item[naming]: item for item in items} for items in (old, new))
    yield from _of_entries(left, right, f"{path}[{{}}]")
    orders = [[key for key in side if key in left and key in right] for side in (left, right)]
    if orders[0] != orders[1]:
        yield Difference(path, "reordered", orders[0], orders[1])


def _naming(old: Sequence[Any], new: Sequence[Any]) -> str | None:
    """The field that names every entry of both lists, each name once in its list; None where there is none."""
    if not (old or new):
        return None
    if not all(isinstance(item, dict) for item in (*old, *new)):
        return None
    return next((name for name in NAMES if _is_naming(name, old) and _is_naming(name, new)), None)


def _is_naming(name: str, items: Sequence[Mapping[str, Any]]) -> bool:
    values = [item.get(name) for item in items]
    plain = all(isinstance(value, (str, int)) and not isinstance(value, bool) for value in values)
    return plain and len({str(value) for value in values}) == len(items)
