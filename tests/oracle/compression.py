"""Hooks of DDP: what ranks that compress gradients send, hold and compute (docs/time_model.md, docs/memory_model.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from strategist.facts.job import Job
from strategist.facts.layers import build_layer
from strategist.facts.model import ModelShape, layer_sequence
from strategist.facts.parameters import outer_parameters
from strategist.facts.profile import BYTES
from tests.oracle.parameters import vocabulary
from tests.oracle.stages import Layout

CASTS, LOW_RANK, LARGEST = ("bf16", "fp16"), "powersgd", "topk"
RANK, ONE_IN = 4, 100


def word_of(layout: Layout) -> str:
    """What the layout does to gradients."""
    return str(layout.get("compression", "none"))


def gradients(shape: ModelShape) -> list[tuple[int, int]]:
    """(first dimension, product of the others) of every tensor in the order of DDP's buckets; (elements, 1) of vectors."""
    outer, width = outer_parameters(shape), vocabulary(shape, 1, 1)
    rows = shape.vocab or 1
    table = (rows, width // rows)
    bias = max(0, outer.head - (0 if shape.tied else width))
    come = [*([] if shape.tied else [table]), (bias, 1), (outer.final_norm, 1), (outer.extra, 1)]
    for kind in reversed(layer_sequence(shape)):
        layer = build_layer(shape, kind)
        for m in reversed(layer.matrices):
            if m.is_expert:
                inner, other = (m.outputs, m.inputs) if m.cut == "column" else (m.inputs, m.outputs)
                come += [(inner, m.copies * other), (m.copies * m.outputs * m.bias, 1)]
            else:
                come += m.copies * [(m.outputs, m.inputs), (m.outputs * m.bias, 1)]
        come += [(vector.size, 1) for vector in layer.vectors]
    places = max(1, shape.pos_rows)
    come += [
        (outer.embedding_norm, 1),
        (places, outer.position // places),
        table,
        (outer.projection, 1),
        (outer.input, 1),
    ]
    return [(first, rest) for first, rest in come if first * rest]


def buckets(job: Job) -> list[int]:
    """Elements of DDP's buckets: a first of 1 MiB, further ones of 25."""
    found, held = [], 0
    for first, rest in gradients(job.model):
        held += first * rest
        if held * BYTES[job.formats.gradient] >= (25 if found else 1) * 2**20:
            found.append(held)
            held = 0
    return found + [held] * (held > 0)


def factors(shape: ModelShape) -> tuple[int, int, int]:
    """Elements that PowerSGD multiplies, and those of its left and right factors: tensors that these make less than half as large."""
    multiplied = left = right = 0
    for first, rest in gradients(shape):
        rank = min(first, rest, RANK)
        if 2 * rank * (first + rest) < first * rest:
            multiplied, left, right = multiplied + first * rest, left + rank * first, right + rank * rest
    return multiplied, left, right


def sent(job: Job, layout: Layout) -> Iterator[tuple[str, float, str, int]]:
    """(operation, bytes, what it runs behind, in how many pieces) of one step."""
    own, word = buckets(job), word_of(layout)
    if word in CASTS:
        yield "all-reduce", 2 * sum(own), "backward", len(own)
    elif word == LARGEST:
        chosen = sum(_chosen(size) for size in own)
        yield "all-gather", layout["dp_replicate"] * 8 * chosen, "backward", len(own)
    else:
        multiplied, left, right = factors(job.model)
        for elements in (sum(own) - multiplied, left, right):
            yield "all-reduce", 4 * elements, "", len(own)


def _chosen(size: int) -> int:
    return max(1, round(size / ONE_IN))


def seconds(job: Job, layout: Layout, memory_Bps: float, FLOPs: Callable[[], float]) -> tuple[float, float]:
    """Elementwise work on all gradients, and PowerSGD's products."""
    elements, word = sum(buckets(job)), word_of(layout)
    if word in CASTS:  # read 4 and write 2, twice 2, read 2 and write 4
        return 16 * elements / memory_Bps, 0.0
    if word == LARGEST:  # three numbers added, two for magnitudes, five looks, two copied, one cleared
        return 4 * (3 + 2 + 5 + 2 + 1) * elements / memory_Bps, 0.0
    multiplied, left, right = factors(job.model)
    work = RANK * (3 * 2 * multiplied + 4 * (left + right))
    return 4 * (3 + 2 + 3) * elements / memory_Bps, max(4 * 3 * multiplied / memory_Bps, work / FLOPs())


def remembered(job: Job, layout: Layout) -> float:
    """Bytes that last: what was left out, and both factors."""
    word = word_of(layout)
    if word not in (LOW_RANK, LARGEST):
        return 0.0
    _, left, right = factors(job.model) if word == LOW_RANK else (0, 0, 0)
    return BYTES[job.formats.gradient] * (sum(buckets(job)) + left + right)


def passing(job: Job, layout: Layout, size: int) -> float:
    """Bytes beside a bucket of so many elements while it is on its way."""
    g, word = BYTES[job.formats.gradient], word_of(layout)
    if word in CASTS:
        return 2 * size
    if word == LOW_RANK:
        left_alone = 1 - factors(job.model)[0] / sum(buckets(job))
        return g * size * (2 + left_alone)
    k = _chosen(size)
    return max(g * size + (8 + g) * k, (8 + g) * k + (1 + layout["dp_replicate"]) * (4 + g) * k)
