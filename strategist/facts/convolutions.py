"""Convolutional networks as a row of blocks: those of ResNets, of two or three convolutions, and what a sample is in each of them.

A sample is one image, and counts as a sequence of one token: what a layer works on is a number of elements per image, as it is
per token elsewhere. Source: He et al. 2015, arXiv 1512.03385, table 1 and section 4.1 (bottlenecks); Goyal et al. 2017, arXiv
1706.02677, section 5.1 (the stride lies in the 3 x 3 convolution, as in torchvision and transformers).
"""

from __future__ import annotations

from functools import cache

from strategist.facts.weights import Matrix, Vector, Weights
from strategist.records import dataclass

STAGES, STEM, WIDER = 4, 64, 4
"""Stages of a ResNet, channels behind its first convolution, and how much wider a bottleneck's result is than its inside."""
COLOURS = 3
MAX_SIDE = 2**16
"""Pixels along a side that no image exceeds."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """A square convolution without a bias, and the batch norm behind it; `side` is that of its input in pixels."""

    name: str
    kernel: int
    stride: int
    inputs: int
    outputs: int
    side: int

    @property
    def positions(self) -> int:
        """Pixels of its output; the edges are padded so that a stride alone makes it smaller."""
        return (-(-self.side // self.stride)) ** 2

    @property
    def read(self) -> int:
        """Elements of its input for one image."""
        return self.inputs * self.side**2

    @property
    def made(self) -> int:
        """Elements of its output for one image."""
        return self.outputs * self.positions

    @property
    def matrix(self) -> Matrix:
        """The map that is applied at every position: every pixel under the kernel is an input."""
        inputs = self.inputs * self.kernel**2
        return Matrix(self.name, inputs, self.outputs, "whole", positions=self.positions, read=self.read)


@dataclass(frozen=True, slots=True)
class Block:
    """Convolutions with what stands between them: the last of `chain` is added to the block's input, or to what `shortcut` makes of it,
    and goes through a ReLU. `stem`: the convolution in front of the first block, behind which pixels are pooled."""

    chain: tuple[Convolution, ...]
    shortcut: tuple[Convolution, ...] = ()
    stem: tuple[Convolution, ...] = ()

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """All of them, in the order of forward."""
        return (*self.stem, *self.chain, *self.shortcut)

    @property
    def result(self) -> int:
        """Elements that the block hands on for one image."""
        return self.chain[-1].made

    @property
    def activated(self) -> tuple[Convolution, ...]:
        """Those behind whose norm a ReLU stands on its own; that of the last one comes behind the sum."""
        return (*self.stem, *self.chain[:-1])

    @property
    def pooled(self) -> int:
        """Elements that pooling gives to the first block for one image: of each place of two by two pixels one."""
        return self.chain[0].read if self.stem else 0


Extra = tuple[tuple[str, int], ...]
"""What a shape says of its family alone (`ModelShape.extra`): here `depths_0` to `depths_3`, `image`, pixels of a side, and `basic` where
blocks have two convolutions of three by three pixels in place of a bottleneck."""


@cache
def blocks(sizes: Extra) -> tuple[Block, ...]:
    """The blocks of a ResNet in order; the first convolution goes with the first of them."""
    extra = dict(sizes)
    stem = Convolution("stem", 7, 2, COLOURS, STEM, extra["image"])
    side, channels = -(-extra["image"] // 4), STEM
    chain_of = _pair if extra.get("basic") else _bottleneck
    found: list[Block] = []
    for stage in range(STAGES):
        for number in range(extra[f"depths_{stage}"]):
            stride = 2 if stage and not number else 1
            chain = chain_of(channels, STEM * 2**stage, side, stride)
            wide = chain[-1].outputs
            is_plain = channels == wide and stride == 1
            shortcut = () if is_plain else (Convolution("shortcut", 1, stride, channels, wide, side),)
            found.append(Block(chain, shortcut, () if found else (stem,)))
            side, channels = -(-side // stride), wide
    return tuple(found)


def _bottleneck(channels: int, inside: int, side: int, stride: int) -> tuple[Convolution, ...]:
    return (
        Convolution("reduce", 1, 1, channels, inside, side),
        Convolution("middle", 3, stride, inside, inside, side),
        Convolution("expand", 1, 1, inside, WIDER * inside, -(-side // stride)),
    )


def _pair(channels: int, width: int, side: int, stride: int) -> tuple[Convolution, ...]:
    after = -(-side // stride)
    return Convolution("first", 3, stride, channels, width, side), Convolution("second", 3, 1, width, width, after)


@cache
def numbers(sizes: Extra) -> tuple[int, ...]:
    """For each block the place of the first one that is equal to it."""
    every = blocks(sizes)
    return tuple(every.index(block) for block in every)


def block_weights(block: Block) -> Weights:
    """A block's matrices, and the two weights per channel of every batch norm."""
    norms = sum(2 * convolution.outputs for convolution in block.convolutions)
    return tuple(convolution.matrix for convolution in block.convolutions), (Vector("batch_norms", norms),)


def numbers_behind(sizes: Extra, number: int) -> tuple[int, ...]:
    """Of the blocks behind the last one that equals the given one: backward is through with them when it begins that one."""
    every = numbers(sizes)
    return every[len(every) - every[::-1].index(number) :]
