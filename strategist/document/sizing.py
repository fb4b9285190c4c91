"""A Sizing: which machines would train a model on so many tokens in time, and what that costs."""

from __future__ import annotations

from typing import Literal

from strategist.facts.model import ModelShape
from strategist.facts.resolved import Assumption
from strategist.facts.workload import Workload
from strategist.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The share of a run that is progress, and what it rests on, in seconds: the mean time from failure to failure of all the
    devices, the work between two checkpoints, the time to write one, and to start again after a failure."""

    share: float
    seconds_between_failures: float
    interval_s: float
    checkpoint_s: float
    restart_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """One choice of machines with its fastest layout. `run_seconds` are from start to end, failures included."""

    gpu: str
    gpus: int
    nodes: int
    family: str
    layout: str
    step_s: float
    peak_bytes: int
    goodput: Goodput
    run_seconds: float
    gpu_hours: float
    price_per_gpu_hour: float | None
    cost: float | None
    in_time: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Every choice that was looked at, smallest first, and of those in time the one with the fewest devices (`least`), the
    cheapest, and of all the fastest. `cheapest` compares money, or device-hours where only one kind of device is in time; it is None where neither can be compared.
    `unfinished` says what a time budget left untried; the answers are then those of what was looked at."""

    format: Literal["strategist-sizing/1"] = "strategist-sizing/1"
    made_by: str
    model: ModelShape
    workload: Workload
    deadline_s: float | None
    assumptions: tuple[Assumption, ...]
    looked_at: tuple[Machines, ...]
    least: Machines
    cheapest: Machines | None
    fastest: Machines
    unfinished: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest sequence (tokens), model (parameters) or micro-batch (sequences) that fits, with its fastest layout.
    `too_large` is the next value that was tried and does not fit; None where nothing larger is known. `positions` are those of the
    model, where sequences are asked for: no sequence is longer than learned ones, and rotary ones were made for so many."""

    format: Literal["strategist-largest/1"] = "strategist-largest/1"
    what: Literal["seq-len", "model-size", "micro-batch"]
    value: int
    too_large: int | None
    positions: int | None = None
    family: str
    layout: str
    step_s: float
    peak_bytes: int
    usable_bytes: int
    assumptions: tuple[Assumption, ...] = ()
