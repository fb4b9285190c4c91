"""Activations that a library's modules write as several operations of torch: what these keep and move. One data row each."""

from __future__ import annotations

from functools import cache

from strategist.catalog import rows
from strategist.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ActForm:
    """One way to write an activation, per number between the matrices and beyond what a GELU of one kernel does: `kept_bytes` lie there from forward to
    backward, `moved` elements in the format of the products are read and written, a third of what both passes are (the other two are backward's).
    `numbers` are the formats for which that holds (`profile.numbers_of`)."""

    library: str
    name: str
    numbers: str
    kept_bytes: float
    moved: float
    source: str


@cache
def find_act_form(library: str, name: str, numbers: str) -> ActForm | None:
    """The row of an activation as a library calls it; None where it is one kernel, and where a framework has kernels of its own (no library)."""
    asked = (library, name, numbers)
    found = (row for row in rows("act_forms") if (row["library"], row["name"], row["numbers"]) == asked)
    return next((ActForm(**row) for row in found), None)
