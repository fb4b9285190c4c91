"""Adapters beside frozen matrices, one matrix at a time (docs/memory_model.md, Adapters), from the widths of the model alone."""

from __future__ import annotations

from collections.abc import Sequence

from strategist.facts.job import Job
from strategist.facts.model import LayerKind, ModelShape, layer_counts
from strategist.facts.profile import BYTES
from tests.oracle.parameters import shards, up
from tests.oracle.stages import Layout

BITS = 4 + (8 + 32 / 256) / 64
"""Of a weight that is quantised twice: its code, and its parts of a block's scale and of that scale's scale."""


def sizes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the matrices of a layer without experts."""
    h, q, kv, f = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.ffn_hidden
    gate = {"gate": (h, f)} if shape.mlp_gated else {}
    return {"q": (h, q), "k": (h, kv), "v": (h, kv), "o": (q, h), **gate, "up": (h, f), "down": (f, h)}


def targets(shape: ModelShape) -> list[tuple[int, int]]:
    """(inputs, outputs) of the matrices with adapters."""
    chosen = shape.adapters.targets if shape.adapters else ()
    return [size for name, size in sizes(shape).items() if name in chosen]


def moved_beside(job: Job) -> tuple[float, float]:
    """Elements per token that forward and backward read and write beside the products of all adapters of a layer."""
    inputs, outputs = (sum(sizes) for sizes in zip(*targets(job.model), strict=True))
    two_gradients_added = 3 * inputs
    if job.profile.kernels.adapts == "joint":  # the product reads what it is added to
        return outputs, two_gradients_added
    read_two_write_one, scaled = 3 * outputs, 2 * outputs
    if job.profile.kernels.adapts == "compiled":
        return read_two_write_one, two_gradients_added + scaled
    dropped = (2 + 1 / 2) * inputs
    if (
        job.profile.kernels.adapts == "widened"
        and job.model.method == "lora"
        and job.workload.precision not in ("fp32", "tf32")
    ):
        there, back, dropped_wide = (2 + 4) / 2, (4 + 2) / 2, (4 + 1 + 4) / 2
        dropped = (there + dropped_wide + back) * inputs
    return dropped + scaled + read_two_write_one, two_gradients_added + dropped + scaled


def trained(shape: ModelShape, kinds: Sequence[LayerKind], k: int) -> int:
    """Elements of all adapters of a stage on the fullest of k shards."""
    r = shape.adapters.rank if shape.adapters else 0
    return len(kinds) * sum(up(r, k) * inputs + up(outputs, k) * r for inputs, outputs in targets(shape))


def frozen_matrices(shape: ModelShape, kind: LayerKind, *, experts: bool) -> list[tuple[int, int, int]]:
    """Of a layer's routed experts, or of all its other matrices: rows by which ranks share one, what a row has, how many there are."""
    h, moe, every = shape.hidden, shape.moe, sizes(shape)
    gates = 1 if shape.mlp_gated else 0
    if kind.ffn != "moe" or moe is None:
        return [] if experts else [(outputs, inputs, 1) for inputs, outputs in every.values()]
    if experts:
        return [(moe.ffn, moe.latent or h, (2 + gates) * moe.experts)]
    found = [(outputs, inputs, 1) for name, (inputs, outputs) in every.items() if name in ("q", "k", "v", "o")]
    found += [(moe.experts, h, 1)]
    found += [(moe.latent, h, 1), (h, moe.latent, 1)] if moe.latent else []
    if moe.shared_ffn:
        found += [(moe.shared_ffn, h, 1 + gates), (h, moe.shared_ffn, 1)]
        found += [(1, h, 1)] if moe.shared_gate else []
    return found


def packed(shape: ModelShape, kinds: Sequence[LayerKind], k: int, *, experts: bool) -> int:
    """Elements that rest in four bits on the fullest of k shards, of routed experts or of all else."""
    if shape.method != "qlora":
        return 0
    every = [matrix for kind in kinds for matrix in frozen_matrices(shape, kind, experts=experts)]
    return sum(up(rows, k) * width * copies for rows, width, copies in every)


def packed_in_all(shape: ModelShape, kinds: Sequence[LayerKind], k: int) -> int:
    """The same of all matrices."""
    return sum(packed(shape, kinds, k, experts=experts) for experts in (False, True))


def unpacking(job: Job, number: float) -> tuple[float, float]:
    """Bytes per weight in forward and in backward: NF4 read and written in both; GPTQ's word shifted, narrowed, masked, less its zero, scaled, once."""
    if job.profile.kernels.unpacks == "gptq":
        return (0.5 + 4) + (4 + 1) + (1 + 1) + (1 + 1) + (1 + 2), 0.0
    return BITS / 8 + number, BITS / 8 + number


def states(job: Job, layout: Layout, kinds: Sequence[LayerKind], whole: float, sharded: float) -> dict[str, float]:
    """Bytes of weights, gradients and moments; `whole` and `sharded` are elements with the adapters."""
    k = shards(layout)
    formats, work = job.formats, job.workload
    kept, all_ = (k, sharded) if layout["zero"] >= 2 else (1, whole)
    own, four = trained(job.model, kinds, kept), packed_in_all(job.model, kinds, kept)
    c, g = BYTES[formats.compute], BYTES[formats.gradient]
    return {
        "parameters": c * (all_ - own - four) + BITS / 8 * four + g * own,
        "gradients": g * own,
        "optimizer": job.profile.state_bytes(work.optimizer, work.precision) * trained(job.model, kinds, kept),
    }


def travelling(job: Job) -> float:
    """What a gathered weight of a layer takes, over the bytes of the compute format, one layer of each sort together."""
    if job.model.method != "qlora":
        return 1.0
    c, kinds = BYTES[job.formats.compute], list(layer_counts(job.model))
    four, own = packed_in_all(job.model, kinds, 1), trained(job.model, kinds, 1)
    return (BITS / 8 * four + c * own) / (c * (four + own))


def low_copies(job: Job, elements: float) -> float:
    """Bytes of copies of adapters in the compute format, where they rest in a wider one."""
    c, g = BYTES[job.formats.compute], BYTES[job.formats.gradient]
    return c * elements if c < g else 0.0


def unpacked(job: Job) -> float:
    """Bytes of the largest matrix when it multiplies; each expert's is brought back by itself."""
    if job.model.method != "qlora":
        return 0.0
    every = (frozen_matrices(job.model, kind, experts=e) for kind in layer_counts(job.model) for e in (False, True))
    return BYTES[job.formats.compute] * max(rows * width for matrices in every for rows, width, _ in matrices)


def first_norm(job: Job, layout: Layout, tokens: float) -> float:
    """What the first layer's norm would keep for the gradient of the embedding."""
    if job.model.adapters is None or layout["recompute"] != "none":
        return 0.0
    statistics = 4 if job.model.norm in ("rmsnorm", "rmsnorm_nonparam") else 8
    return tokens * (job.model.hidden * BYTES[job.formats.compute] + statistics)
