"""A number that knows how sure it is, and the two ledgers whose terms add up exactly."""

from __future__ import annotations

from typing import Literal

from strategist.facts.hardware import Basis
from strategist.records import dataclass

MEMORY_TERMS = (
    "parameters", "gradients", "optimizer", "activations", "logits", "gather_buffers", "bucket_buffers",
    "pipeline_buffers", "temporaries", "runtime", "slack",
)  # fmt: skip
"""Every byte has one home. allocated = all but runtime and slack; reserved = allocated + slack; device = reserved + runtime."""

MOMENTS = ("loss", "backward of the last layer", "end of backward", "optimizer step")
"""Where a step can peak: at the loss with every activation held, while the layers' backward runs, when it ends and the last
gradients are reduced, and when the update runs."""

TIME_TERMS = (
    "matmul", "attention", "elementwise", "loss", "moe_dispatch", "host", "tp", "cp", "ep", "pp", "dp", "bubble",
    "straggler", "optimizer", "offload",
)  # fmt: skip
"""Every second has one home: compute on the critical path, exposed communication per axis, idle time, the update."""

Unit = Literal["B", "s", "FLOP/s", "B/s", "1"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 80 % interval, its unit and how it is known."""

    value: float
    low: float
    high: float
    unit: Unit
    basis: Basis


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """One home of bytes at the peak moment."""

    name: str
    bytes: int
    basis: Basis = "derived"


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The ledger of one pipeline stage at its worst moment of the step."""

    stage: int
    moment: str
    terms: tuple[MemoryTerm, ...]

    def term(self, name: str) -> int:
        """Bytes of one term; 0 when the stage has none."""
        return sum(t.bytes for t in self.terms if t.name == name)

    @property
    def is_traced(self) -> bool:
        """Whether the bytes of tensors are those of the real program rather than of formulas."""
        return any(term.basis == "traced" for term in self.terms)

    @property
    def allocated(self) -> int:
        """Bytes held by tensors."""
        return sum(t.bytes for t in self.terms if t.name not in ("runtime", "slack"))

    @property
    def reserved(self) -> int:
        """Bytes the allocator holds."""
        return self.allocated + self.term("slack")

    @property
    def device(self) -> int:
        """Bytes missing from the device: what must stay under its capacity."""
        return self.reserved + self.term("runtime")


@dataclass(frozen=True, slots=True)
class TimeTerm:
    """One home of seconds in a step; `hidden_ns` ran behind something else and is not part of the step."""

    name: str
    exposed_ns: int
    hidden_ns: int = 0
    recomputed_ns: int = 0
    basis: Basis = "derived"


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Memory of every stage; the worst one decides. `usable` is what is left of the device after headroom."""

    stages: tuple[StageMemory, ...]
    peak: Estimate
    capacity_bytes: int
    usable_bytes: int

    @property
    def worst(self) -> StageMemory:
        """The stage with the largest device figure; the first of equals."""
        return max(self.stages, key=lambda stage: (stage.device, -stage.stage))

    @property
    def is_tight(self) -> bool:
        """Whether the size of the device lies within the interval of the peak."""
        return self.peak.low <= self.capacity_bytes <= self.peak.high


@dataclass(frozen=True, slots=True)
class TimeLedger:
    """Where one optimizer step goes. The exposed terms add up to `step_ns` exactly."""

    terms: tuple[TimeTerm, ...]
    step_ns: int
    step: Estimate
    tokens_per_second: float
    mfu: float
    model_FLOP: float
