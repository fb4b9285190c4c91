"""What the shapes of Linear and Embedding weights say about a module, and whether they say everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

from strategist.facts.convolutions import STAGES, STEM, blocks
from strategist.facts.families.vision import RESNET_WIDTHS, resnet
from strategist.facts.layers import build_layer
from strategist.facts.model import MAX_LAYERS, LayerKind, ModelShape
from strategist.facts.parameters import count
from strategist.records import dataclass, replace

_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads")
_KV_HEADS = ("num_kv_heads", "n_kv_heads", "n_kv_head", "num_key_value_heads", "kv_heads")
_HEAD_DIMS = ("head_dim", "head_size", "d_head")


@dataclass(frozen=True, slots=True)
class Parts:
    """A module taken apart: its weights, its repeated blocks (`block` is the first), and all modules in it."""

    name: str
    total: int
    blocks: int
    blocks_total: int
    largest: int
    equal: bool
    modules: tuple[Any, ...]
    block: Any


def facts_of(parts: Parts) -> dict[str, Any]:
    """Fields of a shape that can be read off: vocab, hidden, tied, heads, kv_heads, head_dim, ffn_hidden, mlp_gated."""
    vocab, hidden = _table(parts)
    facts = {"vocab": vocab, "hidden": hidden or _width(parts), "tied": not _has_head(parts, vocab)}
    return facts | _attention(parts, facts["hidden"]) | _feed_forward(parts, facts["hidden"])


def decoder_of(parts: Parts) -> ModelShape | None:
    """The decoder whose layers and outer parts have exactly the module's weights, or None."""
    facts = facts_of(parts)
    if not (parts.equal and all(facts.get(name) for name in ("hidden", "heads", "ffn_hidden"))):
        return None
    for choice in _choices():
        shape = ModelShape(name="", family="module", kind="decoder", layers=parts.blocks, **facts | choice)
        if build_layer(shape, LayerKind("attention", "dense")).parameters == parts.largest:
            exact = next((ends for ends in _ends(shape, parts) if count(ends).total == parts.total), None)
            if exact is not None:
                return exact
    return None


def resnet_of(parts: Parts) -> ModelShape | None:
    """The ResNet that has exactly the module's convolutions, and as many weights, or None. Where strides lie no weight says."""
    every = (weight for _, weight in parts.modules[0].named_parameters(remove_duplicate=True))
    found: Counter[tuple[int, ...]] = Counter(tuple(weight.shape) for weight in every)
    own: Counter[tuple[int, ...]] = Counter({sizes: number for sizes, number in found.items() if len(sizes) == 4})
    heads = [(shape[0], kind) for shape in found for kind, width in RESNET_WIDTHS.items() if shape[1:] == (width,)]
    for classes, kind in heads:
        depths = _depths(own, kind)
        shape = resnet(kind, depths, classes) if depths else None
        if shape is not None and _convolutions(shape) == own and count(shape).total == parts.total:
            return shape
    return None


def _depths(convolutions: Counter[tuple[int, ...]], kind: str) -> list[int]:
    """Blocks in each stage, by their convolutions of three by three pixels; none where a stage has none, or there are too many."""
    found = [convolutions[width, width, 3, 3] for width in (STEM * 2**stage for stage in range(STAGES))]
    if kind == "basic":  # two each, of which the first of a stage but the first has fewer inputs
        found = [(number + (stage > 0)) // 2 for stage, number in enumerate(found)]
    return found if all(found) and sum(found) <= MAX_LAYERS else []


def _convolutions(shape: ModelShape) -> Counter[tuple[int, ...]]:
    """How many convolutions of each size, (outputs, inputs, pixels, pixels), a network has."""
    every = (c for block in blocks(shape.extra) for c in block.convolutions)
    return Counter((c.outputs, c.inputs, c.kernel, c.kernel) for c in every)


def _choices() -> Iterator[dict[str, Any]]:
    """Norms and biases that decoders commonly have."""
    biases = ((False,) * 3, (True,) * 3, (True, False, False), (True, True, False), (False, False, True))
    for norm, qk_norm, (qkv, out, mlp) in product(("rmsnorm", "layernorm"), ("", "head"), biases):
        yield {"norm": norm, "qk_norm": qk_norm, "qkv_bias": qkv, "o_bias": out, "mlp_bias": mlp}


def _ends(shape: ModelShape, parts: Parts) -> Iterator[ModelShape]:
    """The shape with and without a last norm and learned positions."""
    rows = max((module.num_embeddings for module in _tables(parts) if module.num_embeddings != shape.vocab), default=0)
    for final_norm, positions in product((True, False), {0, rows}):
        yield replace(shape, final_norm=final_norm, pos_rows=positions, pos="learned" if positions else "rope")


def _tables(parts: Parts) -> list[Any]:
    return [m for m in parts.modules if isinstance(getattr(m, "num_embeddings", None), int) and isinstance(getattr(m, "embedding_dim", None), int)]  # fmt: skip


def _table(parts: Parts) -> tuple[int, int]:
    """Rows and width of the largest Embedding; zeros without one. Its rows are no vocabulary that the module writes where they are added up
    (EmbeddingBag), or where what it lists last is a Linear of other outputs: a recommender, a classifier."""
    found = [(module.num_embeddings, module.embedding_dim, module) for module in _tables(parts)]
    vocab, hidden, table = max(found, key=lambda one: one[:2], default=(0, 0, None))
    is_bag = any(base.__name__ == "EmbeddingBag" for base in type(table).__mro__)
    ends = getattr(parts.modules[-1], "out_features", vocab) not in (vocab, hidden)
    return (0 if is_bag or (ends and not _heads(parts, vocab)) else vocab), hidden


def plain_tables(parts: Parts) -> tuple[tuple[int, int], ...]:
    """Rows and width of every Embedding and EmbeddingBag, or none where one of them does more than give rows (a row of padding, a
    limit on norms, gradients by frequency) or is somebody else's weight too."""
    tables = _tables(parts)
    owned = Counter(id(weight) for inner in parts.modules for weight in vars(inner).get("_parameters", {}).values())
    if any(owned[id(table.weight)] > 1 or _does_more(table) for table in tables):
        return ()
    return tuple((table.num_embeddings, table.embedding_dim) for table in tables)


def _does_more(table: Any) -> bool:
    """Whether something beside rows is asked of a table; row 0 may be the padding."""
    asked = (getattr(table, name, None) for name in ("padding_idx", "max_norm", "scale_grad_by_freq"))
    return any(value is not None and value is not False for value in asked)


def _has_head(parts: Parts, vocab: int) -> bool:
    """True when some Linear maps to the vocabulary with weights of its own."""
    tables = {id(module.weight) for module in _tables(parts)}
    return any(id(head.weight) not in tables for head in _heads(parts, vocab))


def _heads(parts: Parts, vocab: int) -> list[Any]:
    """The modules that map to the vocabulary; none where there is no vocabulary."""
    return [module for module in parts.modules if vocab and getattr(module, "out_features", None) == vocab]


def _matrices(parts: Parts) -> list[tuple[int, int]]:
    """(outputs, inputs) of every two-dimensional weight of one block."""
    shapes = [tuple(weight.shape) for _, weight in parts.block.named_parameters(remove_duplicate=True)]
    return [(shape[0], shape[1]) for shape in shapes if len(shape) == 2]


def _width(parts: Parts) -> int:
    """The size that most inputs and outputs of a block have."""
    sides = [side for shape in _matrices(parts) for side in shape]
    return max(sides, key=sides.count, default=0)


def _attribute(parts: Parts, names: tuple[str, ...]) -> int:
    """The first positive whole number under one of some attribute names inside a block."""
    inner = [module for _, module in parts.block.named_modules()]
    values = (getattr(module, name, None) for name in names for module in inner)
    return next((value for value in values if type(value) is int and value > 0), 0)


def _attention(parts: Parts, hidden: int) -> dict[str, int]:
    heads = _attribute(parts, _HEADS)
    if not heads or (not _attribute(parts, _HEAD_DIMS) and hidden % heads):
        return {}
    kv = _attribute(parts, _KV_HEADS) or heads
    return {"heads": heads, "kv_heads": kv, "head_dim": _attribute(parts, _HEAD_DIMS) or hidden // heads}


def _feed_forward(parts: Parts, hidden: int) -> dict[str, Any]:
    """The widest size that a block maps to and back from; two maps to it, or a fused one, are a gate and its value."""
    shapes = _matrices(parts)
    back = [inputs for outputs, inputs in shapes if outputs == hidden]
    widths = [width for width in back if (width, hidden) in shapes or (2 * width, hidden) in shapes]
    wide = max((width for width in widths if width != hidden), default=0)
    gated = shapes.count((wide, hidden)) > shapes.count((hidden, wide)) or (2 * wide, hidden) in shapes
    return {"ffn_hidden": wide, "mlp_gated": gated} if wide else {}
