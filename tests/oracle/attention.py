"""What softmax attention multiplies (docs/time_model.md)."""

from __future__ import annotations

from strategist.facts.job import Job
from strategist.facts.model import LayerKind, ModelShape

ATTENTION = ("attention", "sliding", "mla")


def lengths(job: Job, kind: LayerKind) -> tuple[int, int]:
    """Tokens of a sequence that a layer sees, and those that an encoder sees."""
    inputs = job.workload.seq_len
    return (job.workload.target_len or inputs) if kind.cross else inputs, inputs


def attention_FLOP(shape: ModelShape, kind: LayerKind, seq_len: int, inputs: int) -> float:
    """Forward FLOP per token of one layer's softmax attention, and of that to the keys of an encoder's inputs."""
    total = 0.0
    if kind.mixer in ATTENTION:
        span = min(shape.window or seq_len, seq_len) if kind.mixer == "sliding" else seq_len
        causal = 1 - span / (2 * seq_len) if shape.kind in ("decoder", "hybrid") else 1.0
        width = 2 * shape.heads * shape.head_dim
        if kind.mixer == "mla" and shape.mla is not None:
            width = shape.heads * (shape.mla.qk_nope + shape.mla.qk_rope + shape.mla.v_dim)
        total += 2 * span * causal * width
    if kind.cross:
        total += 4 * shape.heads * shape.head_dim * inputs
    return total
