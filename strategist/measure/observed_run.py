"""`python -m strategist.measure.observed_run`: a rank of `strategist run --observe`, told in the Plan's terms.

The last rung of the ladder. Some steps run under a stopwatch, all later ones undisturbed: those give the step, the former its
terms, as in a rehearsal; here peers are real, so waiting for them is part of both. Numbers do not change.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from strategist.document.observed import ObservedMemory, ObservedTime, RankObservation
from strategist.document.write import as_document
from strategist.executor.__main__ import main
from strategist.executor.session import Session, StepResult
from strategist.executor.train import RankMemory, TrainingReport
from strategist.measure.clocks import Clock, clock_of
from strategist.measure.modules import ModuleClock
from strategist.measure.passes import PassClock, Watched
from strategist.measure.program import axis_of, group_names
from strategist.measure.rehearse_rank import Batch, Share, by_term, settled
from strategist.measure.stopwatch import Meter, Terms, empty_ns, launch_ns, terms_by_module
from strategist.measure.trace_rank import outline_of
from strategist.measure.waiting import WaitingStopwatch, waits_heard
from strategist.records import dataclass, replace
from strategist.runs.folder import RunFolder, write_whole
from strategist.runs.observing import LEFT_OUT, WATCHED, RankRecord


@dataclass(frozen=True, slots=True)
class Ready:
    """What every step under the stopwatch needs: made once, before the steps that count."""

    clock: Clock
    passes: PassClock
    modules: ModuleClock
    terms: Callable[[Any, Sequence[Tensor]], str]
    names: dict[str, str]
    empty_ns: int
    launch_ns: int


class RunObserver:
    """Steps of a run, some of them under a stopwatch; `finish` leaves this rank's record in the run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._done, self._seconds, self._launched = 0, 0.0, 0
        self._plain: list[int] = []
        self._shares: list[dict[str, Share]] = []
        self._session: Session | None = None
        self._ready: Ready | None = None

    def step(self, session: Session, batch: Batch) -> StepResult:
        """One step of the session, seen as its number asks for."""
        if self._ready is None:
            self._session, self._ready = session, ready(session)
        number, self._done = self._done, self._done + 1
        if LEFT_OUT <= number < LEFT_OUT + WATCHED:
            return self._watched(session, batch, self._ready)
        result = session.step(batch)
        if number >= LEFT_OUT:
            self._plain.append(round(result.seconds * 1e9))
        return result

    def _watched(self, session: Session, batch: Batch, ready: Ready) -> StepResult:
        meter, parts = Meter(ready.clock), session.parts
        drains = isinstance(parts.model, DistributedDataParallel)
        watch = WaitingStopwatch(
            meter, ready.terms, ready.passes, lambda group: axis_of(group, ready.names), drains=drains
        )
        session.parts = replace(parts, engine=Watched(parts.engine, ready.passes))
        ready.passes.pass_is(None)
        meter.begin()
        with ready.modules, waits_heard(watch), watch:
            result = session.step(batch)
        meter.end()
        session.parts = parts
        self._shares.append(by_term(meter, ready.empty_ns))
        self._launched, self._seconds = watch.launched, self._seconds + result.seconds
        return result

    def finish(self, report: TrainingReport) -> None:
        """Write what this rank saw; nothing after too few steps."""
        session, ready = self._session, self._ready
        if not self._plain or session is None or ready is None:
            return
        rank = torch.distributed.get_rank()
        step_ns = round(statistics.median(self._plain))
        held = report.memory[rank]
        seen = RankObservation(
            kind=f"rank {rank}",
            rank=rank,
            stage=session.job.stage.index,
            memory=_memory(held),
            collectives=(),
            tiers=(),
            operators=(),
            substitutions=(),
            seconds=round(self._seconds, 3),
            process_bytes=held.resident_bytes,
            time=ObservedTime(
                terms=settled(self._shares, step_ns, "measured"),
                step_ns=step_ns,
                steps=len(self._plain),
                launches=self._launched,
                launch_ns=ready.launch_ns,
            ),
        )
        record = RankRecord(torch=torch.__version__, device=_title(session.job.device), rank=seen)
        write_whole(self.folder.of_rank(rank, "observed"), json.dumps(as_document(record)))


def ready(session: Session) -> Ready:
    """What a session's steps under the stopwatch need."""
    plan, model, device = session.job.plan, session.parts.model, session.job.device
    clock, passes, modules = clock_of(device), PassClock(), ModuleClock(model)
    terms = Terms(
        model, outline_of(plan, model), is_offloaded=plan.strategy.offload != "none", has_head=session.job.stage.head
    )
    return Ready(
        clock,
        passes,
        modules,
        terms_by_module(terms, modules, passes),
        group_names(session.job),
        empty_ns(clock, device),
        launch_ns(clock, device),
    )


def _memory(held: RankMemory) -> ObservedMemory:
    """What an allocator counted; nothing on a CPU, whose allocator keeps no account."""
    return ObservedMemory(
        moments=(), modules=(), reserved=held.reserved_bytes or 0, reserved_basis="measured", allocated=held.allocated_bytes
    )  # fmt: skip


def _title(device: torch.device) -> str:
    """What people call the device."""
    return "CPU ranks" if device.type == "cpu" else torch.cuda.get_device_name(device)


if __name__ == "__main__":
    sys.exit(main(make_observer=RunObserver))
