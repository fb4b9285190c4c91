"""What adapters beside frozen matrices cost in time (Hu et al. 2021, arXiv 2106.09685, section 4.1). (C,) each.

A frozen matrix multiplies once in backward, for the gradient of its input; an adapter's two factors multiply twice, as every
trained matrix does. A quantised matrix is brought back to the compute format before each product (Dettmers et al. 2023, arXiv
2305.14314, section 3, equation 5).
"""

from __future__ import annotations

from strategist.facts.adapters import QUANTISED_BYTES
from strategist.facts.hardware import Gpu
from strategist.facts.job import Job
from strategist.facts.layers import Layer
from strategist.facts.profile import BYTES
from strategist.space.candidates import Candidates, Reals
from strategist.space.shares import tokens
from strategist.timing.compute import is_narrow, product_sizes
from strategist.timing.rates import memory_Bps


def weight_products(job: Job, gpu: Gpu, layer: Layer, c: Candidates) -> Reals:
    """Seconds of the products that give the gradients of one layer's adapters."""
    times, m, n, k = product_sizes(job, layer, c)
    return (times * narrow_seconds(job, gpu, m, n, k) * is_narrow(layer)).sum(axis=1)


def narrow_seconds(job: Job, gpu: Gpu, m: Reals, n: Reals, k: Reals) -> Reals:
    """Seconds of products of which one side is the rank of an adapter: with some tens of FLOP per byte they are bound by what they
    read and write (Williams et al. 2009, Communications of the ACM 52(4))."""
    return BYTES[job.formats.compute] * (m * k + k * n + m * n) / memory_Bps(gpu)


def light_seconds(job: Job, gpu: Gpu, layer: Layer, c: Candidates) -> tuple[Reals, Reals]:
    """Seconds of what is bound by memory, forward and backward: a product that is added to the frozen one's result reads it, the
    two gradients of one input are read and their sum written; and quantised matrices are brought back in either pass."""
    number, rate = BYTES[job.formats.compute], memory_Bps(gpu)
    seconds = tokens(job, c) * number / rate
    outputs = sum(matrix.outputs for matrix in layer.matrices if matrix.name.endswith("+b"))
    inputs = sum(matrix.inputs for matrix in layer.matrices if matrix.name.endswith("+a"))
    forth, back = (moved / rate for moved in _unpacked_bytes(job, layer))
    return seconds * outputs + forth, 3.0 * seconds * inputs + back


_GPTQ_BYTES = 16.5
"""Bytes that AutoGPTQ moves to bring one weight of four bits back: a word of eight is shifted (0.5 read, 4 written), made 8 bits wide (5), masked (2),
less its zero (2) and times its scale (3, in 16 bits), an operation of torch each (AutoGPTQ/AutoGPTQ: auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py,
forward, of more rows than its own kernel takes). Backward reads what forward made."""


def _unpacked_bytes(job: Job, layer: Layer) -> tuple[float, float]:
    """Bytes that are read and written to bring all quantised matrices of a layer back to the compute format, forward and backward."""
    if job.model.method != "qlora":
        return 0.0, 0.0
    weights = sum(matrix.weights for matrix in layer.matrices if not matrix.is_adapter)
    if job.profile.kernels.unpacks == "gptq":
        return _GPTQ_BYTES * weights, 0.0
    once = (QUANTISED_BYTES + BYTES[job.formats.compute]) * weights
    return once, once
