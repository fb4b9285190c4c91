"""The default training job: a plan, a number of steps, and what came of them."""

from __future__ import annotations

import platform
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from strategist.document.plan import Plan
from strategist.errors import InputError
from strategist.executor.architecture import model_obstacles
from strategist.executor.build import build
from strategist.executor.data import Sample, StepSampler, SyntheticPairs, SyntheticTokens, next_batch
from strategist.executor.job import Instruments, unheard
from strategist.executor.models import model_from_shape
from strategist.executor.obstacles import refuse
from strategist.executor.processes import World, one_verdict, process_group
from strategist.executor.session import Session, StepResult
from strategist.executor.support import layout_obstacles
from strategist.executor.tables import Server
from strategist.executor.versions import require_same_versions, versions
from strategist.executor.watch import Watch
from strategist.records import dataclass

OnStep = Callable[[int, StepResult], None]


class Observer(Protocol):
    """Somebody who looks at a run from inside its ranks. Every rank has one."""

    def step(self, session: Session, batch: dict[str, Tensor]) -> StepResult:
        """`session.step(batch)`, looked at."""

    def finish(self, report: TrainingReport) -> None:
        """The run came to its end; this rank is still in its process group."""


CLIP_NORM = 1.0
"""Llama 2 (Touvron et al. 2023, arXiv 2307.09288, section 2.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The most memory one rank took. On a CPU the resident set of the process; on a GPU what the allocator saw."""

    resident_bytes: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """What a training run measured. `steps` are this rank's, `memory` is by rank."""

    plan_seal: str | None
    world: int
    steps: tuple[StepResult, ...]
    memory: tuple[RankMemory, ...]
    versions: dict[str, str]


def train(
    plan: Plan,
    steps: int = 20,
    *,
    make_model: Callable[[], nn.Module] | None = None,
    dataset: Dataset[Any] | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
    watch: Watch | None = None,
    observer: Observer | None = None,
) -> TrainingReport:
    """Train `steps` steps under `plan` and report; by default the built-in model of the plan on synthetic tokens.

    Under torchrun every rank calls this; without it this process is the only rank. `on_step(number, result)` is called
    on every rank after each step. A dataset that ends begins anew in another order. `watch` is this rank's side of a run
    that somebody supervises: it starts from a checkpoint, saves and stops; `observer` looks at the steps. Raises InputError
    for steps below 1, ImpossibleError for what cannot be run, StaleError for another number of ranks, TrainingError naming the
    rank that failed.
    """
    if steps < 1:
        raise InputError(
            "TOO_SMALL", f"steps is {steps}; the smallest is 1.", flag="steps", value=steps, hint="Ask for 20."
        )
    refuse(layout_obstacles(plan) + (() if make_model else model_obstacles(plan.model, plan.workload.seq_len)))
    data = dataset if dataset is not None else synthetic_data(plan, steps, seed)
    with process_group(plan) as world, one_verdict(world), _beside_server(plan, world):
        require_same_versions()
        model = make_model() if make_model else model_from_shape(plan.model)
        instruments = Instruments(phase=watch.phase if watch else unheard, server=_server(plan, model, seed))
        with build(plan, model, clip_norm=CLIP_NORM, seed=seed, instruments=instruments) as session:
            if watch:
                watch.begin(session)
            results = run_steps(session, data, steps, seed=seed, on_step=on_step, watch=watch, observer=observer)
            report = TrainingReport(
                plan_seal=plan.seal,
                world=world.size,
                steps=tuple(results),
                memory=peak_memory(world),
                versions=versions(),
            )
            if observer:
                observer.finish(report)
            return report


def _beside_server(plan: Plan, world: World) -> AbstractContextManager[None]:
    """A process beside the ranks for a plan that has tables of embeddings on a parameter server."""
    if plan.strategy.tables == "local":
        return nullcontext()
    from strategist.executor.parameter_server import beside_server  # torch is not built with RPC everywhere

    return beside_server(world.device)


def _server(plan: Plan, model: nn.Module, seed: int) -> Server | None:
    if plan.strategy.tables == "local":
        return None
    from strategist.executor.parameter_server import serving

    return serving(plan, model, seed=seed)


def synthetic_data(plan: Plan, steps: int, seed: int) -> Dataset[Sample]:
    """Enough synthetic sequences for `steps` steps of the plan's model and sequence length; pairs of inputs and targets for an encoder
    with a decoder."""
    work, size = plan.workload, steps * plan.workload.global_batch
    if plan.model.enc_layers:
        return SyntheticPairs(plan.model.vocab, work.seq_len, work.targets, size, seed)
    return SyntheticTokens(plan.model.vocab, work.seq_len, size, seed)


def run_steps(
    session: Session,
    dataset: Dataset[Any],
    steps: int,
    *,
    seed: int,
    on_step: OnStep | None = None,
    watch: Watch | None = None,
    observer: Observer | None = None,
) -> list[StepResult]:
    """Results of the steps up to `steps` that the session has not done yet, passing over `dataset` as often as needed, each
    time in another order."""
    results: list[StepResult] = []
    step = observer.step if observer else Session.step
    per_pass = len(session.loader(dataset, seed=seed))
    for number in range(session.steps, steps):
        if watch is not None:
            watch.phase("data")
        if not results or number % per_pass == 0:
            order = seed + number // per_pass
            loader = session.loader(dataset, seed=order, first_step=number % per_pass)
            batches, sampler = iter(loader), cast(StepSampler, loader.batch_sampler)
        results.append(step(session, next_batch(batches, sampler, number % per_pass)))
        if on_step is not None:
            on_step(number, results[-1])
        if watch is not None:
            watch.after_step(session, results[-1], is_last=number == steps - 1)
    return results


def peak_memory(world: World) -> tuple[RankMemory, ...]:
    """The peak of every rank, in rank order. ru_maxrss counts KiB on Linux (getrusage(2)) and bytes on macOS."""
    unit_bytes = 1 if platform.system() == "Darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    on_gpu = world.device.type == "cuda"
    mine = RankMemory(
        resident_bytes=resident,
        allocated_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        reserved_bytes=torch.cuda.max_memory_reserved() if on_gpu else None,
    )
    peaks: list[Any] = [None] * world.size
    dist.all_gather_object(peaks, mine)
    return tuple(peaks)
