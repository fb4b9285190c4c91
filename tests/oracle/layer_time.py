"""Seconds of one layer for one micro-batch: forward, backward, and what recomputation runs again (docs/time_model.md)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from types import SimpleNamespace

from strategist.catalog import rows
from strategist.facts.hardware import Gpu
from strategist.facts.job import Job
from strategist.facts.layers import Layer, Matrix, build_layer
from strategist.facts.model import LayerKind, ModelShape
from strategist.facts.profile import BYTES
from tests.oracle import adapters, convolutions
from tests.oracle.attention import ATTENTION, attention_FLOP, lengths
from tests.oracle.memory import busiest, decoder_tokens, sequence_cut, tokens
from tests.oracle.rates import attention_peak_FLOPs, kept, matmul_seconds, memory_Bps, share
from tests.oracle.stages import Layout

STATE_SPACE = ("mamba1", "mamba2", "gated-delta", "short-conv", "lightning", "kimi-delta")
MOVED = (
    "norm",
    "residual",
    "rotary",
    "gated",
    "plain",
    "dropout",
    "logit_bytes",
    "score_forward_bytes",
    "score_backward_bytes",
)
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


def kernels_of(job: Job) -> SimpleNamespace:
    """What kernels move: the framework's, or for a library's modules those of a model of this sort in these numbers."""
    own = {name: getattr(job.profile.kernels, name) for name in MOVED}
    if job.profile.kernels.modules:
        sort = "layernorm"
        if "rms" in job.model.norm:
            sort = "rmsnorm"
        elif job.model.family in ("gpt2", "gpt-neo", "gpt-j", "phi"):
            sort = "gpt2"
        rests, computes = (BYTES[name] for name in (job.formats.parameter, job.formats.compute))
        numbers = "wide" if computes == 4 else "mixed" if rests == 4 else "low"
        asked = (job.profile.kernels.modules, sort, numbers)
        own = next(row for row in rows("modules") if (row["name"], row["sort"], row["numbers"]) == asked)
        act = (job.profile.kernels.modules, job.model.act_form or job.model.mlp_act, numbers)
        for form in rows("act_forms"):
            if (form["library"], form["name"], form["numbers"]) == act:
                own = own | {each: own[each] + form["moved"] for each in ("gated", "plain")}
    return SimpleNamespace(**{name: own[name] for name in MOVED})


def _product(job: Job, m: float, n: float, k: float) -> float:
    return matmul_seconds(device_of(job), job.workload.precision, job.formats.compute, (m, n, k))


def _head_product(job: Job, m: float, n: float, k: float) -> float:
    """The output head stays in the format that the others are cast from."""
    precision = job.workload.precision
    if precision in ("fp8", "fp4"):
        precision = {"bfloat16": "bf16", "float16": "fp16"}[job.formats.compute]
    return matmul_seconds(device_of(job), precision, job.formats.compute, (m, n, k))


Size = tuple[float, float, float]


def _dense_size(job: Job, layout: Layout, matrix: Matrix) -> tuple[float, Size]:
    """How many products, and M, n, k of each."""
    tp, m = layout["tp"], decoder_tokens(job, layout) if matrix.of_targets else tokens(job, layout)
    n, k = float(matrix.outputs), float(matrix.inputs)
    if matrix.cut == "column":
        n /= tp
    elif matrix.cut == "row":
        k /= tp
    else:
        m /= sequence_cut(layout)
    return matrix.copies, (m, n, k)


def _expert_size(job: Job, layout: Layout, matrix: Matrix) -> tuple[float, Size]:
    """The same for the experts that a rank holds."""
    moe, ep, etp = job.model.moe, layout["ep"], layout["etp"]
    if moe is None:
        raise ValueError("experts without a moe")
    arriving = tokens(job, layout) / sequence_cut(layout) * ep * etp * moe.top_k / moe.experts
    n, k = float(matrix.outputs), float(matrix.inputs)
    n, k = (n / etp, k) if matrix.cut == "column" else (n, k / etp)
    return busiest(job, layout) * moe.experts / ep, (max(1.0, arriving), n, k)


def _matmul(job: Job, layout: Layout, kind: LayerKind) -> Pass:
    if kind.mixer == "convolution":
        once = convolutions.product_seconds(job, tokens(job, layout), convolutions.of(job.model, kind))
        return Pass(once, 2 * once, redone(job, layout, "matmul") * once)
    once, again = 0.0, 0.0
    for matrix in (matrix for matrix in build_layer(job.model, kind).matrices if not matrix.is_adapter):
        count, size = (_expert_size if matrix.is_expert else _dense_size)(job, layout, matrix)
        own = count * _product(job, *size)
        once += own
        again += own if module_of(matrix.name) & set(job.profile.redoes) else 0.0
    if job.model.adapters is None:
        runs_again = again if by_modules(job, layout) else redone(job, layout, "matmul") * once
        return Pass(once, (1 + job.trainable) * once, runs_again)
    T, r = tokens(job, layout), job.model.adapters.rank
    moved = sum((T * i + i * r + T * r) + (T * r + r * o + T * o) for i, o in adapters.targets(job.model))
    own = BYTES[job.formats.compute] * moved / memory_Bps(device_of(job))
    return Pass(once + own, once + 2 * own, redone(job, layout, "matmul") * (once + own))


LIGHT = {
    "elementwise": {"elementwise": 1.0, "host": 1.0},
    "alternate": {"elementwise": 1.0, "host": 1.0, "matmul": 0.5},
    "half-blocks": dict.fromkeys(COMPUTE_TERMS, 0.5),
    "attention": {"attention": 1.0},
}
"""What selective recompute runs again of each term, by framework."""


def by_modules(job: Job, layout: Layout) -> bool:
    """Whether modules that a run names run again, and nothing else."""
    return bool(job.profile.redoes) and job.profile.light == "attention" and layout["recompute"] == "selective"


def module_of(matrix: str) -> set[str]:
    """Megatron's names of the modules that a matrix stands in."""
    if matrix in ("gate", "up", "down"):
        return {"mlp"}
    if matrix.startswith(("expert_", "latent_")) or matrix == "router":
        return {"moe"}
    if matrix.startswith("shared_"):
        return {"moe", "shared_experts"}
    return {"mla_up_proj"} if matrix in ("q_up", "kv_up") else set()


def redone(job: Job, layout: Layout, term: str) -> float:
    """The share of a term's forward that runs again."""
    if by_modules(job, layout) and term == "attention":
        return float("core_attn" in job.profile.redoes)
    if by_modules(job, layout) and term == "moe_dispatch":
        return float("moe" in job.profile.redoes)
    if layout["recompute"] == "full":
        return 1.0
    return LIGHT[job.profile.light].get(term, 0.0) if layout["recompute"] == "selective" else 0.0


def _tokens(job: Job, layout: Layout, kind: LayerKind) -> float:
    """T of a layer: its decoder's, if it stands in one behind an encoder."""
    return decoder_tokens(job, layout) if kind.cross else tokens(job, layout)


def _attention(job: Job, layout: Layout, kind: LayerKind) -> Pass:
    gpu, how = device_of(job), job.profile.attention
    queries = _tokens(job, layout, kind)
    flop = attention_FLOP(job.model, kind, *lengths(job, kind)) * queries / layout["tp"]
    peak = attention_peak_FLOPs(gpu, job.workload.precision)
    if not flop:
        return Pass(0.0, 0.0)
    if how == "unfused":
        forward, backward = _unfused(job, layout, kind)
    else:
        calls = {
            "flash2": "attention",
            "flash": _torch_calls(job, layout, kind, "10."),
            "sdpa": _torch_calls(job, layout, kind, "9.", "10."),
        }
        name = calls.get(how, how)
        half, (own, inputs) = share("attention_half_length", gpu), lengths(job, kind)
        span, half_again = _span(job.model, kind, own), half
        if kind.cross:  # each kernel at its own rate
            peak *= (own + inputs) / (own + half + inputs + half)
        else:
            peak *= span / (span + half)
            if job.model.kind in ("decoder", "hybrid") or span < own:
                half_again = share("attention_backward_half_length", gpu)
        slower = (span + half_again) / (span + half)
        half, own = share(f"{name}_half_width", gpu), min(job.model.head_dim, 128)
        peak *= (own / (own + half)) / (128 / (128 + half))
        forward = flop / (peak * kept(f"{name}_forward_share", gpu))
        backward = slower * 2.5 * flop / (peak * kept(f"{name}_backward_share", gpu))
    return Pass(forward, backward, redone(job, layout, "attention") * forward)


def _torch_calls(job: Job, layout: Layout, kind: LayerKind, *chips: str) -> str:
    """cuDNN for half-precision attention without masks on some compute capabilities; a ring calls FlashAttention-2 itself."""
    gpu = device_of(job)
    new = gpu.vendor == "NVIDIA" and (gpu.compute_capability or "").startswith(chips)
    plain = kind.mixer == "attention" and layout["context_parallel"] not in ("ring", "hierarchical")
    return "cudnn" if new and plain and job.formats.compute in ("bfloat16", "float16") else "attention"


def _span(shape: ModelShape, kind: LayerKind, seq_len: int) -> int:
    return min(shape.window or seq_len, seq_len) if kind.mixer == "sliding" else seq_len


def _unfused(job: Job, layout: Layout, kind: LayerKind) -> tuple[float, float]:
    """Scores written out: 2 products of 2 d FLOP each over the whole square, and their traffic."""
    gpu, kernels, d = device_of(job), kernels_of(job), job.model.head_dim
    own, inputs = lengths(job, kind)
    met = _span(job.model, kind, own) + (inputs if kind.cross else 0)
    scores = job.model.heads / layout["tp"] * met * _tokens(job, layout, kind)
    peak = attention_peak_FLOPs(gpu, job.workload.precision)
    if gpu.vendor == "NVIDIA" and d % 8 and gpu.fp32_FLOPs:
        peak = gpu.fp32_FLOPs
    rate = peak * share("batched_matmul_share", gpu)
    wide = BYTES[job.formats.compute] / 2
    forward = scores * (4 * d / rate + kernels.score_forward_bytes * wide / memory_Bps(gpu))
    backward = scores * (8 * d / rate + kernels.score_backward_bytes * wide / memory_Bps(gpu))
    return forward, backward


def _elementwise(job: Job, layout: Layout, kind: LayerKind) -> Pass:
    if kind.mixer == "convolution":
        own = convolutions.moved_bytes(job, tokens(job, layout), convolutions.of(job.model, kind))
        once = own / memory_Bps(device_of(job))
        return Pass(once, 2 * once, redone(job, layout, "elementwise") * once)
    shape, layer, kernels = job.model, build_layer(job.model, kind), kernels_of(job)
    q, width = layer.norms, _activated(job, layout, kind)
    inside = (kernels.gated if shape.mlp_gated else kernels.plain) * width
    if kind.mixer in ATTENTION:
        inside += kernels.rotary * (shape.heads + shape.kv_heads) * shape.head_dim
    if kind.mixer in ("attention", "sliding") and shape.qk_norm:  # each query and key is normed before it is rotated
        inside += kernels.norm * (shape.heads + shape.kv_heads) * shape.head_dim
    if kind.mixer in STATE_SPACE:
        inside += 12 * shape.hidden
    beside = 0.0
    if job.adapters and kind.mixer in ATTENTION:  # input through dropout 3.5, output 3, for qkv and for the projection
        beside = 6.5 * shape.hidden
        inside += 3.5 * shape.heads * shape.head_dim + 3 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    outside = (kernels.norm * q + (kernels.residual + kernels.dropout) * max(1, q)) * shape.hidden + beside
    if kind.mixer == "mla" and shape.mla is not None:
        outside += kernels.norm * (shape.mla.q_lora + shape.mla.kv_lora)
    per_token = BYTES[job.formats.compute] * (outside / sequence_cut(layout) + inside / layout["tp"])
    once = (per_token * _tokens(job, layout, kind) + _casts(job, layout, layer)) / memory_Bps(device_of(job))
    if shape.adapters is None:
        some = by_modules(job, layout)
        return Pass(
            once, 2 * once, _light_again(job, layout, kind) if some else redone(job, layout, "elementwise") * once
        )
    number, T, rate = BYTES[job.formats.compute], tokens(job, layout), memory_Bps(device_of(job))
    first, second = adapters.unpacking(job, number)
    packed = adapters.packed_in_all(shape, [kind], 1)
    there, back = adapters.moved_beside(job)
    forward = once + (number * T * there + packed * first) / rate
    return Pass(
        forward, 2 * once + (number * T * back + packed * second) / rate, redone(job, layout, "elementwise") * forward
    )


def _activated(job: Job, layout: Layout, kind: LayerKind) -> float:
    """Elements per token between the matrices of a feed-forward part."""
    moe = job.model.moe
    if kind.ffn == "moe" and moe is not None:
        return moe.top_k * moe.ffn * busiest(job, layout) + moe.shared_ffn
    return job.model.ffn_hidden if kind.ffn == "dense" else 0.0


def _light_again(job: Job, layout: Layout, kind: LayerKind) -> float:
    """Seconds of the memory-bound kernels of the named modules, casts included."""
    shape, layer, kernels, named = job.model, build_layer(job.model, kind), job.profile.kernels, job.profile.redoes
    bytes_, moe = 0.0, shape.moe
    if "layernorm" in named:
        bytes_ += kernels.norm * layer.norms * shape.hidden / sequence_cut(layout)
    if "mla_up_proj" in named and kind.mixer == "mla":
        bytes_ += kernels.rotary * (shape.heads + shape.kv_heads) * shape.head_dim / layout["tp"]
    width = 0.0
    if kind.ffn == "dense" and "mlp" in named:
        width += shape.ffn_hidden
    if kind.ffn == "moe" and moe is not None and {"moe", "moe_act"} & set(named):
        width += moe.top_k * moe.ffn * busiest(job, layout)
    if kind.ffn == "moe" and moe is not None and {"moe", "shared_experts"} & set(named):
        width += moe.shared_ffn
    bytes_ += (kernels.gated if shape.mlp_gated else kernels.plain) * width / layout["tp"]
    moved = bytes_ * BYTES[job.formats.compute] * _tokens(job, layout, kind)
    return (moved + _casts(job, layout, layer, set(named))) / memory_Bps(device_of(job))


def _casts(job: Job, layout: Layout, layer: Layer, only: set[str] | None = None) -> float:
    """Bytes of turning the inputs of a layer's matrices to fp8 or fp4: a rank's own tokens where they are gathered afterwards; of some
    modules where that is asked."""
    if job.workload.precision not in ("fp8", "fp4") or not job.profile.casts_fp8:
        return 0.0
    elements = 0.0
    for matrix in (one for one in layer.matrices if only is None or module_of(one.name) & only):
        count, (m, _, k) = (_expert_size if matrix.is_expert else _dense_size)(job, layout, matrix)
        is_own = job.gathers_cast and matrix.cut == "column" and not matrix.is_expert
        elements += count * m * k / (sequence_cut(layout) if is_own else 1)
    read_twice_written_twice = 2 * 2 + 2 * (4 + 8 / 16) / 8
    return elements * (read_twice_written_twice if job.workload.precision == "fp4" else job.profile.kernels.cast_bytes)


def _dispatch(job: Job, layout: Layout, kind: LayerKind) -> Pass:
    moe = job.model.moe
    if kind.ffn != "moe" or moe is None:
        return Pass(0.0, 0.0)
    moved = 4 * moe.top_k * (moe.latent or job.model.hidden) * BYTES[job.formats.compute]
    once = moved * tokens(job, layout) / sequence_cut(layout) / memory_Bps(device_of(job))
    return Pass(once, 2 * once, redone(job, layout, "moe_dispatch") * once)


def _launches(job: Job, layout: Layout, kind: LayerKind) -> tuple[float, float]:
    """Kernels of forward, which one interpreter launches for all its threads, and of backward."""
    kernels, moe = job.profile.kernels, job.model.moe
    devices = layout["dp_replicate"] if layout.get("replicas") == "threads" else 1
    if kind.mixer == "convolution":
        forward, backward = convolutions.launches(convolutions.of(job.model, kind))
        return devices * forward, backward
    beside = _adapted(job, kind)
    more = _crossing(job, kind)
    first, second = kernels.forward * more + 5 * beside, kernels.backward * more + 9 * beside
    if kind.ffn != "moe" or moe is None:
        return devices * first, second
    local = moe.experts / layout["ep"]
    forward = devices * (first + kernels.moe_forward + kernels.expert_forward * local)
    return forward, second + kernels.moe_backward + kernels.expert_backward * local


def _crossing(job: Job, kind: LayerKind) -> float:
    """Four matrices more beside four of attention and those of the feed-forward part, and as many kernels each."""
    others = 4 + (3 if job.model.mlp_gated else 2)
    return (others + 4) / others if kind.cross else 1


def _adapted(job: Job, kind: LayerKind) -> int:
    """Matrices of a layer with adapters: those that are named, or all seven, or the joint one of attention and its output."""
    if job.model.adapters is not None:
        return len(adapters.targets(job.model))
    has_any = job.adapters and kind.mixer in ATTENTION
    return (7 if job.profile.keeping.adapts_all else 2) if has_any else 0


def layer_time(job: Job, layout: Layout, kind: LayerKind) -> dict[str, Pass]:
    """Every compute term of one layer."""
    terms = {
        "matmul": _matmul(job, layout, kind),
        "attention": _attention(job, layout, kind),
        "elementwise": _elementwise(job, layout, kind),
        "moe_dispatch": _dispatch(job, layout, kind),
    }
    launches, each = _launches(job, layout, kind), job.profile.kernels.host_s
    forward, backward = launches[0] * each, launches[1] * each
    by_layer = not (job.profile.launches_wait or job.profile.kernels.catches_up)
    if by_layer:  # the CPU runs ahead of the device, of each layer alone
        forward = max(0.0, forward - sum(term.forward for term in terms.values()))
        backward = max(0.0, backward - sum(term.backward for term in terms.values()))
    again = _launched_again(job, layout, kind) if by_modules(job, layout) else redone(job, layout, "host")
    return terms | {"host": Pass(forward, backward, again * forward)}


def _launched_again(job: Job, layout: Layout, kind: LayerKind) -> float:
    """The share of a layer's launches that the named modules have: by their matrices, and all of routing and experts with mixtures."""
    kernels, moe, named = job.profile.kernels, job.model.moe, set(job.profile.redoes)
    devices = layout["dp_replicate"] if layout.get("replicas") == "threads" else 1
    plain = devices * (kernels.forward * _crossing(job, kind) + 5 * _adapted(job, kind))
    own = [matrix.name for matrix in build_layer(job.model, kind).matrices if not matrix.is_expert]
    launched = plain * sum(bool(module_of(name) & named) for name in own) / max(1, len(own))
    routing = 0.0
    if kind.ffn == "moe" and moe is not None:
        routing = devices * (kernels.moe_forward + kernels.expert_forward * moe.experts / layout["ep"])
    return float(launched + (routing if "moe" in named else 0.0)) / max(1.0, plain + routing)


def head_time(job: Job, layout: Layout) -> dict[str, Pass]:
    """The output head and the loss of the last stage; nothing of them runs again."""
    shape = job.model
    if not shape.vocab:
        return {}
    T = decoder_tokens(job, layout) * job.profile.head_tokens
    padded = ceil(shape.vocab / layout["tp"])
    if job.profile.pads_vocabulary:
        padded = ceil(padded / 64) * 64
    once = _head_product(job, T, padded, shape.hidden)
    loss = T * shape.vocab / layout["tp"] * kernels_of(job).logit_bytes / memory_Bps(device_of(job))
    products = 1 + job.trainable if shape.adapters is None else 1
    if layout.get("loss") == "chunked":
        chunk = ceil(T / ceil(shape.vocab / shape.hidden))
        chunks = ceil(T / chunk)
        once = chunks * _head_product(job, chunk, padded, shape.hidden)
        gradient = shape.vocab * shape.hidden * BYTES[job.formats.compute] if shape.adapters is None else 0
        loss += 2 * chunks * gradient / memory_Bps(device_of(job))
    return {"matmul": Pass(once, products * once), "loss": Pass(loss / 3, 2 * loss / 3)}
