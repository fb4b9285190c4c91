"""The types of columns: one entry per candidate, per group of ranks, per anything that there are many of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.int64]
    Reals = NDArray[np.floating[Any]]
    Mask = NDArray[np.bool_]
else:  # numpy.typing takes 5 ms to load, and nothing evaluates these names
    Column = Reals = Mask = np.ndarray


def on_stages(values: Any, stages: Any) -> Any:
    """Values of candidates, (C,), times values of stages, (S,): (C, S), one stage behind the other in memory. What is worked out
    from such arrays lies like them, and numpy's loops run along the many candidates, not along the few stages."""
    return np.multiply.outer(stages, values).T


def stage_by_stage(values: Any) -> Any:
    """An array (..., C, S) laid out in the same way."""
    return np.ascontiguousarray(np.swapaxes(values, -1, -2)).swapaxes(-1, -2)


def entries(values: Any, at: tuple[Any, ...]) -> Any:
    """Entries of an array by their places along the axes of a larger one that it would be broadcast to."""
    own = at[len(at) - values.ndim :]
    return np.asarray(values[tuple(0 if size == 1 else place for size, place in zip(values.shape, own, strict=True))])
