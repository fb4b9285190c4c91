"""Seconds of one layer for one micro-batch: forward, backward, and what recomputation runs again (docs/time_model.md)."""

from __future__ import annotations

from dataclasses import dataclass

from strategist.facts.hardware import Gpu
from strategist.facts.job import Job
from strategist.facts.layers import Matrix, build_layer
from strategist.facts.model import LayerKind, ModelShape
from strategist.facts.profile import BYTES
from tests.oracle.memory import sequence_cut, tokens
from tests.oracle.rates import attention_peak_FLOPs, matmul_seconds, memory_Bps, share
from tests.oracle.stages import Layout

ATTENTION = ("attention", "sliding", "mla")
STATE_SPACE = ("mamba1", "mamba2", "gated-delta")
COMPUTE_TERMS = ("matmul", "attention", "elementwise", "moe_dispatch", "host")


@dataclass(frozen=True)
class Pass:
    """Seconds of one term: forward, backward, and the part of forward that runs again."""

    forward: float
    backward: float
    again: float = 0.0

    @property
    def all(self) -> float:
        """Everything."""
        return self.forward + self.backward + self.again


def device_of(job: Job) -> Gpu:
    """The device that decides how long a synchronous step takes."""
    return job.cluster.slowest.gpu


def _product(job: Job, m: float, n: float, k: float) -> float:
    return matmul_seconds(device_of(job), job.workload.precision, job.formats.compute, (m, n, k))


def _dense_seconds(job: Job, layout: Layout, matrix: Matrix) -> float:
    tp, m = layout["tp"], tokens(job, layout)
    n, k = float(matrix.outputs), float(matrix.inputs)
    if matrix.cut == "column":
        n /= tp
    elif matrix.cut == "row":
        k /= tp
    else:
        m /= sequence_cut(layout)
    return matrix.copies * _product(job, m, n, k)


def _expert_seconds(job: Job, layout: Layout, matrix: Matrix) -> float:
    moe, ep, etp = job.model.moe, layout["ep"], layout["etp"]
    if moe is None:
        raise ValueError("experts without a moe")
    arriving = tokens(job, layout) / sequence_cut(layout) * ep * etp * moe.top_k / moe.experts
    n, k = float(matrix.outputs), float(matrix.inputs)
    n, k = (n / etp, k) if matrix.cut == "column" else (n, k / etp)
    return moe.experts / ep * _product(job, max(1.0, arriving), n, k)


def _matmul(job: Job, layout: Layout, kind: LayerKind) -> Pass:
    once = 0.0
    for matrix in build_layer(job.model, kind).matrices:
        once += (_expert_seconds if matrix.is_expert else _dense_seconds)(job, layout, matrix)
    return Pass(once, 2 * once, once if layout["recompute"] == "full" else 0.0)


def attention_FLOP(shape: ModelShape, kind: LayerKind, seq_len: int) -> float:
    """Forward FLOP per token of one layer's softmax attention."""
    total = 0.0
    if kind.mixer in ATTENTION:
        span = min(shape.window or seq_len, seq_len) if kind.mixer == "sliding" else seq_len
        causal = 0.5 if shape.kind in ("decoder", "hybrid") and span == seq_len else 1.0
        width = 2 * shape.heads * shape.head_dim
        if kind.mixer == "mla" and shape.mla is not None:
            width = shape.heads * (shape.mla.qk_nope + shape.mla.qk_rope + shape.mla.v_dim)
        total += 2 * span * causal * width
    if kind.cross:
        total += 4 * shape.heads * shape.head_dim * seq_len
    return total


def _attention(job: Job, layout: Layout, kind: LayerKind) -> Pass:
    gpu = device_of(job)
    flop = attention_FLOP(job.model, kind, job.workload.seq_len) * tokens(job, layout) / layout["tp"]
    peak = attention_peak_FLOPs(gpu, job.workload.precision)
    forward = flop / (peak * share("attention_forward_share", gpu))
    backward = 2.5 * flop / (peak * share("attention_backward_share", gpu))
    return Pass(forward, backward, forward if layout["recompute"] == "full" else 0.0)


def _elementwise(job: Job, layout: Layout, kind: LayerKind) -> Pass:
    shape, layer = job.model, build_layer(job.model, kind)
    q = layer.norms
    width = 0
    if kind.ffn == "dense":
        width = shape.ffn_hidden
    elif kind.ffn == "moe" and shape.moe is not None:
        width = shape.moe.top_k * shape.moe.ffn + shape.moe.shared_ffn
    inside = (5 if shape.mlp_gated else 2) * width
    if kind.mixer in ATTENTION:
        inside += 8 * (shape.heads + shape.kv_heads) * shape.head_dim
    if kind.mixer in STATE_SPACE:
        inside += 12 * shape.hidden
    outside = (2 * q + 3 * max(1, q)) * shape.hidden
    per_token = BYTES[job.formats.compute] * (outside / sequence_cut(layout) + inside / layout["tp"])
    once = per_token * tokens(job, layout) / memory_Bps(device_of(job))
    return Pass(once, 2 * once, 0.0 if layout["recompute"] == "none" else once)


def _dispatch(job: Job, layout: Layout, kind: LayerKind) -> Pass:
    moe = job.model.moe
    if kind.ffn != "moe" or moe is None:
        return Pass(0.0, 0.0)
    moved = 4 * moe.top_k * (moe.latent or job.model.hidden) * BYTES[job.formats.compute]
    once = moved * tokens(job, layout) / sequence_cut(layout) / memory_Bps(device_of(job))
    return Pass(once, 2 * once, once if layout["recompute"] == "full" else 0.0)


def layer_time(job: Job, layout: Layout, kind: LayerKind) -> dict[str, Pass]:
    """Every compute term of one layer."""
    terms = {
        "matmul": _matmul(job, layout, kind),
        "attention": _attention(job, layout, kind),
        "elementwise": _elementwise(job, layout, kind),
        "moe_dispatch": _dispatch(job, layout, kind),
    }
    kernels = job.profile.kernels
    forward = kernels.forward * kernels.host_s - sum(term.forward for term in terms.values())
    backward = kernels.backward * kernels.host_s - sum(term.backward for term in terms.values())
    runs_again = layout["recompute"] != "none"
    return terms | {"host": Pass(max(0.0, forward), max(0.0, backward), max(0.0, forward) if runs_again else 0.0)}


def head_time(job: Job, layout: Layout) -> dict[str, Pass]:
    """The output head and the loss of the last stage; nothing of them runs again."""
    shape = job.model
    if not shape.vocab:
        return {}
    T = tokens(job, layout)
    once = _product(job, T, shape.vocab / layout["tp"], shape.hidden)
    loss = T * shape.vocab * 30 / memory_Bps(device_of(job))
    return {"matmul": Pass(once, 2 * once), "loss": Pass(loss / 3, 2 * loss / 3)}
