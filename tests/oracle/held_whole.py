"""Weights that tensor parallelism leaves whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strategist.facts.model import LayerKind, ModelShape
from tests.oracle.stages import Layout, last_stage


def whole_weights(shape: ModelShape, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> Iterator[float]:
    """Elements of each weight that tensor parallelism leaves whole and whose gradient is a sum over its ranks."""
    norms = {"layernorm": 2, "batchnorm": 2, "rmsnorm": 1, "layernorm_nobias": 1}.get(shape.norm, 0)
    h, sequence = shape.hidden, layout["sequence_parallel"]
    for kind in kinds:
        routed = kind.ffn == "moe"
        attentions = 2 if kind.cross else 1
        if sequence:
            yield from [h] * ((1 + attentions) * norms + attentions * shape.o_bias + (shape.mlp_bias and not routed))
        if routed and shape.moe is not None:
            yield h * shape.moe.experts
            yield from [h] * bool(shape.moe.shared_ffn and shape.moe.shared_gate)
        if shape.qk_norm == "head":
            yield from [shape.head_dim] * 2
    halves = 2 if shape.enc_layers else 1
    if sequence and stage == last_stage(layout) and shape.final_norm:
        yield from [h] * norms * halves
    if sequence and stage == 0:
        yield from [h] * norms * halves * shape.embed_norm
        if shape.pos == "learned" and shape.pos_rows:
            yield h * shape.pos_rows
            if shape.kind == "encdec":  # the encoder's own table; that of sound is not learned
                yield h * dict(shape.extra)["enc_pos_rows"]
