"""What is traded among the layouts that fit: the rows that no other beats in time, memory and cost at once."""

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
