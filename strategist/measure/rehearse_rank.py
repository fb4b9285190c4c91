"""One rank's program with real tensors on one real device and collectives that nobody answers, timed and weighed."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from strategist.catalog import rows
from strategist.document.estimate import TIME_TERMS, TimeTerm
from strategist.document.observed import ObservedMemory, ObservedTime, RankObservation
from strategist.document.plan import Plan
from strategist.document.substitution import Substitution
from strategist.executor.build import lay_out
from strategist.executor.job import Instruments, Job, read_number
from strategist.executor.mesh import build_context_mesh, build_expert_mesh, build_mesh
from strategist.executor.session import Session
from strategist.facts.hardware import Basis
from strategist.measure import noise
from strategist.measure.allocator import cuda_peak, profiled
from strategist.measure.child import largest_size
from strategist.measure.clocks import Clock, clock_of
from strategist.measure.kinds import Kind
from strategist.measure.modules import ModuleClock
from strategist.measure.passes import PassClock, Watched
from strategist.measure.program import MakeModel, lengths_of, session_of, shortened, world_of
from strategist.measure.stand_ins import stage_for
from strategist.measure.stopwatch import Meter, Stopwatch, Terms, empty_ns, launch_ns, terms_by_module
from strategist.measure.trace_rank import outline_of
from strategist.records import dataclass, replace

WARM_UP = 2
"""Steps before anything is measured: the first makes the optimizer's state and DDP's buckets, the second uses them."""

Batch = dict[str, Tensor]


class LonelyReplica(DistributedDataParallel):
    """DDP that does not ask its peers whether their shapes and values are its own."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, init_sync=False, **options)


class Rehearsal:
    """A rank of a plan that stands ready on a device. `meter` is what collectives tell of, where something is measured."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.meter: Meter | None = None
        self._lead: Callable[[], None] | None = None

    def listen(self) -> Any:
        """What is entered around every fake collective."""
        return nullcontext() if self.meter is None else self.meter.faking()

    def read(self, value: Tensor) -> float:
        """A number from the device; afterwards the host gets ahead again where operations are timed."""
        number = read_number(value)
        if self._lead is not None:
            self._lead()
        return number

    def job(self) -> Job:
        """The job of this rank; real in all but its peers."""
        instruments = Instruments(
            read=self.read, make_stage=lambda *a, **k: stage_for(self.plan, *a, **k), replica=LonelyReplica
        )
        return Job(
            plan=shortened(self.plan),
            mesh=build_mesh(self.plan, self.device.type),
            expert_mesh=build_expert_mesh(self.plan, self.device.type),
            context_mesh=build_context_mesh(self.plan, self.device.type),
            device=self.device,
            instruments=instruments,
        )

    def session(self, make_model: MakeModel) -> Session:
        """The live session of a fresh model."""
        job = self.job()
        return session_of(lay_out(make_model(), job), job)

    def batch(self, session: Session) -> Batch:
        """Random tokens: the first sequences of the data rank's share that a step takes; the whole share is on the device.

        Their rows are in this rank's part of a table cut over tp: those of others nobody sends, they would be zeros, of which
        norms make gradients that grow from layer to layer.
        """
        own = self._own_rows(session.job.mesh.get_local_rank("tp"))
        whole = self.plan.strategy.micro_batch * self.plan.strategy.accumulation
        spans = {"labels": range(self.plan.model.vocab)}
        return {
            name: torch.randint((span := spans.get(name, own)).start, span.stop, (whole, length), device=self.device)[
                : session.share.size
            ]
            for name, length in lengths_of(self.plan).items()
        }

    def _own_rows(self, index: int) -> range:
        """Rows of the vocabulary that the `index`-th rank along tp holds; all where it holds none."""
        vocab = range(self.plan.model.vocab)
        rows = -(-len(vocab) // self.plan.mesh.tp)
        return vocab[index * rows :][:rows] or vocab

    @contextmanager
    def leading(self, clock: Clock) -> Iterator[None]:
        """Inside, the host is ahead of the device."""
        self._lead = clock.lead
        clock.lead()
        try:
            yield
        finally:
            self._lead = None


@contextmanager
def stage_set(plan: Plan, rank: int, device: torch.device) -> Iterator[Rehearsal]:
    """A world in which this process is `rank` and its peers are noise. Once per process."""
    rehearsal = Rehearsal(plan, device)
    noise.register(rehearsal.listen)
    with world_of(noise.BACKEND, HashStore(), plan, rank):
        yield rehearsal


def rehearse_rank(plan: Plan, kind: Kind, make_model: MakeModel, device: torch.device, steps: int) -> RankObservation:
    """The rank of `kind`, some steps of it, timed; on a GPU weighed too. Once per process.

    Raises ImpossibleError for what the executor cannot run, TrainingError when noise drives the loss out of bounds, and
    whatever `make_model` raises.
    """
    begin = time.perf_counter()
    with stage_set(plan, kind.rank, device) as rehearsal:
        session = rehearsal.session(make_model)
        batch = rehearsal.batch(session)
        for _ in range(WARM_UP):
            session.step(batch)
        memory = _weighed(session, batch, device)
        observed = _timed(rehearsal, session, batch, steps)
    return RankObservation(
        kind=kind.name,
        rank=kind.rank,
        stage=kind.stage,
        memory=memory,
        collectives=(),
        tiers=(),
        operators=(),
        substitutions=stood_in(plan),
        seconds=round(time.perf_counter() - begin, 3),
        process_bytes=largest_size(),
        time=observed,
    )


def _weighed(session: Session, batch: Batch, device: torch.device) -> ObservedMemory:
    """What CUDA's allocator counts during one step; nothing of a CPU, whose allocator is asked by `held_on_cpu`."""
    allocated, reserved = (0, 0) if device.type == "cpu" else cuda_peak(device, lambda: session.step(batch))
    return measured_memory(allocated, reserved)


def measured_memory(allocated: int, reserved: int) -> ObservedMemory:
    """Totals, as an allocator knows them."""
    return ObservedMemory(moments=(), modules=(), reserved=reserved, reserved_basis="measured", allocated=allocated)


def held_on_cpu(plan: Plan, rank: int, make_model: MakeModel) -> tuple[int, int]:
    """(bytes at rest, bytes at the peak) of one step, as the CPU's allocator tells torch's profiler. Once per process.

    The profiler has to see everything from the first allocation on, and slows down what it sees.
    """
    device = torch.device("cpu")
    with stage_set(plan, rank, device) as rehearsal:

        def prepare() -> Callable[[], object]:
            session = rehearsal.session(make_model)
            batch = rehearsal.batch(session)
            for _ in range(WARM_UP):
                session.step(batch)
            return lambda: session.step(batch)

        return profiled(prepare)


def _timed(rehearsal: Rehearsal, session: Session, batch: Batch, steps: int) -> ObservedTime:
    """The median of `steps` undisturbed steps, told in terms with the help of as many under the stopwatch."""
    plan, clock, passes = rehearsal.plan, clock_of(rehearsal.device), PassClock()
    left_out = plan.strategy.accumulation - shortened(plan).strategy.accumulation
    session.parts = replace(session.parts, engine=Watched(session.parts.engine, passes))
    session.parts.model.register_forward_pre_hook(lambda *_: _next_micro_batch(rehearsal), prepend=True)
    plain = [_step(rehearsal, Meter(clock, left_out), session, batch) for _ in range(steps)]
    empty, launch = empty_ns(clock, rehearsal.device), launch_ns(clock, rehearsal.device)
    modules = ModuleClock(session.parts.model)
    is_offloaded, has_head = plan.strategy.offload != "none", session.job.stage.head
    model = session.parts.model
    terms = Terms(model, outline_of(plan, model), is_offloaded=is_offloaded, has_head=has_head)
    shares, launched = [], 0
    for _ in range(steps):
        meter = Meter(clock, left_out)
        watch = Stopwatch(meter, terms_by_module(terms, modules, passes), passes)
        with rehearsal.leading(clock), modules, watch:
            _step(rehearsal, meter, session, batch)
        shares.append(by_term(meter, empty))
        launched = watch.launched
    return ObservedTime(
        terms=settled(shares, round(statistics.median(meter.step_ns for meter in plain)), "rehearsed"),
        step_ns=round(statistics.median(meter.step_ns for meter in plain)),
        steps=steps,
        launches=launched,
        launch_ns=launch,
        stand_in_ns=round(statistics.median(meter.fake_ns for meter in plain)),
    )


def _next_micro_batch(rehearsal: Rehearsal) -> None:
    if rehearsal.meter is not None:
        rehearsal.meter.forward()


def _step(rehearsal: Rehearsal, meter: Meter, session: Session, batch: Batch) -> Meter:
    """One step under a meter."""
    meter.clock.settle()
    rehearsal.meter = meter
    meter.begin()
    session.step(batch)
    meter.end()
    rehearsal.meter = None
    return meter


@dataclass(frozen=True, slots=True)
class Share:
    """Nanoseconds of one term in one step: in the stream that computes, beside it, and of the former in recomputation."""

    exposed: int = 0
    hidden: int = 0
    again: int = 0


def by_term(meter: Meter, empty: int) -> dict[str, Share]:
    """The readings of a step by term, what an empty bracket reads taken off each."""
    exposed: dict[str, int] = defaultdict(int)
    hidden: dict[str, int] = defaultdict(int)
    again: dict[str, int] = defaultdict(int)
    for reading in meter.readings:
        spent = reading.times * max(0, meter.clock.ns(reading.begin, reading.end) - empty)
        (exposed if reading.is_main else hidden)[reading.term] += spent
        again[reading.term] += spent if reading.is_again and reading.is_main else 0
    return {name: Share(exposed[name], hidden[name], again[name]) for name in exposed.keys() | hidden.keys()}


def settled(steps: list[dict[str, Share]], step_ns: int, basis: Basis) -> tuple[TimeTerm, ...]:
    """Terms whose exposed times add up to `step_ns`: the median of each, and the rest as `host`.

    Where readings exceed the step, because the stopwatch disturbs more than it takes off, they are cut in proportion.
    """
    names = [name for name in TIME_TERMS if any(name in step for step in steps)]
    middle = {name: _median([step.get(name, Share()) for step in steps]) for name in names}
    total = sum(share.exposed for share in middle.values())
    scale = min(1.0, step_ns / total) if total else 1.0
    exposed = {name: int(share.exposed * scale) for name, share in middle.items()}
    exposed["host"] = step_ns - sum(exposed.values())
    return tuple(
        TimeTerm(
            name,
            exposed[name],
            middle[name].hidden if name in middle else 0,
            min(exposed[name], int(middle[name].again * scale)) if name in middle else 0,
            basis,
        )
        for name in TIME_TERMS
        if name in exposed
    )


def _median(shares: list[Share]) -> Share:
    return Share(
        *(round(statistics.median(getattr(share, part) for share in shares)) for part in ("exposed", "hidden", "again"))
    )


def stood_in(plan: Plan) -> tuple[Substitution, ...]:
    """The rows of the table that a rehearsal leans on."""
    used = {
        "fake-collectives": plan.mesh.world > 1,
        "pipeline-shapes": plan.mesh.pp > 1,
        "repeated-micro-batches": shortened(plan) != plan,
    }
    return tuple(Substitution(**row) for row in rows("substitutions") if used.get(row["name"], False))
