"""Frozen matrices in four bits (QLoRA: Dettmers et al. 2023, arXiv 2305.14314, section 3), with the kernels of bitsandbytes.

A matrix is one run of bytes: the scales of its scales and what was taken off these before (float32), its scales (a byte per
block of 64 weights), its codes (two in a byte). Bytes have no number format, so nothing that casts a model touches them, and
DDP, fully_shard and checkpoints treat them as any frozen parameter. Each product brings the matrix back, in forward and again
in backward, and keeps neither it nor its input.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from strategist.executor.dynamic_values import dynamic_table
from strategist.executor.support import require_packages
from strategist.facts.adapters import BLOCK, SUPER_BLOCK
from strategist.records import dataclass

BITS = ".packed.bits"
"""Ends the name of such bytes, behind that of their linear layer."""
BITS_OF_ONE = re.compile(r"\.\d+\.bits$")
"""Ends the name of those of one expert, behind that of the stack of all experts' matrices."""
FLOAT32 = 4
"""Bytes of a float32 number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the bytes of a matrix of `rows` x `columns` weights lie."""

    super_scales: slice
    offset: slice
    scales: slice
    codes: slice

    @property
    def total(self) -> int:
        """Bytes of all."""
        return int(self.codes.stop)


def places(rows: int, columns: int) -> Places:
    """What begins with float32 numbers comes first: they must lie at multiples of four."""
    blocks = -(-rows * columns // BLOCK)
    super_blocks = -(-blocks // SUPER_BLOCK)
    sizes = (FLOAT32 * super_blocks, FLOAT32, blocks, -(-rows * columns // 2))
    first, second, third, last = (slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True))
    return Places(super_scales=first, offset=second, scales=third, codes=last)


class Levels:
    """The 256 values of a scale's byte, those of dynamic quantisation with a sign, on each device once for all matrices of a model.

    bitsandbytes has the same (create_dynamic_map), but reads numbers out of tensors to make them, which a trace cannot.
    """

    def __init__(self) -> None:
        self._on: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The values in a device's memory."""
        if device not in self._on:
            self._on[device] = torch.tensor(dynamic_table(signed=True), dtype=torch.float32, device=device)
        return self._on[device]


class Packed(nn.Module):
    """A frozen matrix (`rows`, `columns`) in four bits, which multiplies transposed, as a linear layer's does, or as it `lies`."""

    def __init__(self, rows: int, columns: int, levels: Levels, *, lies: bool = False) -> None:
        super().__init__()
        self.size, self.levels, self.places = torch.Size((rows, columns)), levels, places(rows, columns)
        self.lies = lies
        self.bits = nn.Parameter(torch.empty(self.places.total, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., columns) to (..., rows), or where the matrix lies (..., rows) to (..., columns), in the format of x."""
        return _Product.apply(x, bias, self)  # type: ignore[no-any-return, no-untyped-call]

    def factor(self, dtype: torch.dtype) -> Tensor:
        """The weights as a linear layer has them, (outputs, inputs)."""
        return self.matrix(dtype).t() if self.lies else self.matrix(dtype)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The weights that the bytes stand for, (rows, columns).

        They are asked for as one row: bitsandbytes 0.50.2 on CPUs takes the wrong scales where a block goes on in the next row.
        """
        functional, bits, at = _functional(), self.bits, self.places
        scales = functional.QuantState(
            absmax=bits[at.super_scales].view(torch.float32),
            code=self.levels.on(bits.device),
            blocksize=SUPER_BLOCK,
            dtype=torch.float32,
        )
        state = functional.QuantState(
            absmax=bits[at.scales],
            shape=torch.Size((self.size.numel(),)),
            dtype=dtype,
            blocksize=BLOCK,
            quant_type="nf4",
            offset=bits[at.offset].view(torch.float32),
            state2=scales,
        )
        weights: Tensor = functional.dequantize_4bit(bits[at.codes].view(-1, 1), state)
        return weights.view(self.size)

    @torch.no_grad()
    def bytes_of(self, matrix: Tensor) -> Tensor:
        """What a matrix (rows, columns) is in four bits, as `bits` keep it, (bytes,).

        Quantised from float32, so that one that came in another format has the same codes wherever it was cast.
        """
        functional = _functional()
        codes, state = functional.quantize_4bit(matrix.float(), blocksize=BLOCK, quant_type="nf4")
        offset = state.absmax.mean()
        scales, inner = functional.quantize_blockwise(
            state.absmax - offset, code=self.levels.on(matrix.device), blocksize=SUPER_BLOCK
        )
        numbers = torch.cat([inner.absmax, offset.view(1)])
        return torch.cat([numbers.view(torch.uint8), scales, codes.flatten()])


class PackedStack(nn.Module):
    """One matrix of every expert (F, H) in four bits. No list of modules, which would look like a model's blocks."""

    def __init__(self, size: torch.Size, levels: Levels, *, lie: bool) -> None:
        super().__init__()
        width, count, hidden = size
        for number in range(count):
            self.add_module(str(number), Packed(width, hidden, levels, lies=lie))

    def each(self) -> list[Packed]:
        """Every expert's."""
        return [one for one in self.children() if isinstance(one, Packed)]


class _Product(torch.autograd.Function):
    """What a linear layer of these weights makes of x. Nothing is kept but the bytes, which stay where they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, packed: Packed) -> Tensor:
        ctx.packed = packed
        return nn.functional.linear(x, packed.factor(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return gradient @ ctx.packed.factor(gradient.dtype), None, None


def _functional() -> Any:
    """bitsandbytes' functions. Raises InputError MISSING where it is not installed."""
    require_packages("A weight of four bits", "qlora")
    from bitsandbytes import functional  # seconds of start-up, which no other plan should pay

    return functional
