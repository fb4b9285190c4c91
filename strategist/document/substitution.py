"""What stood for something else in a traced or rehearsed program."""

from __future__ import annotations

from strategist.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitution:
    """Something that was not run as it is, because fake tensors or the CPU cannot: what stood for it."""

    name: str
    sentence: str
    source: str
