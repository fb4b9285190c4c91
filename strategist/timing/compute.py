"""Seconds of one layer's compute for one micro-batch: matmuls, attention, memory-bound kernels, launches. (C, K)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from strategist.facts.adapters import TARGETS
from strategist.facts.attention import attention_FLOP, is_masked, keys_met, normed_heads, normed_latents
from strategist.facts.convolutions import blocks
from strategist.facts.hardware import Gpu
from strategist.facts.job import Job
from strategist.facts.layer_kind import LINEAR
from strategist.facts.layers import Layer, build_layer
from strategist.facts.model import LayerKind, loss_chunk
from strategist.facts.profile import BYTES
from strategist.records import dataclass
from strategist.space.candidates import Candidates, Column, Mask, Reals, total_of
from strategist.space.shares import (
    ceil_div,
    crowding,
    layers,
    length_of,
    matrices_of,
    sequence_cut,
    targets,
    tokens,
    tokens_of,
)
from strategist.space.stages import kinds
from strategist.timing.convolutions import launched, moved
from strategist.timing.rates import kept_share, matmul_rates, memory_Bps, share

Passes = Literal["forward", "backward"]
COMPUTE_TERMS = ("matmul", "attention", "elementwise", "moe_dispatch", "host")


@dataclass(frozen=True, slots=True, eq=False)
class LayerTime:
    """Seconds per layer and micro-batch by term, each (C, K): forward, backward, and the part of forward run again."""

    forward: Mapping[str, Reals]
    backward: Mapping[str, Reals]
    again: Mapping[str, Reals]


READ = ("cp", "tp", "ep", "etp", "micro_batch", "sequence_parallel", "context_parallel", "recompute")
"""What compute of layers and ends depends on: many layouts agree in it."""


class Compute:
    """Compute of one micro-batch, worked out once for layouts that agree in what it depends on."""

    def __init__(self, job: Job, c: Candidates) -> None:
        one_of_each, self._sort = c.alike(*READ, *(("dp_replicate",) if c.in_threads else ()))
        some = c.where(one_of_each)
        self._layers = layer_times(job, some)
        self._head, self._loss = _head_seconds(job, some)

    def layers_of(self, rows: Column) -> LayerTime:
        """Seconds of a layer for some of the layouts, (C, K)."""
        sort, found = self._sort[rows], self._layers
        parts = (found.forward, found.backward, found.again)
        return LayerTime(*({name: value[sort] for name, value in part.items()} for part in parts))

    def ends_of(self, rows: Column) -> tuple[Reals, Reals]:
        """Seconds of the output head (one pass) and of the loss (both passes) where they are, (C,) each."""
        sort = self._sort[rows]
        return self._head[sort], self._loss[sort]


def _head_seconds(job: Job, c: Candidates) -> tuple[Reals, Reals]:
    shape, gpu = job.model, job.cluster.slowest.gpu
    if not shape.vocab or shape.kind == "vit":
        return np.zeros(len(c)), np.zeros(len(c))
    rows = targets(job, c) * job.profile.head_tokens
    own, depth = ceil_div(shape.vocab, c["tp"]), np.full(len(c), float(shape.hidden))
    width = (ceil_div(own, 64) * 64 if job.profile.pads_vocabulary else own).astype(np.float64)
    loss = rows * shape.vocab / c["tp"] * job.kernels.logit_bytes / memory_Bps(gpu)
    if not c.chunks_loss:
        return _head_products(job, gpu, rows, width, depth), loss
    chunk = loss_chunk(rows, shape.hidden, shape.vocab)
    chunks = np.ceil(rows / chunk)
    return chunks * _head_products(job, gpu, chunk, width, depth), loss + _added_up_seconds(job, gpu, chunks)


def _head_products(job: Job, gpu: Gpu, m: Reals, n: Reals, k: Reals) -> Reals:
    """Seconds of one product of the output head, which no recipe of fewer bits casts unless it is asked to: Megatron's output layer is none of
    Transformer Engine's (NVIDIA/Megatron-LM: core/models/gpt/gpt_model.py, tensor_parallel.ColumnParallelLinear; Megatron-Bridge v0.6.0: fp8_output_proj),
    torchtitan's configurations leave `output` out (torchtitan/components/quantization), and so does our own executor (docs/decisions/0137)."""
    return product_seconds(gpu, job.head_precision, BYTES[job.formats.compute], m, n, k)


def _added_up_seconds(job: Job, gpu: Gpu, chunks: Reals) -> Reals:
    """Seconds per micro-batch, (C,), in which a chunked loss zeroes the gradient of the head's weight, reads it for every chunk but
    the first and writes it for each (Hsu et al. 2024, arXiv 2410.10989, section 3.2). Beside adapters the head has none."""
    if job.model.adapters is not None:
        return np.zeros_like(chunks)
    head = float(job.model.vocab) * job.model.hidden * BYTES[job.formats.compute]
    return np.asarray(2.0 * chunks * head / memory_Bps(gpu))


def layer_times(job: Job, c: Candidates) -> LayerTime:
    """Compute times of every sort of layer."""
    gpu = job.cluster.slowest.gpu
    sorts = list(zip(layers(job.model), kinds(job.model), strict=True))
    casts = _stack([cast_seconds(job, gpu, layer, c) for layer, _ in sorts])
    forward = {
        "matmul": _stack([matmul_of(job, gpu, layer, c) for layer, _ in sorts]),
        "attention": _stack([_attention(job, gpu, kind, c, "forward") for _, kind in sorts]),
        "elementwise": _stack([_elementwise(job, gpu, layer, kind, c) for layer, kind in sorts]) + casts,
    }
    if job.model.moe is not None:
        forward["moe_dispatch"] = _stack([_dispatch(job, gpu, kind, c) for _, kind in sorts])
    products, light = (1.0 + job.trainable) * forward["matmul"], 2.0 * forward["elementwise"]
    if job.model.adapters is not None:
        from strategist.timing.adapters import light_seconds, weight_products

        products = forward["matmul"] + _stack([weight_products(job, gpu, layer, c) for layer, _ in sorts])
        more = [light_seconds(job, gpu, layer, c) for layer, _ in sorts]
        forward["elementwise"] = forward["elementwise"] + _stack([seconds for seconds, _ in more])
        light = light + _stack([seconds for _, seconds in more])
    backward = {
        "matmul": products,
        "attention": _stack([_attention(job, gpu, kind, c, "backward") for _, kind in sorts]),
        "elementwise": light,
    }
    if "moe_dispatch" in forward:
        backward["moe_dispatch"] = 2.0 * forward["moe_dispatch"]
    forward["host"] = _host(job, forward, _stack([launches(job, kind, c, "forward") for _, kind in sorts]))
    backward["host"] = _host(job, backward, _stack([launches(job, kind, c, "backward") for _, kind in sorts]))
    return LayerTime(forward, backward, _again(job, c, forward, _of_modules(job, c, sorts, forward)))


def _stack(columns: list[Reals]) -> Reals:
    return np.stack(columns, axis=1)


_REDONE: Mapping[str, Mapping[str, float]] = {
    "elementwise": {"elementwise": 1.0, "host": 1.0},
    "alternate": {"elementwise": 1.0, "host": 1.0, "matmul": 0.5},
    "half-blocks": {"matmul": 0.5, "attention": 0.5, "elementwise": 0.5, "moe_dispatch": 0.5, "host": 0.5},
    "attention": {"attention": 1.0},
}
"""The share of forward that selective recompute runs again, by what a framework calls light."""


def _again(
    job: Job, c: Candidates, forward: Mapping[str, Reals], of_modules: Mapping[str, Reals] | None
) -> Mapping[str, Reals]:
    """Full recompute runs the whole forward again; selective redoes what the framework calls light: memory-bound kernels
    and launches, or attention alone (Korthikanti et al. 2022, arXiv 2205.05198, section 5); or the modules that a run names."""
    full = c.is_word("recompute", "full")[:, None]
    light = c.is_word("recompute", "selective")[:, None]
    redone = _REDONE[job.profile.light]
    selective = of_modules or {name: redone.get(name, 0.0) * value for name, value in forward.items()}
    return {name: np.where(full, value, np.where(light, selective[name], 0.0)) for name, value in forward.items()}


def _of_modules(
    job: Job, c: Candidates, sorts: list[tuple[Layer, LayerKind]], forward: Mapping[str, Reals]
) -> Mapping[str, Reals] | None:
    """What the modules take again that a run names, (C, K) by term; None where it names none, or the framework chooses by another rule."""
    if not job.profile.redoes or job.profile.light != "attention":
        return None
    from strategist.timing.modules_again import again_by_module  # few runs name modules

    found = [
        again_by_module(job, layer, kind, c, {name: value[:, place] for name, value in forward.items()})
        for place, (layer, kind) in enumerate(sorts)
    ]
    return {name: _stack([one[name] for one in found]) for name in forward}


def matmul_seconds(job: Job, gpu: Gpu, m: Reals, n: Reals, k: Reals, read: Reals | None = None) -> Reals:
    """Seconds of an (m, k) x (k, n) product in the formats that the job computes in, broadcast."""
    return product_seconds(gpu, job.workload.precision, BYTES[job.formats.compute], m, n, k, read)


def product_seconds(
    gpu: Gpu, precision: str, number: float, m: Reals, n: Reals, k: Reals, read: Reals | None = None
) -> Reals:
    """Seconds of an (m, k) x (k, n) product of numbers of `number` bytes: the slower of its FLOPs at the measured rate and its
    bytes, broadcast. `read` is how many elements the first factor of a convolution has, whose rows share them: a product that is never
    written out (Chetlur et al. 2014, cuDNN, arXiv 1410.0759, section 3). Few channels at very many positions fill a device with tiles
    as a square product of as many results does (NVIDIA: Matrix Multiplication Background User's Guide, section 3.1). Dense products of fp32
    use no tensor cores, which alone wait for whole rows (the same guide, section 2.1).

    Roofline: Williams et al. 2009 (Communications of the ACM 52(4)).
    """
    rates = matmul_rates(gpu, precision)
    rows, narrow = (m, np.minimum(n, k)) if read is None else (np.sqrt(m * n),) * 2
    waits = precision != "fp32" or read is not None
    compute = 2.0 * m * n * k / (rates.at(rows, narrow) * (alignment(gpu, n, k) if waits else 1.0))
    traffic = number * ((m * k if read is None else read) + k * n + m * n) / memory_Bps(gpu)
    return np.maximum(compute, traffic)


_TENSOR_ROW = 8
"""Numbers of two bytes in the 16 bytes that rows must be multiples of for tensor cores."""


def alignment(gpu: Gpu, n: Reals, k: Reals) -> Reals:
    """The share of its rate that a product keeps when a row of its matrices does not fill whole 128-byte lines (64 numbers
    of two bytes), or not even 16 bytes, broadcast. Source: Anthony et al. 2024, arXiv 2401.14489, section VI; NVIDIA: Matrix
    Multiplication Background User's Guide, section 2.1."""
    if gpu.vendor == "CPU":
        return np.ones(np.broadcast_shapes(np.shape(n), np.shape(k)))
    lines = (np.mod(n, 64.0) == 0) & (np.mod(k, 64.0) == 0)
    rows = (np.mod(n, _TENSOR_ROW) == 0) & (np.mod(k, _TENSOR_ROW) == 0)
    return np.where(lines, 1.0, np.where(rows, share("misaligned_share", gpu), share("unaligned_share", gpu)))


def matmul_of(job: Job, gpu: Gpu, layer: Layer, c: Candidates) -> Reals:
    """Forward seconds of all matrices of one layer, (C,); they are worked out together."""
    if not layer.matrices:
        return np.zeros(len(c))
    times, m, n, k = product_sizes(job, layer, c)
    every = matrices_of(layer)
    read = tokens(job, c)[:, None] * every.read if every.read.any() else None
    seconds = matmul_seconds(job, gpu, m, n, k, read)
    if job.model.adapters is not None:
        from strategist.timing.adapters import narrow_seconds

        seconds = np.where(is_narrow(layer), narrow_seconds(job, gpu, m, n, k), seconds)
    return (times * seconds).sum(axis=1)


def is_narrow(layer: Layer) -> Mask:
    """Matrices of a layer that are factors of adapters, (M,)."""
    return np.array([matrix.is_adapter for matrix in layer.matrices], np.bool_)


def product_sizes(job: Job, layer: Layer, c: Candidates) -> tuple[Reals, Reals, Reals, Reals]:
    """How many products each matrix makes, and the m, n and k of one of them, (C, M) each. Experts held by a rank work on
    as many tokens each; one product per expert, narrower by expert tensor cuts, and of the busiest rank as many more as it has tokens."""
    every, tp, etp = matrices_of(layer), c["tp"][:, None], c["etp"][:, None]
    cut = np.where(every.is_expert, etp, tp)
    n = every.outputs / np.where(every.is_column, cut, 1)
    k = every.inputs / np.where(every.is_row, cut, 1)
    spread, rows = sequence_cut(c)[:, None], tokens(job, c)[:, None]
    if every.of_targets.any():
        rows = np.where(every.of_targets, targets(job, c)[:, None], rows)
    own = rows * every.positions / np.where(every.is_whole, spread, 1)
    if not every.is_expert.any():
        return np.broadcast_to(1.0 * every.copies, n.shape), own, n, k
    arriving = rows / spread * c["ep"][:, None] * etp * every.used
    m = np.where(every.is_expert, np.maximum(1.0, arriving / every.copies), own)
    here = every.copies / np.where(every.is_expert, c["ep"][:, None], 1)
    return here * np.where(every.is_expert, crowding(job, c)[:, None], 1.0), m, n, k


def cast_seconds(job: Job, gpu: Gpu, layer: Layer, c: Candidates) -> Reals:
    """Seconds of turning the inputs of one layer's matrices to fp8 in forward, (C,): each is written twice, as it is and
    transposed for the weight gradient, and read unless the kernel before it does both; under sequence parallelism a rank casts
    its own tokens where casts come before gathers. Source: NVIDIA/TransformerEngine: cast_transpose; Micikevicius et al.
    2022, arXiv 2209.05433 (per-tensor scales need the largest magnitude, which the same pass finds)."""
    if not job.cast_width:
        return np.zeros(len(c))
    every, (times, m, _, k) = matrices_of(layer), product_sizes(job, layer, c)
    own = sequence_cut(c)[:, None] if job.gathers_cast else 1
    rows = m / np.where(every.is_column & ~every.is_expert, own, 1)
    return (times * rows * k).sum(axis=1) * cast_bytes(job) / memory_Bps(gpu)


def cast_bytes(job: Job) -> float:
    """Bytes that the casts of one element of a matrix' input move. To fp4 it is read twice, for the largest magnitude of the
    whole tensor and to be cast, and written as it is and transposed, which a Hadamard transform mixes on its way
    (NVIDIA 2025, arXiv 2509.25149, sections 3 and 4.3; NVIDIA/TransformerEngine: hadamard_transform_cast_fusion.cu)."""
    if job.workload.precision == "fp4":
        return 2.0 * BYTES[job.formats.compute] + 2.0 * job.cast_width
    return job.profile.kernels.cast_bytes


def _attention(job: Job, gpu: Gpu, kind: LayerKind, c: Candidates, passes: Passes) -> Reals:
    """Seconds of one pass of attention, (C,)."""
    per_token = attention_FLOP(job.model, kind, length_of(job, kind), job.workload.seq_len)
    if not per_token:
        return np.zeros(len(c))
    if job.profile.attention == "unfused":
        return _unfused(job, gpu, kind, c, passes)
    rate: float | Reals = _attention_rate(job, gpu, kind, attention_family(job, gpu, kind), passes)
    if job.profile.attention in _CUDNN_FIRST:  # rings call FlashAttention-2 by its name
        ring = _attention_rate(job, gpu, kind, "attention", passes)
        rate = np.where(c.is_word("context_parallel", "ring", "hierarchical"), ring, rate)
    factor = 1.0 if passes == "forward" else 2.5
    return np.asarray(factor * per_token * tokens_of(job, kind, c) / c["tp"] / rate)


_CUDNN_FIRST = {"sdpa": ("9", "10"), "flash": ("10",)}
"""Compute capabilities, before the point, on which torch calls cuDNN for attention."""


def attention_family(job: Job, gpu: Gpu, kind: LayerKind) -> str:
    """How the catalogue's rates name the kernel that runs a layer's attention. `sdpa` is torch's own choice: cuDNN on Hopper
    and Blackwell in half precision, where no mask is given, else FlashAttention-2 (PyTorch 2.13
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_prefer_cudnn_attention; docs/decisions/0157). `flash` is that of years
    when Hopper was not among them; on Blackwell even then (pytorch/torchtitan: torchtitan/models/attention.py puts cuDNN first)."""
    asked = job.profile.attention
    if asked not in _CUDNN_FIRST:
        return "attention" if asked == "flash2" else asked
    is_first = gpu.vendor == "NVIDIA" and (gpu.compute_capability or "").partition(".")[0] in _CUDNN_FIRST[asked]
    is_half = job.formats.compute in ("bfloat16", "float16")
    return "cudnn" if is_first and is_half and kind.mixer == "attention" else "attention"


def _attention_rate(job: Job, gpu: Gpu, kind: LayerKind, family: str, passes: Passes) -> float:
    """FLOP/s that a kernel reaches over one layer's rows and width of heads."""
    name = f"{family}_{passes}_share"
    filled = _filled(job, kind, gpu, passes) * _wide(job.model.head_dim, share(f"{family}_half_width", gpu))
    return _half_peak(job, gpu) * share(name, gpu) * kept_share(name, gpu) * filled


def _batched_peak(job: Job, gpu: Gpu) -> float:
    """Dense peak of products over one head, FLOP/s: that of the fp32 units on NVIDIA's devices where a head is no multiple of
    16 bytes wide, since such rows do not feed tensor cores. Source: NVIDIA: Matrix Multiplication Background User's Guide,
    section 2.1; Anthony et al. 2024, arXiv 2401.14489, section VI (heads and powers of two)."""
    is_narrow = gpu.vendor == "NVIDIA" and job.model.head_dim % _TENSOR_ROW != 0
    return (is_narrow and gpu.fp32_FLOPs) or _half_peak(job, gpu)


def _half_peak(job: Job, gpu: Gpu) -> float:
    """Dense half-precision peak, which attention runs at; that of fp32 or tf32 when asked."""
    wide = {"fp32": gpu.fp32_FLOPs, "tf32": gpu.tf32_FLOPs}
    return wide.get(job.workload.precision, gpu.bf16_FLOPs or gpu.fp16_FLOPs) or 1.0


def _filled(job: Job, kind: LayerKind, gpu: Gpu, passes: Passes) -> float:
    """The share of the long-sequence rate that a kernel reaches: short rows end in half-empty tiles and few blocks, in backward the
    more so where a mask cuts tiles (docs/decisions/0222)."""
    own = length_of(job, kind)
    span = keys_met(job.model, kind, own)
    half = share(_HALF_LENGTH[passes if is_masked(job.model, kind, own) else "forward"], gpu)
    if kind.cross:
        # Each of two kernels takes (keys + half length) / keys of its time: together as one over the mean of their keys.
        span = (span + job.workload.seq_len) / 2.0
    return span / (span + half)


_HALF_LENGTH: Mapping[Passes, str] = {"forward": "attention_half_length", "backward": "attention_backward_half_length"}
_MEASURED_WIDTH = 128.0
"""Width of a head in the benchmarks that shares of attention come from."""


def _wide(head_dim: int, half_width: float) -> float:
    """The share of the rate at the measured width that narrower heads reach: their products shrink, the exponentials of their
    scores do not."""
    own = min(float(head_dim), _MEASURED_WIDTH)
    return own / (own + half_width) * (_MEASURED_WIDTH + half_width) / _MEASURED_WIDTH


def _unfused(job: Job, gpu: Gpu, kind: LayerKind, c: Candidates, passes: Passes) -> Reals:
    """Attention that writes its scores: batched products over the whole square, no causal half, and the traffic of
    scale, mask, softmax and dropout. Source: Korthikanti et al. 2022, arXiv 2205.05198, section 4.1 (the 5 a s^2 b term)."""
    shape, kernels = job.model, job.kernels
    met = keys_met(shape, kind, length_of(job, kind)) + (job.workload.seq_len if kind.cross else 0)
    scores = shape.heads * met * tokens_of(job, kind, c) / c["tp"]
    FLOP, moved = (4.0, kernels.score_forward_bytes) if passes == "forward" else (8.0, kernels.score_backward_bytes)
    wide = BYTES[job.formats.compute] / 2.0
    product = FLOP * shape.head_dim / (_batched_peak(job, gpu) * share("batched_matmul_share", gpu))
    return scores * (product + moved * wide / memory_Bps(gpu))


_ADAPTER_READ, _ADAPTER_WRITE = 3.5, 3.0
"""Elements per element of input (dropout reads, writes and keeps a byte of mask; the product reads) and of output (written,
then added to the matrix' own result)."""


def elementwise_bytes(job: Job, layer: Layer, kind: LayerKind, c: Candidates) -> Reals:
    """Bytes that one layer's memory-bound kernels move in forward for one token, shape (C,).

    Elements read and written stand in the framework's row of kernels: norms, residual sums and dropout on the residual
    stream, rotation and norms of queries and keys, norms of latents, the activation. Adapters of low rank beside the joint query-key-value matrix and
    the output matrix read their input through dropout and add to the result: their products are nothing but this traffic.
    """
    shape, number, kernels = job.model, BYTES[job.formats.compute], job.kernels
    if kind.mixer == "convolution":
        return np.full(len(c), number * moved(blocks(shape.extra)[kind.block]))
    parts = max(1, layer.norms)
    sums = (kernels.residual + kernels.dropout) * parts * shape.hidden
    stream = (kernels.norm * (layer.norms * shape.hidden + normed_latents(shape, kind)) + sums) / sequence_cut(c)
    has_attention = kind.mixer in ("attention", "sliding", "mla")
    rotated = kernels.rotary * (shape.heads + shape.kv_heads) * shape.head_dim if has_attention else 0.0
    normed = kernels.norm * normed_heads(shape, kind)
    beside = job.adapters and has_attention
    heads = shape.heads * shape.head_dim
    stream = stream + (_ADAPTER_READ + _ADAPTER_WRITE) * shape.hidden / sequence_cut(c) * beside
    wings = beside * (_ADAPTER_READ * heads + _ADAPTER_WRITE * (heads + 2.0 * shape.kv_heads * shape.head_dim))
    state = 12.0 * shape.hidden if kind.mixer in LINEAR else 0.0
    active = (kernels.gated if shape.mlp_gated else kernels.plain) * _activated(job, kind, c)
    bytes_: Reals = number * (stream + (rotated + normed + wings + state + active) / c["tp"])
    return bytes_


def _activated(job: Job, kind: LayerKind, c: Candidates) -> Reals | float:
    """Elements per token between the matrices of a layer's feed-forward part, (C,) where experts are: of the busiest rank."""
    shape = job.model
    if kind.ffn == "dense":
        return shape.ffn_hidden
    if kind.ffn != "moe" or shape.moe is None:
        return 0
    return shape.moe.top_k * shape.moe.ffn * crowding(job, c) + shape.moe.shared_ffn


def _elementwise(job: Job, gpu: Gpu, layer: Layer, kind: LayerKind, c: Candidates) -> Reals:
    return elementwise_bytes(job, layer, kind, c) * tokens_of(job, kind, c) / memory_Bps(gpu)


def _dispatch(job: Job, gpu: Gpu, kind: LayerKind, c: Candidates) -> Reals:
    """Permuting tokens to experts and back: each copy read and written twice."""
    if kind.ffn != "moe" or job.model.moe is None:
        return np.zeros(len(c))
    width = job.model.moe.latent or job.model.hidden
    moved = 4.0 * job.model.moe.top_k * width * BYTES[job.formats.compute]
    return moved * tokens_of(job, kind, c) / sequence_cut(c) / memory_Bps(gpu)


def launches(job: Job, kind: LayerKind, c: Candidates, passes: Passes) -> Reals:
    """Kernels of one pass over one layer, (C,): routing and every local expert bring their own. Threads of one process hold its
    interpreter lock by turns, so that in forward one CPU launches for all devices; backward runs without the interpreter
    (PyTorch tutorials, Getting Started with Distributed Data Parallel: contention for the lock across threads)."""
    kernels, moe = job.profile.kernels, job.model.moe
    is_forward = passes == "forward"
    launchers = c["dp_replicate"] if is_forward and c.in_threads else 1
    each_pass: tuple[float, float] = (kernels.forward, kernels.backward)
    if kind.mixer == "convolution":
        each_pass = launched(blocks(job.model.extra)[kind.block])
    if kind.cross:
        each_pass = (each_pass[0] * _with_cross(job, kind), each_pass[1] * _with_cross(job, kind))
    count = np.full(len(c), float(each_pass[0 if is_forward else 1])) + _of_adapters(job, kind, is_forward=is_forward)
    if kind.ffn != "moe" or moe is None:
        return count * launchers
    routing = kernels.moe_forward if is_forward else kernels.moe_backward
    each = kernels.expert_forward if is_forward else kernels.expert_backward
    return (count + routing + each * moe.experts / c["ep"]) * launchers


def _with_cross(job: Job, kind: LayerKind) -> float:
    """How many times as many kernels a decoder's layer has for its attention to an encoder: kernels go with matrices, as in modules that
    run again (NVIDIA/Megatron-LM: megatron/model/transformer.py, ParallelTransformerLayer, whose inter_attention is an attention with norm,
    dropout and sum like the other; 23.05)."""
    own = build_layer(job.model, kind).matrices
    return len(own) / sum(not matrix.name.startswith("cross_") for matrix in own)


_ADAPTER_FORWARD, _ADAPTER_BACKWARD = 5, 9
"""Kernels of an adapter beside a matrix: dropout, two products, the factor and the sum; and, backward, two products of each factor, those
of dropout, factor and sum, and what adds up three gradients (huggingface/peft: tuners/lora/layer.py, Linear.forward)."""
_JOINT = 2
"""Matrices with adapters where queries, keys and values are one: that, and the output's."""


def _of_adapters(job: Job, kind: LayerKind, *, is_forward: bool) -> int:
    """Kernels that the adapters of one layer add to a pass."""
    shape, each = job.model, _ADAPTER_FORWARD if is_forward else _ADAPTER_BACKWARD
    if shape.adapters is not None:
        return each * len(shape.adapters.targets)
    if not job.adapters or kind.mixer not in ("attention", "sliding", "mla"):
        return 0
    return each * (len(TARGETS) if job.profile.keeping.adapts_all else _JOINT)


def _host(job: Job, busy: Mapping[str, Reals], launches_CK: Reals) -> Reals:
    """What the launching CPU adds, (C, K): where it issues kernels slower than the device finishes them, the difference; all of it
    where it waits for each kernel (NVIDIA: CUDA C++ Programming Guide, concurrent execution between host and device), and where the stage
    knows better what it may catch up with (estimate.py)."""
    profile = job.profile
    issue = launches_CK * profile.kernels.host_s
    is_whole = profile.launches_wait or profile.kernels.catches_up
    return issue if is_whole else np.maximum(0.0, issue - total_of(busy.values()))
