"""Which layers each pipeline stage owns. One rule, used by enumeration, memory, time and the Plan alike.

The layers are split into `pp * virtual_stages` contiguous chunks as equal as possible. When they do not divide, the
extra layers go to the chunks in the middle first, then to the first, never to the last: the first chunk holds the
embedding and the most micro-batches in flight, the last one the head and the loss. Which stage owns which is said in facts/runs.py.

Where stages have one chunk each the split may be weighted: the last stage owns fewer layers the more its head
multiplies, as few as make the most loaded stage lightest, and of equally good numbers the largest. Balanced stages own what
planner/balance.py finds together with how many layers each of them runs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from strategist.facts.layers import build_layer
from strategist.facts.model import LayerKind, ModelShape, layer_counts, layer_sequence
from strategist.facts.parameters import table_width
from strategist.facts.runs import runs_of
from strategist.space.candidates import Column, Reals

PASSES_OF_HEAD, PASSES_OF_LAYER = 3.0, 4.0
"""Forward and backward; and forward again, which only full recompute does, counted always: a last stage that is too short
costs more than one that is too long."""


@cache
def head_in_layers(shape: ModelShape) -> float:
    """As how many layers the head counts: its weights over those that a token meets in the mean layer. Attention is left out,
    so that the stages do not depend on the length of sequences. Layers with experts spend their time on other things than
    products: beside them no head is counted."""
    if shape.moe is not None:
        return 0.0
    counts = layer_counts(shape)
    active = sum(number * build_layer(shape, kind).active_parameters for kind, number in counts.items())
    head = shape.vocab * table_width(shape) * sum(counts.values())
    return PASSES_OF_HEAD * head / (PASSES_OF_LAYER * active) if active else 0.0


def chunk_bounds(layers: int, chunks: int, head: float = 0.0) -> tuple[tuple[int, int], ...]:
    """(first, end) of every chunk; together they cover 0..layers exactly once. The last one multiplies `head` layers more."""
    last = layers_of_the_last(layers, chunks, head)
    base, extra = divmod(layers - last, max(1, chunks - 1))
    sizes = [*[base] * (chunks - 1), last]
    favoured = [*range(1, chunks - 1), 0]
    for chunk in favoured[:extra]:
        sizes[chunk] += 1
    ends = np.cumsum(sizes).tolist()
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


@cache
def layers_of_the_last(layers: int, chunks: int, head: float) -> int:
    """An equal share or less, one layer at least where there is one for each."""
    equal = layers // chunks
    if chunks == 1 or not equal:
        return equal
    return min(range(equal, 0, -1), key=lambda own: max(own + head, -(-(layers - own) // (chunks - 1))))


def stage_chunks(
    layers: int, pp: int, virtual_stages: int, stage: int, head: float = 0.0, schedule: str = "none"
) -> tuple[tuple[int, int], ...]:
    """The chunks of one stage, in forward order."""
    bounds = chunk_bounds(layers, pp * virtual_stages, head)
    return tuple(bounds[number] for number in runs_of(schedule, pp, virtual_stages, stage))


@cache
def chunk_lengths(shape: ModelShape, pp: int, virtual_stages: int, is_weighted: bool) -> tuple[int, ...]:
    """Layers of the longest chunk of every stage whose chunks are dealt in turn."""
    layers, head = len(layer_sequence(shape)), head_in_layers(shape) if is_weighted else 0.0
    every = (stage_chunks(layers, pp, virtual_stages, stage, head) for stage in range(pp))
    return tuple(max(end - first for first, end in own) for own in every)


@cache
def kinds(shape: ModelShape) -> tuple[LayerKind, ...]:
    """The different sorts of layers of a model, in order of first appearance."""
    return tuple(dict.fromkeys(layer_sequence(shape)))


@cache
def stage_layer_counts(
    shape: ModelShape,
    pp: int,
    virtual_stages: int,
    split: tuple[int, ...] = (),
    head: float = 0.0,
    schedule: str = "none",
) -> Column:
    """How many layers of each sort every stage owns: shape (stages, kinds). `split` states the layers of every stage; without
    it they follow the rule, with the head counted as so many layers."""
    return _counted(shape, _chunks(len(layer_sequence(shape)), pp, virtual_stages, split, head, schedule))


@cache
def last_sorts(shape: ModelShape, pp: int, virtual_stages: int) -> Column:
    """The sort of the last layer of every chunk of every stage, (chunks, stages), where chunks are equal."""
    sequence, sorts = layer_sequence(shape), kinds(shape)
    ends = [[end for _, end in own] for own in _chunks(len(sequence), pp, virtual_stages, (), 0.0)]
    return np.array([[sorts.index(sequence[end - 1]) for end in own] for own in ends], dtype=np.int64).T


@cache
def first_layer_counts(
    shape: ModelShape,
    pp: int,
    virtual_stages: int,
    firsts: tuple[int, ...],
    split: tuple[int, ...] = (),
    head: float = 0.0,
) -> Column:
    """How many of the first layers of its chunks every stage owns of each sort, (stages, kinds): of each chunk as many as `firsts` says
    of its stage, or all where it has fewer."""
    every = _chunks(len(layer_sequence(shape)), pp, virtual_stages, split, head)
    chunks = [
        tuple((first, min(end, first + most)) for first, end in own) for own, most in zip(every, firsts, strict=True)
    ]
    return _counted(shape, chunks)


@cache
def every_layer_counts(
    shape: ModelShape, pp: int, virtual_stages: int, number: int, split: tuple[int, ...] = (), head: float = 0.0
) -> Column:
    """How many of its layers every stage owns of each sort that are the `number`-th of their chunk, or the second so-many-th, and so on,
    (stages, kinds)."""
    every = _chunks(len(layer_sequence(shape)), pp, virtual_stages, split, head)
    chosen = [
        tuple((place, place + 1) for first, end in own for place in range(first + number - 1, end, number))
        for own in every
    ]
    return _counted(shape, chosen)


Chunks = Sequence[tuple[tuple[int, int], ...]]
"""(first, end) of the runs of layers of every stage."""


def _chunks(
    layers: int, pp: int, virtual_stages: int, split: tuple[int, ...], head: float, schedule: str = "none"
) -> Chunks:
    if not split:
        return [stage_chunks(layers, pp, virtual_stages, stage, head, schedule) for stage in range(pp)]
    ends = np.cumsum(split).tolist()
    return [((end - own, end),) for own, end in zip(split, ends, strict=True)]


def _counted(shape: ModelShape, chunks: Chunks) -> Column:
    """Layers of each sort in some runs of every stage. Of one sort these are as many as the runs are long."""
    sequence, sorts = layer_sequence(shape), kinds(shape)
    if len(sorts) == 1:
        return np.array([[sum(end - first for first, end in own)] for own in chunks], dtype=np.int64)
    is_sort = np.array([[layer == sort for sort in sorts] for layer in sequence], dtype=np.int64)
    before = np.concatenate([np.zeros((1, len(sorts)), np.int64), np.cumsum(is_sort, axis=0)])
    none = np.zeros(len(sorts), np.int64)
    return np.array([sum((before[end] - before[first] for first, end in own), none) for own in chunks], dtype=np.int64)


@cache
def representative_stages(
    shape: ModelShape, pp: int, virtual_stages: int = 1, head: float = 0.0
) -> tuple[Column, Reals]:
    """Stage numbers that decide the peaks, and how many stages each one stands for, shape (S,) each.

    In-flight micro-batches fall from stage to stage, so of stages with the same layers the first is the worst and stands for all
    of them in the middle; the first and the last stage of all hold more than layers.
    """
    table = stage_layer_counts(shape, pp, virtual_stages, head=head)
    if pp <= 3:
        return np.arange(pp, dtype=np.int64), np.ones(pp)
    inner = table[1:-1]
    alike: dict[tuple[int, ...], list[int]] = {}
    for stage, layers in enumerate(inner.tolist(), start=1):
        alike.setdefault(tuple(layers), []).append(stage)
    stages = [0, *(same[0] for same in alike.values()), pp - 1]
    return np.array(stages, dtype=np.int64), np.array([1.0, *(float(len(same)) for same in alike.values()), 1.0])
