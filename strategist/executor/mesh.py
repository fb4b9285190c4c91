"""The device mesh of a Plan, and where this rank stands on it.

All dense axes are always present, those of size 1 too, so that every step can name the axis it needs. Data order follows
the coordinate on (dp_replicate, dp_shard), never the global rank: ranks that differ in tp or pp read the same samples.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from strategist.document.plan import Plan
from strategist.errors import StaleError

DATA_AXES = ("dp_replicate", "dp_shard")
SHARD_AXES = ("dp_shard", "cp")
"""Ranks that share one copy of parameters and their state: those of cp hold the same weights, whatever tokens they see."""
AVERAGE_AXES = ("dp_replicate", *SHARD_AXES)
"""Ranks that see different tokens, whose gradients are averaged."""
EXPERT_SHARDS = "expert_shards"
"""Ranks that hold the same experts and share their state; under zero 0 each has all of it."""
SHARDS, DATA = "shards", "data"
"""Names of several such axes taken as one: without and with dp_replicate."""
EXPERT_DATA = "expert_data"
"""The name of dp_replicate and EXPERT_SHARDS taken as one: under zero 1 gradients are averaged over replicas that share no state."""

INSIDE_CP, RING_OF_CP = "cp_inner", "cp_ring"
"""Neighbours along cp that exchange heads, and every so-many-th rank of it, which are a ring."""


def build_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """The mesh of the plan over all ranks of the running process group. Raises StaleError as `check_world` does."""
    check_world(plan, dist.get_world_size())
    order = plan.mesh.order
    mesh = init_device_mesh(device_type, tuple(plan.mesh.size(axis) for axis in order), mesh_dim_names=order)
    joint = {_wide(mesh, axes) for axes in (SHARD_AXES, AVERAGE_AXES)}
    for axes in (axes for axes in joint if len(axes) > 1):
        mesh[axes]._flatten(_joint(axes))  # here, where real numbers exist: under fake tensors torch cannot make a mesh
    return mesh


def build_expert_mesh(plan: Plan, device_type: str) -> DeviceMesh | None:
    """The same ranks as experts lie on them: `etp` neighbours cut each expert, `ep` groups of them share the experts, and
    `expert_shards` of those the experts' state; replicas stay apart where state is shared. None where every rank holds all experts."""
    mesh = plan.mesh
    if mesh.ep == 1:
        return None
    outer = mesh.dp_replicate if plan.strategy.zero >= 1 else 1
    sizes = (mesh.pp, outer, mesh.expert_dp // outer, mesh.ep, mesh.etp)
    found = init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp_replicate", EXPERT_SHARDS, "ep", "etp"))
    if outer > 1 and plan.strategy.zero == 1:
        found["dp_replicate", EXPERT_SHARDS]._flatten(EXPERT_DATA)
    return found


def build_context_mesh(plan: Plan, device_type: str) -> DeviceMesh | None:
    """The same ranks with cp as two axes, rings and the neighbours inside; None where context parallelism is not hierarchical."""
    mesh, inner = plan.mesh, plan.strategy.cp_inner
    if plan.strategy.context_parallel != "hierarchical":
        return None
    sizes = {axis: mesh.size(axis) for axis in mesh.order} | {RING_OF_CP: mesh.cp // inner, INSIDE_CP: inner}
    names = tuple(own for axis in mesh.order for own in ((RING_OF_CP, INSIDE_CP) if axis == "cp" else (axis,)))
    return init_device_mesh(device_type, tuple(sizes[name] for name in names), mesh_dim_names=names)


def check_world(plan: Plan, world: int) -> None:
    """Raise StaleError FACTS_DIFFER unless `world` ranks are what the plan was made for.

    With too many, torch would leave some without a coordinate and say nothing.
    """
    planned = plan.processes
    if world != planned:
        raise StaleError(
            "FACTS_DIFFER",
            f"The plan is for {planned} ranks ({_product(plan)}), but {world} were started.",
            flag="$.mesh",
            value=world,
            hint=f"Start {planned} ranks, or plan again for {world}.",
        )


def _product(plan: Plan) -> str:
    mesh = plan.mesh
    degrees = " x ".join(f"{axis} {mesh.size(axis)}" for axis in mesh.order)
    return degrees if plan.processes == mesh.world else f"{degrees}, as threads"


def data_rank(mesh: DeviceMesh) -> int:
    """This rank's place among the ranks that read different samples, in [0, dp_replicate x dp_shard)."""
    replica, shard = (mesh.get_local_rank(axis) for axis in DATA_AXES)
    return replica * mesh["dp_shard"].size() + shard


def data_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group over which gradients are averaged, losses and token counts added up; None when one rank sees all tokens."""
    return _group(data_mesh(mesh))


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group over which states are sharded; None when each rank holds them all."""
    return _group(mesh[shard_axis(mesh)])


def expert_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group over which the states of one expert are shared; None when each rank holds them all."""
    return _group(mesh[EXPERT_SHARDS])


def expert_data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axis of all ranks that hold the same experts, replicas that share no state with each other among them."""
    return mesh[EXPERT_DATA if mesh["dp_replicate"].size() > 1 else EXPERT_SHARDS]


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axis of all ranks that see different tokens: the one that has several ranks, or all such taken as one."""
    return mesh[_joint(_wide(mesh, AVERAGE_AXES))]


def shard_axis(mesh: DeviceMesh) -> str:
    """The axis over which states are sharded: dp_shard, cp, or both taken as one."""
    return _joint(_wide(mesh, SHARD_AXES))


def _wide(mesh: DeviceMesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of some axes that have several ranks, in mesh order; dp_shard when none has."""
    names = mesh.mesh_dim_names or ()
    return tuple(axis for axis in names if axis in axes and mesh[axis].size() > 1) or ("dp_shard",)


def _joint(axes: tuple[str, ...]) -> str:
    if len(axes) == 1:
        return axes[0]
    return DATA if "dp_replicate" in axes else SHARDS


def _group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    return mesh.get_group() if mesh.size() > 1 else None


def pipeline_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of this rank's stages; None without a pipeline."""
    return mesh["pp"].get_group() if mesh["pp"].size() > 1 else None
