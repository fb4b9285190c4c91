"""Tables of embeddings: what a parameter server can hold of a model, and how much of them a batch names.

A server gives rows and takes their gradients, so a table that an output head shares cannot lie there (executor/parameter_server.py).
"""

from __future__ import annotations

from functools import cache

from strategist.facts.model import ModelShape
from strategist.facts.parameters import outer_parameters, table_width
from strategist.records import dataclass

ID_BYTES = 8
"""Of the number of a row, such as a token or a label (int64)."""


@cache
def served_tables(shape: ModelShape) -> tuple[tuple[int, int], ...]:
    """(rows, width) of every table that a server can hold: those of a module that nobody described, as they were read, or the token
    table of a decoder whose head has a weight of its own."""
    if shape.kind == "module":
        return shape.tables
    is_one = shape.formula == "stack" and shape.vocab > 0 and not shape.tied
    return ((shape.vocab, table_width(shape)),) if is_one else ()


@dataclass(frozen=True, slots=True)
class Served:
    """Elements that leave the replicas: of the token table in front of the layers, and of what no field of the shape explains."""

    before: int
    extra: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.before + self.extra


@cache
def served_elements(shape: ModelShape) -> Served:
    """Elements of the tables that a server can hold, by where the shape counts them."""
    total = sum(rows * width for rows, width in served_tables(shape))
    before = min(total, outer_parameters(shape).embedding)
    return Served(before, total - before)


@dataclass(frozen=True, slots=True)
class Named:
    """What some ids name at most, every one of them another row of each table: ids, rows, elements of these rows."""

    ids: int
    rows: int
    elements: int


@cache
def named_at_most(shape: ModelShape, ids: int) -> Named:
    """What a micro-batch of `ids` tokens pulls at most."""
    tables = served_tables(shape)
    rows = [min(ids, held) for held, _ in tables]
    widths = [width for _, width in tables]
    return Named(ids * len(tables), sum(rows), sum(n * width for n, width in zip(rows, widths, strict=True)))
