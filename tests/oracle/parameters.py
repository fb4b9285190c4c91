"""Weights of one pipeline stage on its fullest rank, one matrix at a time (docs/memory_model.md, Parameters of a stage)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from strategist.facts.job import Job
from strategist.facts.layers import Matrix, Vector, build_layer
from strategist.facts.model import LayerKind, ModelShape, layer_counts
from strategist.facts.parameters import outer_parameters, table_width
from tests.oracle.served import gone
from tests.oracle.stages import Layout, last_stage, stage_kinds
from tests.oracle.tiles import largest_slice, sliced_elements, tiles_of


def up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def shards(layout: Layout) -> int:
    """n: ranks that share one copy of the dense state."""
    return int(layout["dp_shard"] * layout["cp"])


def expert_ranks(layout: Layout) -> int:
    """Ranks that hold the same expert shard: dp x cp x tp / (ep x etp)."""
    dense = layout["dp_replicate"] * layout["dp_shard"] * layout["cp"] * layout["tp"]
    return int(dense // (layout["ep"] * layout["etp"]))


def expert_shards(layout: Layout) -> float:
    """n_e: ranks that share one expert shard's state."""
    return max(1.0, expert_ranks(layout) / layout["dp_replicate"])


def matrix_elements(matrix: Matrix, tp: int, k: int) -> int:
    """One dense matrix on the fullest of k shards, its bias included."""
    if matrix.cut == "column":
        one = up(up(matrix.outputs, tp), k) * matrix.inputs
        bias = up(up(matrix.outputs, tp), k)
    elif matrix.cut == "row":
        one = up(matrix.outputs, k) * up(matrix.inputs, tp)
        bias = up(matrix.outputs, k)
    else:
        one = up(matrix.outputs, k) * matrix.inputs
        bias = up(matrix.outputs, k)
    return matrix.copies * (one + (bias if matrix.bias else 0))


def vector_elements(vector: Vector, tp: int, k: int) -> int:
    """One small weight on the fullest of k shards."""
    return up(up(vector.size, tp) if vector.cut else vector.size, k)


def expert_elements(matrix: Matrix, ep: int, etp: int, k: int) -> int:
    """The copies of one expert matrix that the fullest of k shards holds; the hidden width is what is cut and sharded."""
    if matrix.cut == "column":
        one, bias = up(up(matrix.outputs, etp), k) * matrix.inputs, up(matrix.outputs, etp)
    else:
        one, bias = up(up(matrix.inputs, etp), k) * matrix.outputs, matrix.outputs
    return up(matrix.copies, ep) * (one + (up(bias, k) if matrix.bias else 0))


@cache
def dense_of_layer(shape: ModelShape, kind: LayerKind, tp: int, k: int, tiles: int = 1) -> int:
    """Everything of one layer but the routed experts."""
    layer = build_layer(shape, kind)
    if tiles > 1:
        matrices = sum(sliced_elements(shape, kind, m, tiles, tp, k) for m in layer.matrices)
    else:
        matrices = sum(matrix_elements(m, tp, k) for m in layer.matrices if not m.is_expert)
    return matrices + sum(vector_elements(v, tp, k) for v in layer.vectors)


@cache
def experts_of_layer(shape: ModelShape, kind: LayerKind, ep: int, etp: int, k: int = 1) -> int:
    """The routed experts of one layer that the fullest of k shards holds."""
    return sum(expert_elements(m, ep, etp, k) for m in build_layer(shape, kind).matrices if m.is_expert)


def vocabulary(shape: ModelShape, tp: int, k: int) -> int:
    """The token table, or the output head."""
    return up(up(shape.vocab, tp), k) * table_width(shape)


def before(shape: ModelShape, tp: int, k: int) -> int:
    """What lies in front of the first layer."""
    rest = outer_parameters(shape).before - shape.vocab * table_width(shape)
    return vocabulary(shape, tp, k) + up(rest, k)


def behind(shape: ModelShape, tp: int, k: int, pp: int) -> int:
    """What lies behind the last layer; a tied head counts only where the table is on another stage."""
    own_head = 0 if shape.tied else shape.vocab * table_width(shape)
    rest = up(outer_parameters(shape).after - own_head, k)
    counts = not shape.tied or pp > 1
    return rest + (vocabulary(shape, tp, k) if counts else 0)


@dataclass(frozen=True)
class Held:
    """Elements of one stage: `dense` and `experts` in all (outer parts are dense), the outer parts, and the widest layer
    of the whole model."""

    dense: float
    experts: float
    before: float
    behind: float
    layers: float
    widest: float

    @property
    def all(self) -> float:
        """Everything the stage holds."""
        return self.dense + self.experts


def held(shape: ModelShape, layout: Layout, stage: int, kinds: Sequence[LayerKind], *, sharded: bool) -> Held:
    """What one stage holds, whole or sharded."""
    tp, ep, etp, pp = (layout[name] for name in ("tp", "ep", "etp", "pp"))
    k, k_experts = (shards(layout), int(expert_shards(layout))) if sharded else (1, 1)
    tiles = tiles_of(shape, layout)
    dense_by = {kind: dense_of_layer(shape, kind, tp, k, tiles) for kind in set(kinds)}
    experts_by = {kind: experts_of_layer(shape, kind, ep, etp, k_experts) for kind in set(kinds)}
    dense, experts = [dense_by[kind] for kind in kinds], [experts_by[kind] for kind in kinds]
    away = gone(shape, layout)
    in_front = before(shape, tp, k) - away[0] if stage == 0 else 0
    at_end = behind(shape, tp, k, pp) - away[1] if stage == last_stage(layout) else 0
    return Held(
        dense=sum(dense) + in_front + at_end,
        experts=sum(experts),
        before=in_front,
        behind=at_end,
        layers=sum(dense) + sum(experts),
        widest=max(
            largest_slice(shape, kind, tiles, tp, 1)
            if tiles > 1
            else dense_of_layer(shape, kind, tp, 1) + experts_of_layer(shape, kind, ep, etp)
            for kind in layer_counts(shape)
        ),
    )


def padded(shape: ModelShape, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> Held:
    """What all shards of one stage hold together."""
    tp, ep, etp = (layout[name] for name in ("tp", "ep", "etp"))
    k, k_experts = shards(layout), int(expert_shards(layout))
    own = held(shape, layout, stage, kinds, sharded=True)

    tiles = tiles_of(shape, layout)

    def of_layer(kind: LayerKind) -> int:
        return k * dense_of_layer(shape, kind, tp, k, tiles) + k_experts * experts_of_layer(
            shape, kind, ep, etp, k_experts
        )

    return Held(
        dense=k * own.dense,
        experts=k_experts * own.experts,
        before=k * own.before,
        behind=k * own.behind,
        layers=sum(of_layer(kind) for kind in kinds),
        widest=max(
            largest_slice(shape, kind, tiles, tp, k) if tiles > 1 else of_layer(kind) for kind in layer_counts(shape)
        ),
    )


def tensors_of(
    shape: ModelShape, layout: Layout, stage: int, kinds: Sequence[LayerKind], *, experts: bool
) -> list[int]:
    """Elements of every single tensor of one stage: of the routed experts, all matrices of one kind in one, or of the rest."""
    found: list[int] = []
    tp, is_last = layout["tp"], stage == last_stage(layout)
    for kind in kinds:
        layer = build_layer(shape, kind)
        for m in (m for m in layer.matrices if m.is_expert == experts):
            cut, copies = (layout["etp"], up(m.copies, layout["ep"])) if m.is_expert else (tp, m.copies)
            plain = replace(m, copies=1, bias=False)
            one = matrix_elements(plain, cut, 1)
            bias = [matrix_elements(replace(m, copies=1), cut, 1) - one] if m.bias else []
            together = [copies * size for size in (one, *bias)]
            found += together if m.is_expert else [one, *bias] * copies
        for v in () if experts else layer.vectors:
            found += _pieces(shape, v, vector_elements(v, tp, 1), tp)
    if experts:
        return found
    outer, table = outer_parameters(shape), vocabulary(shape, tp, 1)
    if stage == 0:
        found += [table, *positions_of(shape), outer.projection, outer.input, *_norm(shape, outer.embedding_norm)]
    if is_last:
        own_bias = outer.head - (0 if shape.tied else shape.vocab * table_width(shape))
        found += [*_norm(shape, outer.final_norm), own_bias, outer.extra]
        found += [] if shape.tied and layout["pp"] == 1 else [table]
    return found


def positions_of(shape: ModelShape) -> list[int]:
    """Elements of each table of positions, that of an encoder in front of a decoder first."""
    every = outer_parameters(shape).position
    if not shape.enc_layers:
        return [every]
    more = dict(shape.extra)
    encoder = (
        shape.hidden * more["enc_pos_rows"] if "enc_pos_rows" in more else shape.heads * more.get("rel_buckets", 0)
    )
    return [encoder, every - encoder]


def _norm(shape: ModelShape, size: int) -> list[int]:
    """A norm has a weight and, in layer norms, a bias."""
    count = 2 if shape.norm in ("layernorm", "batchnorm") else 1
    count *= 2 if shape.enc_layers else 1  # one in each half
    return [size // count] * count if size else []


def _pieces(shape: ModelShape, vector: Vector, size: int, tp: int) -> list[int]:
    """The tensors that are listed as one vector."""
    if vector.name in ("qkv_bias", "cross_qkv_bias"):
        keys = min(size // 3, up(shape.kv_heads * shape.head_dim, tp))
        return [size - 2 * keys, keys, keys]
    if vector.name == "qk_norm" and shape.qk_norm in ("full", "per_head"):  # one weight for queries, one for keys
        keys = min(size, up(shape.kv_heads * shape.head_dim, tp))
        return [size - keys, keys]
    one = {"norms": shape.hidden, "qk_norm": shape.head_dim}.get(vector.name, size)
    return [one] * (size // one) + [size % one] * (size % one > 0) if one else []


def all_stages(job: Job, layout: Layout, *, sharded: bool) -> list[Held]:
    """What every stage holds."""
    stages = stage_kinds(job, layout)
    return [held(job.model, layout, stage, kinds, sharded=sharded) for stage, kinds in enumerate(stages)]
