"""What another rung of the ladder saw of a Plan: bytes, collectives and FLOP of one rank of each kind, in the Plan's terms.

Frozen records like the Plan's; `document/load.py` is their strict door. Bytes and FLOP are of one optimizer step.
"""

from __future__ import annotations

from typing import Literal

from strategist.document.estimate import MemoryTerm, TimeTerm
from strategist.document.substitution import Substitution
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
    model of it unless `reserved_basis` says "measured"; 0 where nobody can tell (a CPU's allocator keeps no reserve).
    `host` are bytes that rest in the host's memory. `allocated` is the peak that an allocator measured: it knows no terms,
    so there are no moments beside it. A CPU's allocator does not count while a job runs: neither moments nor `allocated`.
    """

    moments: tuple[MomentBytes, ...]
    modules: tuple[ModulePeak, ...]
    reserved: int
    reserved_basis: Literal["modelled", "measured"]
    host: int = 0
    allocated: int | None = None

    @property
    def peak(self) -> MomentBytes:
        """The moment with the most bytes; the first of equals. Only where there are moments."""
        return max(self.moments, key=lambda moment: moment.allocated)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that tensors held, as measured or else as the moments have it; 0 where nobody can tell."""
        if self.allocated is None:
            return self.peak.allocated if self.moments else 0
        return self.allocated

    @property
    def slack(self) -> int | None:
        """Bytes reserved beyond the peak; None where the reserve is not known."""
        return self.reserved - self.peak_bytes if self.reserved else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCollective:
    """Collectives that differ in nothing: `count` of them in one step.

    `bytes` is the larger of what goes in and what comes out on this rank, `axis` the mesh axis of the group ("world",
    "shards" for dp_shard and cp together, "data" for those and dp_replicate, "expert_shards" for those of one expert's state, "expert_data" for those and dp_replicate), `ranks` its size, `tier` the slowest level of
    the network that it crosses ("" for a group of one). Hidden: in program order there is other work to overlap with.
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
class ObservedTime:
    """One optimizer step of one rank by the Plan's time terms; the exposed ones add up to `step_ns` exactly.

    `step_ns` is the median of `steps` steps. `host` is what no operation took: launching, Python, waiting. In a run, waiting
    for other ranks is known: it stands in the term of the axis, and what waits for another stage in `bubble`. A step has
    `launches` operations, and the host needs at least `launch_ns` for one, so no device is faster than their product.
    `stand_in_ns` were spent on making what peers would have sent; they are not part of the step.
    """

    terms: tuple[TimeTerm, ...]
    step_ns: int
    steps: int
    launches: int
    launch_ns: int
    stand_in_ns: int = 0

    def term(self, name: str) -> TimeTerm | None:
        """One term; None when nothing of it was seen."""
        return next((term for term in self.terms if term.name == name), None)

    @property
    def launch_floor_ns(self) -> int:
        """The least time in which the host can issue the step."""
        return self.launches * self.launch_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObservation:
    """One rank that stands for all of its kind. `seconds` and `process_bytes` are what observing it took; in a run, where
    every rank is observed, the bytes are the most that its process had in memory."""

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
    time: ObservedTime | None = None

    @property
    def FLOP(self) -> int:
        """FLOP of the step, recomputation included."""
        return sum(row.FLOP for row in self.operators)


def _fullness(rank: RankObservation) -> tuple[int, int]:
    return rank.memory.peak_bytes, rank.process_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What one rung saw of a plan. `plan` is the digest that the Plan's seal would carry, `device` what it ran on when
    that was one."""

    format: Literal["strategist-observed/1"] = "strategist-observed/1"
    made_by: str
    rung: Rung
    plan: str
    torch: str
    model: str
    ranks: tuple[RankObservation, ...]
    device: str = ""

    @property
    def worst(self) -> RankObservation:
        """The rank whose peak is the largest; the first of equals."""
        return max(self.ranks, key=_fullness)

    def of_stage(self, stage: int) -> RankObservation | None:
        """The fullest observed rank of one pipeline stage; None when none was looked at."""
        found = [rank for rank in self.ranks if rank.stage == stage]
        return max(found, key=_fullness, default=None)

    @property
    def slowest(self) -> RankObservation | None:
        """The timed rank whose step takes longest; None when nothing was timed."""
        timed = [(rank.time.step_ns, rank) for rank in self.ranks if rank.time is not None]
        return max(timed, key=lambda pair: pair[0])[1] if timed else None
