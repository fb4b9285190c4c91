"""The types of columns: one entry per candidate, per group of ranks, per anything that there are many of."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from strategist.records import names_of

Formula = TypeVar("Formula", bound=Callable[..., Any])

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.int64]
    Reals = NDArray[np.floating[Any]]
    Mask = NDArray[np.bool_]
else:  # numpy.typing takes 5 ms to load, and nothing evaluates these names
    Column = Reals = Mask = np.ndarray


def remembered(formula: Formula) -> Formula:
    """A formula whose last argument is a table of candidates, which keeps in its `known` what was worked out of it: a dozen formulas
    ask a table for its tokens. The other arguments are hashable; nobody writes into a result."""

    @wraps(formula)
    def asked(*arguments: Any, **words: Any) -> Any:
        known, key = arguments[-1].known, (formula, arguments[:-1], *words.items())
        if key not in known:
            known[key] = formula(*arguments, **words)
        return known[key]

    return asked  # type: ignore[return-value]


def clamped(values: Any, least: Any, most: Any) -> Any:
    """Values that are not below the least nor above the most: numpy's `clip` takes thrice as long to begin."""
    return np.minimum(np.maximum(values, least), most)


def on_stages(values: Any, stages: Any) -> Any:
    """Values of candidates, (C,), times values of stages, (S,): (C, S), one stage behind the other in memory. What is worked out
    from such arrays lies like them, and numpy's loops run along the many candidates, not along the few stages."""
    return np.multiply.outer(stages, values).T


def stage_by_stage(values: Any) -> Any:
    """An array (..., C, S) laid out in the same way."""
    return np.ascontiguousarray(np.swapaxes(values, -1, -2)).swapaxes(-1, -2)


def entries(values: Any, at: tuple[Any, ...]) -> Any:
    """Entries of an array by their places along the axes of a larger one that it would be broadcast to. Counted one behind the other, as
    they lie in memory, they are taken in a third of the time."""
    own = at[len(at) - values.ndim :]
    if not values.flags.c_contiguous and values.ndim > 1:
        values, own = values.swapaxes(-1, -2), (*own[:-2], *own[:-3:-1])
    axes = [(place, size) for place, size in zip(own, values.shape, strict=True) if size > 1]
    if not axes:
        return np.asarray(values[(0,) * values.ndim])
    return values.ravel().take(reduce(lambda number, axis: number * axis[1] + axis[0], axes[1:], axes[0][0]))


def on_stages_of(values: Any, rows: Column, stages: Column) -> Any:
    """Entries of an array (..., C, S), where either axis may be one entry for all, on a stage of each of some candidates, (..., N)."""
    count, stage_count = values.shape[-2:]
    at = np.zeros(1, np.int64)
    if stage_count > 1:
        at = stages * count
    if count > 1:
        at = at + rows
    return values.swapaxes(-1, -2).reshape(*values.shape[:-2], -1).take(at, axis=-1)


def rows_of(values: Any, rows: Column) -> Any:
    """Some rows of an array (C,) or (..., C, S), or the array where it is alike for all of them; of each of several arrays."""
    if isinstance(values, tuple):
        return tuple(rows_of(each, rows) for each in values)
    if isinstance(values, float):
        return values
    if values.ndim == 0 or values.shape[-2:][0] == 1:
        return values
    if values.ndim == 1:
        return values.take(rows)
    return values.swapaxes(-1, -2).take(rows, axis=-1, mode="wrap").swapaxes(-1, -2)  # the quickest: all rows are there


def record_of(record: Any, rows: Column) -> Any:
    """Some rows of every array of a record; what is one array under two names stays one."""
    every = {id(values): values for values in (getattr(record, name) for name in names_of(type(record)))}
    own = {number: rows_of(values, rows) for number, values in every.items()}
    return type(record)(**{name: own[id(getattr(record, name))] for name in names_of(type(record))})
