"""The executor's own program on one rank of a world that is not there: fake collectives and, traced, fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]

from strategist.document.plan import MESH_AXES, Plan, sequences_of
from strategist.executor.build import bring_to_life
from strategist.executor.chunks import chunks_of
from strategist.executor.job import Instruments, Job
from strategist.executor.mesh import (
    DATA,
    EXPERT_DATA,
    EXPERT_SHARDS,
    INSIDE_CP,
    RING_OF_CP,
    SHARDS,
    build_context_mesh,
    build_expert_mesh,
    build_mesh,
    data_group,
    expert_data_mesh,
    shard_group,
)
from strategist.executor.models import ReferenceModel
from strategist.executor.session import Session
from strategist.executor.tables import Server
from strategist.executor.threads import as_process
from strategist.executor.train import CLIP_NORM
from strategist.measure.stand_ins import FirstDevice, NoDrive, Replica, stage_for
from strategist.records import replace

MakeModel = Callable[[], nn.Module]


@contextmanager
def fake_world(plan: Plan, rank: int) -> Iterator[None]:
    """A process group of the plan's size in which this process is `rank` and nobody else exists. One per process.

    Raises what torch raises when a group is running already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with world_of("fake", FakeStore(), plan, rank):
        yield


@contextmanager
def world_of(backend: str, store: Store, plan: Plan, rank: int) -> Iterator[None]:
    """The default process group of the plan's processes, left again."""
    dist.init_process_group(backend, rank=rank, world_size=plan.processes, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def job_for(plan: Plan, device: torch.device, server: Server | None = None) -> Job:
    """The job of this rank, with the parts exchanged that need real peers or real numbers."""
    instruments = Instruments(
        read=lambda _value: 1.0,
        make_stage=lambda *a, **k: stage_for(plan, *a, **k),
        replica=Replica,
        make_drive=NoDrive,
        threads=FirstDevice,
        server=server,
    )
    own = as_process(plan)
    return Job(
        plan=own,
        mesh=build_mesh(own, device.type),
        expert_mesh=build_expert_mesh(own, device.type),
        context_mesh=build_context_mesh(own, device.type),
        device=device,
        threads=plan.mesh.world // plan.processes,
        instruments=instruments,
    )


def live_session(model: nn.Module, job: Job) -> Session:
    """The session of a model that was laid out; under fake tensors, its values are fake."""
    if any(p.is_meta for p in model.parameters()) and not is_ours(model):
        emptied(model, "cpu")
    return session_of(model, job)


def session_of(model: nn.Module, job: Job) -> Session:
    """The session of a model that was laid out, as training makes it."""
    return Session(job, bring_to_life(model, job), clip_norm=CLIP_NORM, resources=ExitStack())


def eager(plan: Plan) -> Plan:
    """The plan without compilation, whose guards need values."""
    return replace(plan, strategy=replace(plan.strategy, compile=False))


def is_ours(model: nn.Module) -> bool:
    """Whether a model knows its own initial values, so that the executor gives it memory."""
    return all(isinstance(chunk, ReferenceModel) for chunk in chunks_of(model))


def emptied(model: nn.Module, device: str) -> nn.Module:
    """The module itself on another device, without values; ends that shared a parameter share it again."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}  # by identity: torch exchanges only parameters that nobody holds
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                homes.setdefault(id(parameter), []).append((module, name))
    parameter = None
    model.to_empty(device=device)
    for places in homes.values():
        first, *others = places
        for module, name in others:
            module._parameters[name] = first[0]._parameters[first[1]]
    return model


MICRO_BATCHES = 3
"""Micro-batches that are run outside a pipeline: the first, the last, and one that stands for all between them."""


def shortened(plan: Plan) -> Plan:
    """The plan with no more micro-batches than it takes to see every sort of them.

    In a pipeline all of them run: what it holds and sends depends on their number.
    """
    s = plan.strategy
    if plan.mesh.pp > 1 or s.accumulation <= MICRO_BATCHES:
        return plan
    uneven = tuple(replace(share, micro_batches=min(share.micro_batches, MICRO_BATCHES)) for share in s.uneven_batch)
    return replace(plan, strategy=replace(s, accumulation=MICRO_BATCHES, uneven_batch=uneven))


def seen_by(plan: Plan, rank: int) -> Plan:
    """The plan as one rank sees it, whose own number of micro-batches is that of everybody."""
    s = plan.strategy
    if not s.uneven_batch:
        return plan
    own = len(sequences_of(plan.mesh, s, rank // plan.mesh.tp)) // s.micro_batch
    return replace(plan, strategy=replace(s, accumulation=own, uneven_batch=()))


def batch_for(plan: Plan, count: int) -> dict[str, Tensor]:
    """The first `count` sequences of the process' share of one global batch, the whole of which is in memory."""
    whole = as_process(plan).strategy.micro_batch * plan.strategy.accumulation
    return {name: torch.zeros(whole, length, dtype=torch.long)[:count] for name, length in lengths_of(plan).items()}


def lengths_of(plan: Plan) -> dict[str, int]:
    """The tensors of a sequence by name, and how many tokens each has: a decoder behind an encoder has its own."""
    work = plan.workload
    if plan.model.enc_layers:
        return {"input_ids": work.seq_len, "decoder_input_ids": work.targets, "labels": work.targets}
    return {"input_ids": work.seq_len, "labels": work.seq_len}


def axis_of(group: dist.ProcessGroup | None, names: dict[str, str]) -> str:
    """The axis of a group by `group_names`; "world" for any other, "" for one that has nobody to send to."""
    if group is None:
        return "world"
    return names.get(group.group_name, "world") if group.size() > 1 else ""


def group_names(job: Job) -> dict[str, str]:
    """The mesh axis of every process group of the job by the group's name; "shards" for dp_shard and cp together, "data" for
    those and dp_replicate, "cp_inner" and "cp_ring" for the parts of a hierarchical cp."""
    names: dict[str, str] = {
        job.mesh[axis].get_group().group_name: axis for axis in MESH_AXES if job.plan.mesh.size(axis) > 1
    }
    if job.expert_mesh is not None:
        axes = ("dp_replicate", EXPERT_SHARDS, "ep")
        names |= {job.expert_mesh[axis].get_group().group_name: axis for axis in axes}
        if job.plan.strategy.zero == 1:
            names.setdefault(expert_data_mesh(job.expert_mesh).get_group().group_name, EXPERT_DATA)
    if job.context_mesh is not None:
        names |= {job.context_mesh[axis].get_group().group_name: axis for axis in (INSIDE_CP, RING_OF_CP)}
    for joint, group in ((SHARDS, shard_group(job.mesh)), (DATA, data_group(job.mesh))):
        if group is not None:
            names.setdefault(group.group_name, joint)
    return names
