"""What stands between the convolutions of a block: elements that memory-bound kernels move, and how many kernels there are."""

from __future__ import annotations

from strategist.facts.convolutions import Block

NORM, RELU, SUM, POOL = 3.0, 2.0, 3.0, 9.0
"""Elements read and written per element of the result: a batch norm reads its input for the statistics and again to normalise it, and
writes (pytorch: aten/src/ATen/native/cuda/Normalization.cuh, batch_norm_stats and batch_norm_elemt); a ReLU reads and writes; a sum
reads two; pooling reads the four pixels that it makes one of, and writes that and its place of eight bytes, as four elements of two
(aten/src/ATen/native/cuda/DilatedMaxPool2d.cu)."""
FORWARD, BACKWARD = 3, 5
"""Kernels of a convolution with its norm. Forward: the product, the norm, the count of batches; backward: the norm, the gradients of
the product's input and weight, the weight's in its own format, and its sum."""


def moved(block: Block) -> float:
    """Elements that norms, ReLUs, the sum and pooling read and write in forward for one image."""
    normed = sum(convolution.made for convolution in block.convolutions)
    activated = sum(convolution.made for convolution in block.activated) + block.result
    return NORM * normed + RELU * activated + SUM * block.result + POOL * block.pooled


def launched(block: Block) -> tuple[int, int]:
    """Kernels of forward and of backward."""
    between = len(block.activated) + len(("sum", "relu")) + len(block.stem)
    return FORWARD * len(block.convolutions) + between, BACKWARD * len(block.convolutions) + between
