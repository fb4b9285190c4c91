"""Seconds that compressing gradients costs a device."""

from __future__ import annotations

from strategist.facts.compression import compressor, low_rank
from strategist.facts.job import Job
from strategist.facts.parameters import count
from strategist.timing.rates import matmul_rates, memory_Bps

QR_FLOP = 4
"""FLOP per element of a tall factor and per column that is made orthogonal by Householder's QR, the factor written out (Golub and
Van Loan, Matrix Computations, section 5.2)."""
PRODUCTS = 3
"""Gradient times right factor, its transpose times the left one, and left times right."""


def compression_seconds(job: Job, word: str) -> tuple[float, float]:
    """(elementwise, products) seconds of one step: kernels that the device's memory bounds, and PowerSGD's products in float32,
    bounded by memory or by their FLOP. A gradient is compressed once, when the last micro-batch has added to it."""
    row, gpu = compressor(word), job.cluster.slowest.gpu
    elementwise = row.cost_bytes * count(job.model).total / memory_Bps(gpu)
    if not row.rank:
        return elementwise, 0.0
    split = low_rank(job.model, row.rank)
    factors = split.left + split.right
    FLOP = row.rank * (2.0 * PRODUCTS * split.compressed + QR_FLOP * factors)
    moved = row.products * split.compressed
    return elementwise, max(moved / memory_Bps(gpu), FLOP / float(matmul_rates(gpu, "fp32").rate.max()))
