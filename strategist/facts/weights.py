"""The two sorts of weights a layer has: matrices that multiply, and small vectors.

A `Matrix` says how tensor parallelism cuts it: "column" cuts the outputs, "row" cuts the inputs, "whole" keeps a copy on
every rank. Cuts follow Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Literal

from strategist.records import dataclass

Cut = Literal["column", "row", "whole"]

ADAPTER_ENDS = ("+a", "+b")
"""Behind the name of a matrix, in the names of the two factors of its adapter."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear map of `inputs` to `outputs`. `copies` of it are stored and `used` of them see each token (experts). A convolution is
    one that is applied at so many `positions` of a sample, whose input has `read` elements (0: each position has its own). With `of_targets` it is a decoder's behind an encoder and sees the tokens of
    its sequence."""

    name: str
    inputs: int
    outputs: int
    cut: Cut
    bias: bool = False
    copies: int = 1
    used: int = 1
    positions: int = 1
    read: int = 0
    of_targets: bool = False

    @property
    def weights(self) -> int:
        """Elements of one copy, without the bias."""
        return self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        """Elements of all copies, biases included."""
        return self.copies * (self.weights + (self.outputs if self.bias else 0))

    @property
    def is_expert(self) -> bool:
        """True for routed experts, which expert parallelism spreads."""
        return self.name.startswith("expert")

    @property
    def is_adapter(self) -> bool:
        """True for the two factors of an adapter beside a matrix."""
        return self.name.endswith(ADAPTER_ENDS)


@dataclass(frozen=True, slots=True)
class Vector:
    """A small weight such as a norm, a sink or a convolution; `cut` is true when tensor parallelism splits it."""

    name: str
    size: int
    cut: bool = False


Weights = tuple[tuple[Matrix, ...], tuple[Vector, ...]]
"""The matrices and vectors of one part of a layer."""
