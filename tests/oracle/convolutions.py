"""ResNets walked pixel by pixel row: what every convolution reads and makes, what a block keeps, moves and launches (docs/time_model.md,
docs/memory_model.md, Convolutions)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

from strategist.facts.job import Job
from strategist.facts.model import LayerKind, ModelShape
from strategist.facts.profile import BYTES
from tests.oracle.rates import alignment, grid_of, memory_Bps, rate_at


@dataclass(frozen=True)
class Layer:
    """One convolution: k x k pixels of `before` channels become one pixel of `behind`; pictures are `wide` before and `then` behind it."""

    k: int
    before: int
    behind: int
    wide: int
    then: int
    in_front: bool = False
    has_relu: bool = True


def network(shape: ModelShape) -> list[list[Layer]]:
    """The convolutions of each block, in order; those in front of the first block are in it."""
    sizes = dict(shape.extra)
    half = (sizes["image"] + 6 - 7) // 2 + 1
    picture, channels = (half + 2 - 3) // 2 + 1, 64
    found: list[list[Layer]] = []
    for stage, width in enumerate((64, 128, 256, 512)):
        for number in range(sizes[f"depths_{stage}"]):
            halves = stage > 0 and number == 0
            small = (picture + 2 - 3) // 2 + 1 if halves else picture
            own = [
                Layer(1, channels, width, picture, picture),
                Layer(3, width, width, picture, small),
                Layer(1, width, 4 * width, small, small, has_relu=False),
            ]
            if "basic" in sizes:
                own = [Layer(3, channels, width, picture, small), Layer(3, width, width, small, small, has_relu=False)]
            behind = own[-1].behind
            if number == 0 and (behind, small) != (channels, picture):
                own.append(Layer(1, channels, behind, picture, small, has_relu=False))
            found.append(own if found else [Layer(7, 3, 64, sizes["image"], half, in_front=True), *own])
            picture, channels = small, behind
    return found


def of(shape: ModelShape, kind: LayerKind) -> list[Layer]:
    """The convolutions of a block of that kind."""
    return network(shape)[kind.block]


def result(own: list[Layer]) -> int:
    """Elements of a block's result for one image."""
    return own[-1].behind * own[-1].then ** 2


def product_seconds(job: Job, images: float, own: list[Layer]) -> float:
    """Forward products of a block."""
    gpu, total = job.cluster.slowest.gpu, 0.0
    grid, width = grid_of(gpu, job.workload.precision), BYTES[job.formats.compute]
    for each in own:
        pixels, depth = images * each.then**2, each.k**2 * each.before
        side = sqrt(pixels * each.behind)
        flops = 2 * pixels * depth * each.behind
        worked = flops / (rate_at(grid, side, side) * alignment(gpu, each.behind, depth))
        read = images * each.before * each.wide**2
        total += max(worked, width * (read + depth * each.behind + pixels * each.behind) / memory_Bps(gpu))
    return total


def moved_bytes(job: Job, images: float, own: list[Layer]) -> float:
    """What norms (3), ReLUs (2), the sum (3) and pooling (4 and 5) read and write."""
    every, out = [each.behind * each.then**2 for each in own], result(own)
    total = 3 * sum(every) + 2 * sum(n for n, each in zip(every, own, strict=True) if each.has_relu) + 5 * out
    total += 9 * sum(after.before * after.wide**2 for first, after in _pairs(own) if first.in_front)
    return total * images * BYTES[job.formats.compute]


def _pairs(own: list[Layer]) -> Iterator[tuple[Layer, Layer]]:
    return pairwise(own)


def launches(own: list[Layer]) -> tuple[int, int]:
    """Kernels of forward and backward: of each convolution three and five, and of what stands between."""
    relus = sum(each.has_relu for each in own) + 1
    pools = sum(each.in_front for each in own)
    return 3 * len(own) + relus + 1 + pools, 5 * len(own) + relus + 1 + pools


def are_through(shape: ModelShape, kind: LayerKind, mine: list[LayerKind]) -> list[LayerKind]:
    """Blocks behind the last of a kind."""
    last = max(place for place, each in enumerate(mine) if each == kind)
    return mine[last + 1 :]


def useful_FLOP(shape: ModelShape) -> int:
    """Of one image: six per weight of a convolution and pixel, and per weight of the classifier and norms."""
    products, once = 0, 0
    for own in network(shape):
        for each in own:
            products += each.k**2 * each.before * each.behind * each.then**2
            once += 2 * each.behind
    return 6 * (products + once + (shape.hidden + 1) * dict(shape.extra)["classes"])
