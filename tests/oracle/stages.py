"""Which layers a pipeline stage owns, after docs/memory_model.md, section Stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strategist.facts.model import LayerKind, ModelShape, layer_sequence

Layout = Mapping[str, Any]


def owned_layers(layers: int, pp: int, virtual_stages: int) -> list[list[int]]:
    """The layer numbers of every stage: chunk i of pp x virtual_stages belongs to stage i mod pp."""
    chunks = pp * virtual_stages
    sizes = [layers // chunks] * chunks
    takes_more = [*range(1, chunks - 1), 0, chunks - 1]
    for chunk in takes_more[: layers % chunks]:
        sizes[chunk] += 1
    owned: list[list[int]] = [[] for _ in range(pp)]
    first = 0
    for chunk, size in enumerate(sizes):
        owned[chunk % pp].extend(range(first, first + size))
        first += size
    return owned


def stage_kinds(shape: ModelShape, layout: Layout, split: Sequence[int] = ()) -> list[list[LayerKind]]:
    """The sorts of the layers of every stage, in order; `split` states how many there are of each stage."""
    sequence = layer_sequence(shape)
    owned = owned_layers(len(sequence), layout["pp"], layout["virtual_stages"])
    if split:
        owned = [list(range(sum(split[:stage]), sum(split[: stage + 1]))) for stage in range(len(split))]
    return [[sequence[number] for number in numbers] for numbers in owned]
