"""The Plan: everything somebody needs to judge, emit or run a parallel layout, in one document.

Plain frozen dataclasses, so that planning costs no schema library; `document/load.py` is the door where pydantic
checks what comes from outside against these same types.
"""

from __future__ import annotations

from math import prod
from typing import Literal, Protocol

from strategist.document.certificate import Certificate
from strategist.document.estimate import MemoryLedger, TimeLedger
from strategist.document.front import Front, Sensitivity
from strategist.document.verification import Verification
from strategist.facts.calibration import Factor, Near
from strategist.facts.hardware import Cluster
from strategist.facts.model import ModelShape
from strategist.facts.resolved import Assumption
from strategist.facts.workload import Workload
from strategist.records import dataclass

FORMAT = "strategist-plan/1"

Schedule = Literal["none", "gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zbv", "dualpipev"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "parameters", "nvme"]
StageSplit = Literal["even", "weighted", "balanced"]
ContextParallel = Literal["none", "ring", "all-to-all", "hierarchical"]
Replicas = Literal["processes", "threads"]
Compression = Literal["none", "bf16", "fp16", "powersgd", "topk"]
Loss = Literal["whole", "chunked"]
Tables = Literal["local", "server"]
Backend = Literal["nccl", "gloo", "mpi"]
Policy = Literal["hf", "fastest"]
Objective = Literal["time", "cost", "memory", "simplicity"]
Dtype = Literal["float64", "float32", "bfloat16", "float16", "float8"]

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The dense axes, outermost first: neighbours in the last axis are neighbours in rank order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Degrees per axis. `ep` and `etp` cut the experts of MoE layers over dp_shard x cp x tp."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    order: tuple[str, ...] = MESH_AXES

    @property
    def world(self) -> int:
        """Ranks in the mesh."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert shard: world / (pp x ep x etp)."""
        return self.world // (self.pp * self.ep * self.etp)

    def size(self, axis: str) -> int:
        """Degree of one axis by name."""
        return int(getattr(self, axis))

    def stride(self, axis: str) -> int:
        """Distance in rank numbers between neighbours along a dense axis."""
        inner = self.order[self.order.index(axis) + 1 :]
        return prod(self.size(name) for name in inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage: the contiguous runs of layers it owns, and whether it holds the embedding or the head.

    `layers` has one (first, end) pair per virtual stage, `end` not included.
    """

    index: int
    layers: tuple[tuple[int, int], ...]
    embedding: bool
    head: bool

    @property
    def layer_count(self) -> int:
        """Layers of this stage over all its virtual stages."""
        return sum(end - first for first, end in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormats:
    """Types of the numbers at rest and on the way."""

    parameter: Dtype
    gradient: Dtype
    reduce: Dtype
    compute: Dtype
    master: Literal["none", "float32"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """`replicas` that are neighbours in rank order, on nodes of one kind, and the `micro_batches` that each of them runs in a step."""

    replicas: int
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Everything about the layout that is not a mesh degree. `replicas` are processes of DDP, or threads of one process, as
    nn.DataParallel has them. `compression` is what DDP does to gradients before it sends them; PowerSGD keeps so many columns
    (`compression_rank`), top-k such a share of the elements (`compression_share`). The `loss` is that of whole logits, or of the
    logits of a few tokens at a time; the `tables` of embeddings are local, or on a parameter server. With `recompute_layers` above 0 full recompute is that of the first so many layers of every chunk,
    with `recompute_every` that of every so-many-th of them, and with `recompute_stages` that of the first so many of every chunk of each
    stage, a number for each. Hierarchical context parallelism exchanges heads among `cp_inner` neighbours
    along cp, and sends keys and values around rings of mesh.cp / cp_inner across them. An
    `uneven_batch` has one share for each kind of nodes, in rank order, and `accumulation` is then the largest number of micro-batches;
    without it every replica runs that many."""

    zero: int = 0
    virtual_stages: int = 1
    schedule: Schedule = "none"
    micro_batch: int = 1
    accumulation: int = 1
    stages: tuple[Stage, ...]
    sequence_parallel: bool = False
    context_parallel: ContextParallel = "none"
    cp_inner: int = 1
    recompute: Recompute = "none"
    recompute_layers: int = 0
    recompute_every: int = 0
    uneven_batch: tuple[Share, ...] = ()
    recompute_stages: tuple[int, ...] = ()
    offload: Offload = "none"
    tiling: int = 1
    stage_split: StageSplit = "even"
    replicas: Replicas = "processes"
    compression: Compression = "none"
    compression_rank: int = 0
    compression_share: float = 0.0
    loss: Loss = "whole"
    tables: Tables = "local"
    formats: NumberFormats
    optimizer: str = "adamw"
    compile: bool = False
    backend: Backend = "nccl"
    profile: str = "strategist"

    @property
    def recompute_depth(self) -> Literal["alike", "by-stage"]:
        """Whether every stage has its own number of layers that run again."""
        return "by-stage" if self.recompute_stages else "alike"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A named number that a reason rests on, printed with it. `unit` "" marks a yes/no or a plain count."""

    name: str
    value: float
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A rule that fired: its sentence with the numbers in it, and where the rule comes from."""

    rule: str
    kind: Literal["decision", "advice", "gap", "model"]
    sentence: str
    source: str
    quantities: tuple[Quantity, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A front end that would have come first, and what it cannot say of the plan."""

    target: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """The target of `emit` that a plan is for when nobody named one, why, and which would have come before it."""

    target: str
    reason: Reason
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def words(self) -> str:
        """Which it is and why, in sentences."""
        why = f"{self.reason.sentence} ({self.reason.rule})"
        if not self.passed_over:
            return f"{self.target}: {why}"
        others = " ".join(f"{other.target} cannot say this plan: {other.sentence}" for other in self.passed_over)
        return f"{why} {others} So it is {self.target}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why candidates were dropped: by which rule, how many, and the one that came nearest to being allowed."""

    rule: str
    count: int
    sentence: str
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another layout. `fits` false carries by how much it misses in `sentence`."""

    family: str
    layout: str
    fits: bool
    step_s: float | None
    peak_bytes: int
    relative_time: float | None
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Who chose, and what the other policy would have chosen; `difference` is its step time over the chosen one's."""

    policy: Policy
    objective: Objective
    family: str
    other_policy: Policy
    other_family: str
    other_layout: str
    other_step_s: float
    difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A warning (W_...) or a note: a sentence, and what to do."""

    code: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Economics:
    """What the whole run takes; money only when a price was given or is known."""

    gpu_hours_per_step: float
    run_seconds: float | None = None
    run_gpu_hours: float | None = None
    price_per_gpu_hour: float | None = None
    price_source: str = ""
    run_cost: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The question as it was asked: (flag, value) pairs in the order of the command line's help. A `purpose` is there where the front
    end was left to the rules."""

    given: tuple[tuple[str, str], ...] = ()
    policy: Policy = "hf"
    objective: Objective = "time"
    headroom: float = 0.05
    pins: tuple[tuple[str, str], ...] = ()
    forbids: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    frontend: str = "any"
    purpose: str = ""
    price_per_gpu_hour: float | None = None


def shares_of(mesh: Mesh, strategy: Strategy) -> tuple[Share, ...]:
    """Who runs how many micro-batches, in rank order: all as many where the batch is even."""
    return strategy.uneven_batch or (Share(replicas=mesh.data_parallel, micro_batches=strategy.accumulation),)


def sequences_per_step(mesh: Mesh, strategy: Strategy) -> int:
    """Sequences that all replicas together take in a step, by the micro-batches of each."""
    return strategy.micro_batch * sum(share.replicas * share.micro_batches for share in shares_of(mesh, strategy))


def sequences_of(mesh: Mesh, strategy: Strategy, replica: int) -> range:
    """The sequences of each global batch that one data-parallel replica takes, by its place among the replicas in rank order."""
    first = 0
    for share in shares_of(mesh, strategy):
        size = strategy.micro_batch * share.micro_batches
        if replica < share.replicas:
            break
        first, replica = first + share.replicas * size, replica - share.replicas
    return range(first + replica * size, first + (replica + 1) * size)


def batch_identity(mesh: Mesh, strategy: Strategy) -> str:
    """The factors of the global batch and their product, in words."""
    factors = f"accumulation {strategy.accumulation} x dp {mesh.data_parallel}"
    if strategy.uneven_batch:
        parts = (f"accumulation {share.micro_batches} x dp {share.replicas}" for share in strategy.uneven_batch)
        factors = f"({' + '.join(parts)})"
    return f"micro-batch {strategy.micro_batch} x {factors} = {sequences_per_step(mesh, strategy)}"


class Costed(Protocol):
    """What a Plan and a Prediction share: a layout of a job, and what it is expected to cost."""

    @property
    def cluster(self) -> Cluster: ...  # noqa: D102
    @property
    def model(self) -> ModelShape: ...  # noqa: D102
    @property
    def workload(self) -> Workload: ...  # noqa: D102
    @property
    def assumptions(self) -> tuple[Assumption, ...]: ...  # noqa: D102
    @property
    def mesh(self) -> Mesh: ...  # noqa: D102
    @property
    def strategy(self) -> Strategy: ...  # noqa: D102
    @property
    def memory(self) -> MemoryLedger: ...  # noqa: D102
    @property
    def time(self) -> TimeLedger: ...  # noqa: D102
    @property
    def hints(self) -> tuple[Hint, ...]: ...  # noqa: D102
    @property
    def batch_identity(self) -> str: ...  # noqa: D102
    @property
    def hardware_is_assumed(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One layout, why it was chosen, and what it is expected to cost. Self-contained; `seal` signs the rest.

    `alternatives` are the best of the other families, `ladder` the smallest machines that would do the same job. With a
    `verification` the bytes of `memory` are traced, and what the formulas had said stands there. `front`, `certificate` and `sensitivity` are there when they were asked for.
    `idle` devices of those that were named are not in `cluster`, because the job is done sooner without them. `unfinished` says
    what a time budget left untried; such a plan is the best that was found, and not known to be the best. `unrestricted` is what
    the same policy would choose if the front end of the request need not say it; `frontend` is the one that rules chose for the plan. `factors` of a calibration
    are in its seconds, and its interval is the nearest of `near`, how far runs of one's own lie from predictions under them, where there is one.
    """

    format: Literal["strategist-plan/1"] = "strategist-plan/1"
    made_by: str
    book: str = ""
    request: Request
    cluster: Cluster
    model: ModelShape
    workload: Workload
    assumptions: tuple[Assumption, ...]
    mesh: Mesh
    strategy: Strategy
    memory: MemoryLedger
    time: TimeLedger
    economics: Economics
    decision: Decision
    reasons: tuple[Reason, ...]
    refusals: tuple[Refusal, ...]
    alternatives: tuple[Alternative, ...]
    hints: tuple[Hint, ...]
    ladder: tuple[Alternative, ...] = ()
    verification: Verification | None = None
    front: Front | None = None
    certificate: Certificate | None = None
    sensitivity: Sensitivity | None = None
    idle: int = 0
    unfinished: tuple[str, ...] = ()
    unrestricted: Alternative | None = None
    frontend: FrontEnd | None = None
    factors: tuple[Factor, ...] = ()
    near: tuple[Near, ...] = ()
    seal: str | None = None

    @property
    def batch_identity(self) -> str:
        """`global_batch = micro_batch x accumulation x dp_replicate x dp_shard`, with the numbers."""
        return batch_identity(self.mesh, self.strategy)

    @property
    def processes(self) -> int:
        """Processes that run the job: one per rank of the mesh, or one whose threads are the ranks."""
        return 1 if self.strategy.replicas == "threads" else self.mesh.world

    @property
    def hardware_is_assumed(self) -> bool:
        """True when nobody named the machines: such a plan is for reading, not for running."""
        return self.cluster.origin == "assumed"
