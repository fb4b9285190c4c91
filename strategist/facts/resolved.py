"""A cluster and everything about it that nobody said: the plan prints both."""

from __future__ import annotations

from strategist.facts.hardware import Basis, Cluster
from strategist.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """Something the user did not say. `flag` is how to say it."""

    what: str
    value: str
    flag: str
    basis: Basis = "assumed"
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The machines of a request, what was assumed about them, and notes on what could not be looked at."""

    cluster: Cluster
    assumptions: tuple[Assumption, ...] = ()
    notes: tuple[str, ...] = ()
