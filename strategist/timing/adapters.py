"""What adapters beside frozen matrices cost in time (Hu et al. 2021, arXiv 2106.09685, section 4.1). (C,) each.

A frozen matrix multiplies once in backward, for the gradient of its input; an adapter's two factors multiply twice, as every
trained matrix does. A quantised matrix is brought back to the compute format before each product (Dettmers et al. 2023, arXiv
2305.14314, section 3, equation 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from strategist.facts.adapters import QUANTISED_BYTES, quantised_of
from strategist.facts.hardware import Gpu
from strategist.facts.job import Job
from strategist.facts.layers import Layer
from strategist.facts.profile import BYTES, Adapts
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
    """Seconds of what is bound by memory, forward and backward: what adapters move beside their products, and quantised matrices, which
    are brought back in either pass."""
    number, rate = BYTES[job.formats.compute], memory_Bps(gpu)
    seconds = tokens(job, c) * number / rate
    outputs = sum(matrix.outputs for matrix in layer.matrices if matrix.name.endswith("+b"))
    inputs = sum(matrix.inputs for matrix in layer.matrices if matrix.name.endswith("+a"))
    forth, back = (
        seconds * (each.input * inputs + each.output * outputs) + moved / rate
        for each, moved in zip(_BESIDE[_adapts(job)], _unpacked_bytes(job, layer), strict=True)
    )
    return forth, back


def _adapts(job: Job) -> Adapts:
    """How the framework adds an adapter's result. Inputs in float32 are none to widen, and those of quantised matrices are left as they are under autocast
    (huggingface/peft: src/peft/tuners/lora/bnb.py, gptq.py, requires_conversion)."""
    word = job.profile.kernels.adapts
    is_wide = job.model.method == "lora" and BYTES[job.formats.compute] < BYTES["float32"]
    return "apart" if word == "widened" and not is_wide else word


class _Beside(NamedTuple):
    """Elements that one pass reads and writes per number of an adapted matrix' input and result, beside the products."""

    input: float
    output: float


_BESIDE: Mapping[Adapts, tuple[_Beside, _Beside]] = {
    "joint": (_Beside(0.0, 1.0), _Beside(3.0, 0.0)),
    "compiled": (_Beside(0.0, 3.0), _Beside(3.0, 2.0)),
    "apart": (_Beside(2.5, 5.0), _Beside(5.5, 2.0)),
    "widened": (_Beside(10.5, 5.0), _Beside(13.5, 2.0)),
}
"""Forward and backward, by how the framework adds an adapter's result. Everywhere the two gradients of one input are read and their sum written (3).
`joint`: one product scales, and adds to the frozen result, which it reads (ours: executor/models/adapters.py, addmm). `compiled`: a kernel of its own
scales and adds (3), and backward scales (2). `apart`, in operations of torch: forward drops (2, and a byte of mask), scales (2) and adds (3), and backward scales (2) and drops (huggingface/peft:
src/peft/tuners/lora/layer.py, Linear.forward; NVIDIA-NeMo/NeMo: nemo/collections/nlp/modules/common/megatron/adapters/parallel_adapters.py). `widened`:
adapters are in float32, so that forward casts the input (3, in numbers of 16 bits), drops in float32 (4, and a byte of mask) and casts again for the product under autocast (3),
and backward the other way (huggingface/peft since 0.11: autocast_adapter_dtype, src/peft/tuners/lora/layer.py, _cast_input_dtype)."""


_GPTQ_BYTES = 16.5
"""Bytes that AutoGPTQ moves to bring one weight of four bits back: a word of eight is shifted (0.5 read, 4 written), made 8 bits wide (5), masked (2),
less its zero (2) and times its scale (3, in 16 bits), an operation of torch each (AutoGPTQ/AutoGPTQ: auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py,
forward, of more rows than its own kernel takes). Backward reads what forward made."""


def _unpacked_bytes(job: Job, layer: Layer) -> tuple[float, float]:
    """Bytes that are read and written to bring all quantised matrices of a layer back to the compute format, forward and backward."""
    if job.model.method != "qlora":
        return 0.0, 0.0
    weights = quantised_of(layer)
    if job.profile.kernels.unpacks == "gptq":
        return _GPTQ_BYTES * weights, 0.0
    once = (QUANTISED_BYTES + BYTES[job.formats.compute]) * weights
    return once, once
