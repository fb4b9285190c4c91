"""What another rung of the ladder saw of a Plan: bytes, collectives and FLOP of one rank of each kind, in the Plan's terms.

Frozen records like the Plan's; `document/load.py` is their strict door. Bytes and FLOP are of one optimizer step.
"""

from __future__ import annotations

from typing import Literal

from strategist.document.estimate import MemoryTerm
from strategist.records import dataclass

OBSERVED = "strategist-observed/1"

Rung = Literal["traced", "rehearsed", "run"]
Pass = Literal["setup", "forward", "backward", "recompute", "update"]
"""What the program was doing; `recompute` is forward work inside backward, `update` all after the last backward."""
Exposure = Literal["hidden", "exposed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentBytes:
    """The bytes that tensors held at the worst instant of one moment of the step, term by term.

    `module` ("" outside all of them) is whose work was being done, `during` the pass, `operator` what had just run.
    """

    moment: str
    module: str
    during: Pass
    operator: str
    terms: tuple[MemoryTerm, ...]

    def term(self, name: str) -> int:
        """Bytes of one term; 0 when there is none."""
        return sum(term.bytes for term in self.terms if term.name == name)

    @property
    def allocated(self) -> int:
        """Bytes held by tensors."""
        return sum(term.bytes for term in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePeak:
    """The most bytes that were alive while one part of the model worked."""

    module: str
    during: Pass
    allocated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedMemory:
    """The memory of one rank over the step.

    `moments` are the Plan's; the worst of them is the peak. `reserved` is what the device's allocator would hold, by a
    model of it unless `reserved_basis` says "measured". `host` are bytes that rest in the host's memory.
    """

    moments: tuple[MomentBytes, ...]
    modules: tuple[ModulePeak, ...]
    reserved: int
    reserved_basis: Literal["modelled", "measured"]
    host: int = 0

    @property
    def peak(self) -> MomentBytes:
        """The moment with the most bytes; the first of equals."""
        return max(self.moments, key=lambda moment: moment.allocated)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCollective:
    """Collectives that differ in nothing: `count` of them in one step.

    `bytes` is the larger of what goes in and what comes out on this rank, `axis` the mesh axis of the group ("world",
    "data" for both data axes together), `ranks` its size, `tier` the slowest level of the network that it crosses ("" for
    a group of one). Hidden: in program order there is other work to overlap with.
    """

    op: str
    dtype: str
    bytes: int
    axis: str
    ranks: int
    tier: str
    during: Pass
    exposure: Exposure
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTotal:
    """Everything that this rank puts through one tier in one step."""

    tier: str
    bytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFLOP:
    """FLOP of one operator in one pass; a multiplication and an addition count as two."""

    operator: str
    during: Pass
    FLOP: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitution:
    """Something that was not run as it is, because fake tensors or the CPU cannot: what stood for it."""

    name: str
    sentence: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObservation:
    """One rank that stands for all of its kind. `seconds` and `process_bytes` are what observing it took."""

    kind: str
    rank: int
    stage: int
    memory: ObservedMemory
    collectives: tuple[ObservedCollective, ...]
    tiers: tuple[TierTotal, ...]
    operators: tuple[OperatorFLOP, ...]
    substitutions: tuple[Substitution, ...]
    seconds: float
    process_bytes: int

    @property
    def FLOP(self) -> int:
        """FLOP of the step, recomputation included."""
        return sum(row.FLOP for row in self.operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What one rung saw of a plan. `plan` is the digest that the Plan's seal would carry."""

    format: Literal["strategist-observed/1"] = "strategist-observed/1"
    made_by: str
    rung: Rung
    plan: str
    torch: str
    model: str
    ranks: tuple[RankObservation, ...]

    @property
    def worst(self) -> RankObservation:
        """The rank whose peak is the largest; the first of equals."""
        return max(self.ranks, key=lambda rank: rank.memory.peak.allocated)

    def of_stage(self, stage: int) -> RankObservation | None:
        """The fullest observed rank of one pipeline stage; None when none was looked at."""
        found = [rank for rank in self.ranks if rank.stage == stage]
        return max(found, key=lambda rank: rank.memory.peak.allocated) if found else None
