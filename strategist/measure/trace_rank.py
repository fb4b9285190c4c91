"""One rank's program under fake tensors, written down and told in the Plan's terms."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from strategist.document.observed import ObservedMemory, OperatorFLOP, RankObservation
from strategist.document.plan import Plan
from strategist.executor.blocks import find_blocks
from strategist.executor.build import lay_out
from strategist.executor.checkpoint import kept_states
from strategist.executor.compression import FIRST_COMPRESSED_STEP, remembered
from strategist.executor.drive import StateOnDrive
from strategist.executor.job import Job
from strategist.executor.names import plain_name
from strategist.executor.session import Session
from strategist.facts.model import loss_chunk
from strategist.measure.child import largest_size
from strategist.measure.exposure import collectives, tier_totals
from strategist.measure.kinds import Kind
from strategist.measure.modules import ModuleClock
from strategist.measure.passes import Watched
from strategist.measure.program import (
    MakeModel,
    axis_of,
    batch_for,
    eager,
    fake_world,
    group_names,
    job_for,
    live_session,
    seen_by,
    shortened,
)
from strategist.measure.recorder import Record, Recorder
from strategist.measure.stand_ins import NoServer
from strategist.measure.substitutions import attention_workspace, cuda_ways, is_for_cuda, substitutions_used
from strategist.measure.timeline import DRIVE, HOST, Outline, Timeline
from strategist.records import dataclass, replace

STEPS = 2
"""The first step makes the optimizer's state, DDP's buckets and the pipeline's buffers; the second is the one that counts."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What was written down about one rank, and what is needed to read it."""

    record: Record
    outline: Outline
    noticed: set[str]


def trace_rank(plan: Plan, kind: Kind, make_model: MakeModel) -> RankObservation:
    """The rank of `kind` under fake tensors, one optimizer step of it, observed. Once per process.

    Raises ImpossibleError for what the executor cannot run, and whatever `make_model` raises.
    """
    begin = time.perf_counter()
    recording = record_rank(plan, kind.rank, make_model)
    return observation(plan, kind, recording, time.perf_counter() - begin)


def record_rank(plan: Plan, rank: int, make_model: MakeModel) -> Recording:
    """The record of two steps of one rank, the second of which counts."""
    with fake_world(plan, rank), cuda_ways(plan) as noticed:
        model = make_model()
        server = NoServer(model) if plan.strategy.tables == "server" else None
        job = job_for(shortened(eager(plan)), torch.device("cpu"), server)
        model = lay_out(model, job)
        names = group_names(job)
        clock = ModuleClock(model)
        recorder = Recorder(
            clock,
            lambda group: axis_of(group, names),
            attention_workspace if is_for_cuda(plan) else _no_workspace,
        )
        with FakeTensorMode(allow_non_fake_inputs=True):
            _run(recorder, clock, model, job, seen_by(plan, rank))
        return Recording(recorder.record, outline_of(plan, model), noticed)


def _no_workspace(_func: Any, _args: Any) -> int:
    return 0


def _run(recorder: Recorder, clock: ModuleClock, model: nn.Module, job: Job, plan: Plan) -> None:
    with recorder, clock:
        session = live_session(model, job)
        batch = batch_for(plan, session.share.size)
        if plan.mesh.cp > 1:  # whole sequences stay where they were read; this rank's tokens go to the device
            for tokens in batch.values():
                recorder.mark(tokens, HOST)
        session.parts = replace(session.parts, engine=Watched(session.parts.engine, recorder.passes))
        session.parts.optimizer.register_step_pre_hook(lambda *_: _mark_state(recorder, session))
        if job.offloads_parameters or job.offloads_optimizer:  # the update runs in the host's memory
            session.parts.optimizer.register_step_pre_hook(lambda *_: recorder.all_new_is(HOST))
            session.parts.optimizer.register_step_post_hook(lambda *_: recorder.all_new_is(""))
        steps = _steps(plan)
        for number in range(steps):
            if number == steps - 1:
                _mark_state(recorder, session)
                recorder.restart()
            recorder.passes.pass_is(None)
            session.step(batch)
        _mark_state(recorder, session)


def _steps(plan: Plan) -> int:
    """How many steps run: under PowerSGD the first ones are exact, and another makes what it remembers."""
    return STEPS + (FIRST_COMPRESSED_STEP if plan.strategy.compression == "powersgd" else 0)


def _mark_state(recorder: Recorder, session: Session) -> None:
    """Tell the recorder what rests between steps: weights, gradients, and the optimizer's state."""
    job = session.job
    parameters = list(session.parts.model.parameters())
    everything = HOST if job.offloads_parameters else ""
    held: tuple[tuple[str, list[Tensor]], ...] = (
        (everything or "parameters", [*parameters, *session.parts.model.buffers()]),
        (everything or "gradients", [p.grad for p in parameters if p.grad is not None]),
        (HOST if job.offloads_parameters or job.offloads_optimizer else "optimizer", list(_state_tensors(session))),
        (HOST, list(_copies(session)) if job.offloads_optimizer else []),
        *_on_drive(session.parts.optimizer),
        ("bucket_buffers", list(_remembered(session.parts.model))),
    )
    for role, tensors in held:
        for tensor in tensors:
            recorder.mark(tensor, role)


def _on_drive(optimizer: Optimizer) -> tuple[tuple[str, list[Tensor]], ...]:
    """States in files, and the buffers that they pass through."""
    if not isinstance(optimizer, StateOnDrive):
        return ()
    return (DRIVE, optimizer.images), (HOST, list(optimizer.buffers))


def _remembered(model: nn.Module) -> Iterator[Tensor]:
    """What a hook of DDP keeps from step to step."""
    state = getattr(model, "hook_state", None)
    return iter(()) if state is None else remembered(state)


def _copies(session: Session) -> Iterator[Tensor]:
    """What an optimizer in the host's memory updates, and the gradients that it got."""
    for group in session.parts.optimizer.param_groups:
        yield from group["params"]
        yield from (p.grad for p in group["params"] if p.grad is not None)


def _state_tensors(session: Session) -> Iterator[Tensor]:
    for states in kept_states(session.parts.optimizer):
        for state in states.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def outline_of(plan: Plan, model: nn.Module) -> Outline:
    """Names of the blocks, and the shape of logits on this rank."""
    found = {id(block) for chunk in _chunks(model) for block in find_blocks(chunk).blocks.values()}
    names = tuple(plain_name(name) for name, module in model.named_modules() if id(module) in found)
    share = -(-plan.model.vocab // plan.mesh.tp)
    length = plan.workload.targets if plan.model.enc_layers else plan.workload.seq_len
    tokens = plan.strategy.micro_batch * length // plan.mesh.cp
    chunk = tokens if plan.strategy.loss == "whole" else int(loss_chunk(tokens, plan.model.hidden, plan.model.vocab))
    return Outline(
        blocks=tuple(name.removesuffix("._checkpoint_wrapped_module") for name in names),
        vocabulary=share,
        tokens=(chunk, tokens % chunk or chunk),
        chunked=plan.strategy.loss == "chunked",
    )


def _chunks(model: nn.Module) -> tuple[nn.Module, ...]:
    from strategist.executor.chunks import chunks_of

    return chunks_of(model)


def observation(plan: Plan, kind: Kind, recording: Recording, seconds: float) -> RankObservation:
    """A recording in the Plan's terms."""
    plan = seen_by(plan, kind.rank)
    record, m, ran = recording.record, plan.strategy.accumulation, shortened(plan).strategy.accumulation
    timeline = Timeline(record, recording.outline)
    sent = collectives(record, plan)
    return RankObservation(
        kind=kind.name,
        rank=kind.rank,
        stage=kind.stage,
        memory=ObservedMemory(
            moments=timeline.moments(),
            modules=timeline.modules(),
            reserved=timeline.reserved_bytes(plan.memory.capacity_bytes if is_for_cuda(plan) else None),
            reserved_basis="modelled",
            host=timeline.host_bytes(),
        ),
        collectives=sent,
        tiers=tier_totals(sent),
        operators=tuple(
            OperatorFLOP(operator=name, during=during, FLOP=count * m // ran)
            for (name, during), count in record.flop.items()
        ),
        substitutions=substitutions_used(plan, record, recording.noticed),
        seconds=round(seconds, 3),
        process_bytes=largest_size(),
    )
