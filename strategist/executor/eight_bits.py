"""AdamW whose moments are kept in eight bits, block by block (Dettmers et al. 2022, arXiv 2110.02861).

A moment is a byte per element, the place of its value in a table of 256, and one float32 number per block of 256 elements,
the block's largest absolute value. A block begins at the beginning of a weight's local part and knows no other rank, so
nothing is sent. The update itself is computed in float32 from decoded moments, a piece of a weight at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategist.catalog import rows
from strategist.executor.dynamic_values import dynamic_table
from strategist.executor.initialise import local_part
from strategist.records import dataclass

BLOCK = 256
"""Elements that share a scale: the block of bitsandbytes' 8-bit AdamW, which the formulas' 2 + 8 / 256 bytes count."""
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""The moments by torch's names, and whether they have a sign."""
SMALLEST = torch.finfo(torch.float32).tiny


def piece_elements() -> int:
    """Elements that are decoded at once, a multiple of BLOCK (catalogue: overheads)."""
    return int(next(row["value"] for row in rows("overheads") if row["name"] == "eight_bit_piece_elements"))


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Values in ascending order, and the borders between the numbers that are nearest to each."""

    values: Tensor
    borders: Tensor

    def decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Codes (blocks, elements) and one scale per block as float32 numbers."""
        found = self.values.index_select(0, codes.flatten().int()).view(codes.shape)
        return found.mul_(scales[:, None])

    def encode(self, numbers: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Write the nearest codes of `numbers` (blocks, elements), and the scale of each block."""
        torch.linalg.vector_norm(numbers, float("inf"), dim=1, out=scales)
        shares = numbers / scales.clamp(min=SMALLEST)[:, None]  # a block of zeros has no largest value to divide by
        codes.copy_(torch.bucketize(shares, self.borders, out_int32=True))


def table_on(device: torch.device, *, signed: bool) -> Table:
    """The table in a device's memory."""
    values = torch.tensor(dynamic_table(signed=signed), dtype=torch.float32, device=device)
    return Table(values, (values[1:] + values[:-1]) / 2)


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """Some blocks of a moment: codes (blocks, elements), and a scale per block."""

    table: Table
    codes: Tensor
    scales: Tensor

    def read(self) -> Tensor:
        """Its float32 numbers."""
        return self.table.decoded(self.codes, self.scales)

    def write(self, numbers: Tensor) -> None:
        """Keep what eight bits keep of `numbers`."""
        self.table.encode(numbers, self.codes, self.scales)


class AdamW8bit(Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) on float32 weights, its moments kept in eight bits."""

    def __init__(
        self, groups: Any, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})
        self._tables: dict[tuple[torch.device, bool], Table] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every weight that has a gradient."""
        most = piece_elements()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, most)

    def _update(self, parameter: nn.Parameter, its_gradient: Tensor, group: dict[str, Any], most: int) -> None:
        weight, gradient = (local_part(tensor).view(-1) for tensor in (parameter, its_gradient))
        state = self.state[parameter] or self._begin(parameter, weight)
        state["step"] += 1
        for elements, blocks in _cuts(len(weight), most):
            shape = (blocks.stop - blocks.start, -1)
            moments = [
                Moment(
                    self._table(weight.device, signed),
                    state[name][elements].view(shape),
                    state[f"{name}_scale"][blocks],
                )
                for name, signed in MOMENTS.items()
            ]
            _update_piece(weight[elements].view(shape), gradient[elements].view(shape), moments, group, state["step"])

    def _table(self, device: torch.device, signed: bool) -> Table:
        if (device, signed) not in self._tables:
            self._tables[device, signed] = table_on(device, signed=signed)
        return self._tables[device, signed]

    def _begin(self, parameter: nn.Parameter, weight: Tensor) -> dict[str, Any]:
        """Moments of zero."""
        state: dict[str, Any] = self.state[parameter]
        state["step"] = 0
        blocks = -(-len(weight) // BLOCK)
        for name, signed in MOMENTS.items():
            state[name] = torch.full_like(weight, dynamic_table(signed=signed).index(0.0), dtype=torch.uint8)
            state[f"{name}_scale"] = weight.new_zeros(blocks, dtype=torch.float32)
        return state


def _cuts(length: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Elements of a weight, and their blocks, in pieces of at most `most` elements; a last block that is not full is a piece
    of its own."""
    full = length - length % BLOCK
    for first in range(0, full, most):
        last = min(first + most, full)
        yield slice(first, last), slice(first // BLOCK, last // BLOCK)
    if full < length:
        yield slice(full, length), slice(full // BLOCK, full // BLOCK + 1)


def _update_piece(weight: Tensor, gradient: Tensor, moments: list[Moment], group: dict[str, Any], step: int) -> None:
    """AdamW on some blocks (blocks, elements). The update sees the new moments as they are computed, before they are kept."""
    first, second = moments
    rate, rate_of_squares = group["betas"]
    mean = first.read().lerp_(gradient, 1.0 - rate)
    first.write(mean)
    square = second.read().mul_(rate_of_squares).addcmul_(gradient, gradient, value=1.0 - rate_of_squares)
    second.write(square)
    root = square.sqrt_().div_(sqrt(1.0 - rate_of_squares**step)).add_(group["eps"])
    weight.mul_(1.0 - group["lr"] * group["weight_decay"])
    weight.addcdiv_(mean, root, value=-group["lr"] / (1.0 - rate**step))
