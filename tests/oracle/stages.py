"""Which layers a pipeline stage owns, after docs/memory_model.md, section Stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strategist.facts.job import Job
from strategist.facts.model import LayerKind, ModelShape, layer_sequence
from strategist.facts.parameters import count, outer_parameters

Layout = Mapping[str, Any]
IN_A_V = ("zbv", "dualpipev")
"""Schedules whose stages have a run of layers on the way down and one on the way up."""


def owned_layers(layers: int, pp: int, virtual_stages: int, head: float, schedule: str = "none") -> list[list[int]]:
    """The layer numbers of every stage: chunk i of pp x virtual_stages belongs to stage i mod pp, or in a V goes down and up again."""
    chunks = pp * virtual_stages
    sizes = _dealt(layers, chunks, head)
    owned: list[list[int]] = [[] for _ in range(pp)]
    first = 0
    for chunk, size in enumerate(sizes):
        owner = min(chunk, 2 * pp - 1 - chunk) if schedule in IN_A_V else chunk % pp
        owned[owner].extend(range(first, first + size))
        first += size
    return owned


def _dealt(layers: int, chunks: int, head: float) -> list[int]:
    """Layers of every chunk: of all numbers for the last that leave it an equal share or less, and one where there are as
    many layers as chunks, the one under which the most loaded chunk has the least; of several the largest."""
    if chunks == 1:
        return [layers]
    best: list[int] = []
    for last in range(min(1, layers // chunks), layers // chunks + 1):
        sizes = [0] * (chunks - 1)
        for layer in range(layers - last):  # one by one, round by round, middle chunks before the first
            sizes[(layer + 1) % (chunks - 1)] += 1
        sizes.append(last)
        if not best or max(*sizes[:-1], last + head) <= max(*best[:-1], best[-1] + head):
            best = sizes
    return best


def last_stage(layout: Layout) -> int:
    """The stage with the head and the loss."""
    return 0 if layout["schedule"] in IN_A_V else int(layout["pp"]) - 1


def turns_back(layout: Layout, stage: int) -> bool:
    """Whether a stage hands results to itself, in the middle of a V."""
    return bool(layout["schedule"] in IN_A_V and stage == layout["pp"] - 1)


def head_in_layers(shape: ModelShape) -> float:
    """As how many layers the head counts: three passes over its weights, over four of the mean layer's."""
    if shape.moe is not None:
        return 0.0
    weights = (count(shape).active - outer_parameters(shape).total) / len(layer_sequence(shape))
    return 0.75 * shape.vocab * (shape.emb_dim or shape.hidden) / weights


def computed_again(job: Job, layout: Layout, stage: int, layers: int) -> list[bool]:
    """Of each layer of a stage, in order, whether recomputation looks at it: the first few of every chunk, every so-many-th, or all."""
    if layout["recompute"] == "none":
        return [False] * layers
    asked = layout.get("recompute_layers", 0)
    own = depths(layout)
    first = job.recompute_layers[stage] if job.recompute_layers else own[stage] if own else asked or layers
    chunk = max(1, layers // layout["virtual_stages"])
    every = layout.get("recompute_every", 0)
    return [(number % chunk + 1) % every == 0 if every else number % chunk < first for number in range(layers)]


def depths(layout: Layout) -> list[int]:
    """How many layers of its chunks each stage runs again, of a layout that says it of each; nothing else."""
    if layout.get("recompute_depth", "alike") == "alike":
        return []
    return [layout.get(f"recompute_stage_{stage}", 0) for stage in range(layout["pp"])]


def stage_kinds(job: Job, layout: Layout) -> list[list[LayerKind]]:
    """The sorts of the layers of every stage, in order; the job may state how many there are of each stage, and balanced stages do."""
    sequence, split = layer_sequence(job.model), job.split
    head = head_in_layers(job.model) if layout["stage_split"] == "weighted" else 0.0
    owned = owned_layers(len(sequence), layout["pp"], layout["virtual_stages"], head, layout["schedule"])
    if layout["stage_split"] == "balanced":
        split = tuple(layout[f"stage_layers_{stage}"] for stage in range(layout["pp"]))
    if split:
        owned = [list(range(sum(split[:stage]), sum(split[: stage + 1]))) for stage in range(len(split))]
    return [[sequence[number] for number in numbers] for numbers in owned]
