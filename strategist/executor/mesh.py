"""The device mesh of a Plan, and where this rank stands on it.

All dense axes are always present, those of size 1 too, so that every step can name the axis it needs. Data order follows
the coordinate on (dp_replicate, dp_shard), never the global rank: ranks that differ in tp or pp read the same samples.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from strategist.document.plan import Mesh, Plan
from strategist.errors import StaleError

DATA_AXES = ("dp_replicate", "dp_shard")
DATA = "data"
"""Name of the two data axes taken as one."""


def build_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """The mesh of the plan over all ranks of the running process group. Raises StaleError as `check_world` does."""
    check_world(plan, dist.get_world_size())
    order = plan.mesh.order
    mesh = init_device_mesh(device_type, tuple(plan.mesh.size(axis) for axis in order), mesh_dim_names=order)
    if all(plan.mesh.size(axis) > 1 for axis in DATA_AXES):
        mesh[DATA_AXES]._flatten(DATA)  # here, where real numbers exist: under fake tensors torch cannot make a mesh
    return mesh


def check_world(plan: Plan, world: int) -> None:
    """Raise StaleError FACTS_DIFFER unless `world` ranks are what the plan was made for.

    With too many, torch would leave some without a coordinate and say nothing.
    """
    planned = plan.mesh.world
    if world != planned:
        raise StaleError(
            "FACTS_DIFFER",
            f"The plan is for {planned} ranks ({_product(plan.mesh)}), but {world} were started.",
            flag="$.mesh",
            value=world,
            hint=f"Start {planned} ranks, or plan again for {world}.",
        )


def _product(mesh: Mesh) -> str:
    return " x ".join(f"{axis} {mesh.size(axis)}" for axis in mesh.order)


def data_rank(mesh: DeviceMesh) -> int:
    """This rank's place among the ranks that read different samples, in [0, dp_replicate x dp_shard)."""
    replica, shard = (mesh.get_local_rank(axis) for axis in DATA_AXES)
    return replica * mesh["dp_shard"].size() + shard


def data_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group over which losses and token counts are added up; None when one rank reads everything."""
    everybody = data_mesh(mesh)
    return everybody.get_group() if everybody.size() > 1 else None


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group over which states are sharded; None when each rank holds them all."""
    return mesh["dp_shard"].get_group() if mesh["dp_shard"].size() > 1 else None


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axis of all ranks that read different samples: the one that has several ranks, or both taken as one."""
    wide = [axis for axis in DATA_AXES if mesh[axis].size() > 1]
    return mesh[DATA if len(wide) > 1 else (wide or DATA_AXES)[0]]


def pipeline_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of this rank's stages; None without a pipeline."""
    return mesh["pp"].get_group() if mesh["pp"].size() > 1 else None
