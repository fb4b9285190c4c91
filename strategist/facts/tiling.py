"""Into how many slices memory-centric tiling cuts a matrix (Rajbhandari et al. 2021, arXiv 2104.07857, section 5.1.3).

A slice is some rows of the weight, which are some of the layer's outputs: each output is the same scalar product as before.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def slices_of(outputs: Any, inputs: Any, largest: Any, tiling: Any) -> Any:
    """Slices of matrices of `outputs` x `inputs` weights, so that none but for rounding holds more than a `tiling`-th of the
    `largest` matrix of its layer; at most one per output. Whole numbers, or arrays of them that broadcast."""
    return np.clip(-(-tiling * outputs * inputs // largest), 1, outputs)


def rows_of(outputs: int, slices: int) -> list[int]:
    """Outputs of each slice, as equal as possible, the larger ones first."""
    each, rest = divmod(outputs, slices)
    return [each + 1] * rest + [each] * (slices - rest)
