"""A cluster and everything about it that nobody said: the plan prints both."""

from __future__ import annotations

from strategist.facts.hardware import Basis, Cluster
from strategist.records import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """Something the user did not say. `flag` is how to say it."""

    what: str
    value: str
    flag: str
    basis: Basis = "assumed"
    source: str = ""


def said_to_plan(one: Assumption, *flags: str) -> Assumption:
    """An assumption of a command that has not these flags, beside those that begin with them: `plan` can be told."""
    return replace(one, flag=f"plan {one.flag}") if one.flag.split()[0] in flags else one


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The machines of a request, what was assumed about them, and notes on what could not be looked at."""

    cluster: Cluster
    assumptions: tuple[Assumption, ...] = ()
    notes: tuple[str, ...] = ()
