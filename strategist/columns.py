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
