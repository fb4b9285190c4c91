"""A Sweep: which family wins for every size of model on every number of nodes of every kind of device."""

from __future__ import annotations

from typing import Literal

from strategist.document.plan import Policy
from strategist.facts.resolved import Assumption
from strategist.facts.workload import Precision
from strategist.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One question and the layout that wins it. `family` is None where nothing is legal and fits; then so is the rest. With
    `unfinished` a time budget ran out: the layout is the best that was found until then, or none was looked for."""

    model_size: str
    gpu: str
    nodes: int
    gpus: int
    precision: Precision
    family: str | None = None
    layout: str | None = None
    step_s: float | None = None
    peak_bytes: int | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    unfinished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Cells by device, size and nodes, in the order in which these were named."""

    format: Literal["strategist-sweep/1"] = "strategist-sweep/1"
    made_by: str
    policy: Policy
    assumptions: tuple[Assumption, ...]
    cells: tuple[Cell, ...]
