"""Which releases of a framework know a key of its files, where not all do that were looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from strategist.catalog import rows
from strategist.records import dataclass

OVER = {"trl": "transformers", "llama-factory": "transformers"}
"""Frameworks whose files have another one's keys beside their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRange:
    """Minor releases of a framework that know a key: from `first` to `last`; None for all before or behind that were looked at.
    `instead` is what to write since."""

    framework: str
    key: str
    first: str | None = None
    last: str | None = None
    instead: str = ""


@cache
def key_ranges(framework: str, section: str = "") -> Mapping[str, KeyRange]:
    """The keys of a section that not all releases know, by name; those of a framework underneath too."""
    names = [framework, *([OVER[framework]] if framework in OVER else [])]
    found = [row for row in rows("key_ranges") if row["framework"] in names and row["section"] == section]
    fields = ("framework", "key", "first", "last", "instead")
    return {row["key"]: KeyRange(**{name: row[name] for name in fields if name in row}) for row in reversed(found)}


def first_release(framework: str, section: str, keys: Iterable[str]) -> KeyRange | None:
    """The youngest of some keys, where one is younger than the releases that were looked at."""
    known = key_ranges(framework, section)
    young = [known[key] for key in keys if key in known and known[key].first is not None]
    return max(young, key=lambda key: number(str(key.first)), default=None)


def number(release: str) -> tuple[int, ...]:
    """A release, to be compared."""
    return tuple(int(part) for part in release.split("."))
