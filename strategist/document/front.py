"""What is traded among the layouts that fit, the rows that no other beats in time, memory and cost at once; and which
assumption, changed by how much, would change the choice."""

from __future__ import annotations

from strategist.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontRow:
    """One layout on `gpus` devices. `gpu_hours_per_step` is what it costs; money only where a price is known."""

    gpus: int
    nodes: int
    family: str
    layout: str
    step_ns: int
    peak_bytes: int
    gpu_hours_per_step: float
    cost_per_step: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Every row is undominated among the `fitting` layouts of all the `sizes` (devices in use) that were searched, and
    each of those is dominated by a row or equal to it. Rows are in order of time."""

    sizes: tuple[int, ...]
    fitting: int
    rows: tuple[FrontRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An assumption under which another layout wins: at `factor` times what is assumed, while at `holds_at` times, the next
    one that was tried, the choice is still the plan's. Both were planned again. Without `layout` nothing fits there."""

    assumption: str
    flag: str
    unit: str
    assumed: float
    value: float
    factor: float
    holds_at: float
    family: str | None
    layout: str | None
    step_s: float | None
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Which single assumption would change the choice, all others as they are. `turns` has the nearest factor below 1 and
    above 1 of every assumption that does, nearest first; `steady` names those that no factor from `low` to `high` that was
    tried changed it under. A layout is the same whatever its micro-batch."""

    low: float
    high: float
    turns: tuple[Turn, ...]
    steady: tuple[str, ...]
