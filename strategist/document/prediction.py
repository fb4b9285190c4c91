"""A Prediction: what one given layout is expected to cost, whether it is allowed, and whether it fits."""

from __future__ import annotations

from typing import Literal

from strategist.document.estimate import MemoryLedger, TimeLedger
from strategist.document.plan import Hint, Mesh, Strategy, batch_identity
from strategist.facts.hardware import Cluster
from strategist.facts.model import ModelShape
from strategist.facts.resolved import Assumption
from strategist.facts.workload import Workload
from strategist.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule of legality that the layout breaks: its sentence with the numbers in it, what to do, and its source."""

    rule: str
    code: str
    sentence: str
    hint: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One layout, judged. `framework` names the profile whose kernels, formats and habits count; `shortfall` says
    what a layout that does not fit lacks (empty where it fits), and `over_bytes` is what the peak exceeds the usable memory of a device
    by (0 where only the host's is too small); an illegal layout is priced as if it could run."""

    format: Literal["strategist-prediction/1"] = "strategist-prediction/1"
    made_by: str
    cluster: Cluster
    model: ModelShape
    workload: Workload
    framework: str
    assumptions: tuple[Assumption, ...]
    layout: str
    mesh: Mesh
    strategy: Strategy
    legal: bool
    violations: tuple[Violation, ...]
    fits: bool
    shortfall: str
    over_bytes: int
    memory: MemoryLedger
    time: TimeLedger
    hints: tuple[Hint, ...] = ()

    @property
    def batch_identity(self) -> str:
        """`global_batch = micro_batch x accumulation x dp_replicate x dp_shard`, with the numbers."""
        return batch_identity(self.mesh, self.strategy)

    @property
    def hardware_is_assumed(self) -> bool:
        """True when nobody named the machines."""
        return self.cluster.origin == "assumed"
