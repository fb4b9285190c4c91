"""Candidates of a group that agree in what some formulas of time read: such formulas are worked out once for each sort of them.

What a rank computes, and what it sends within its replica, does not depend on how replicas share the state of the weights; what
replicas send each other does not depend on how a rank works through its tokens.
"""

from __future__ import annotations

import numpy as np

from strategist.facts.job import Job
from strategist.facts.runs import BREADTH_FIRST
from strategist.space.candidates import MESH_COLUMNS, Candidates
from strategist.space.shares import Group, Sorts, holds_early_C, is_managed, sorts_by, sorts_by_meshes, state_shards

FEW = 2**9
"""Candidates that are worked out sooner than sorted."""
_NOT_WITHIN = ("mesh", "dp_replicate", "dp_shard", "zero", "offload", "tiling")
"""Columns that compute and traffic within a replica do not read, or only as `sorts_within` adds them."""
_NOT_BETWEEN = (
    *MESH_COLUMNS, "zero", "cp_inner", "virtual_stages", "schedule",
    "micro_batch", "sequence_parallel", "context_parallel", "recompute", "offload", "tiling",
)  # fmt: skip
"""Columns that traffic between replicas does not read beside the number of a mesh, or only as `sorts_between` adds them."""


def has_sorts(job: Job, group: Group) -> bool:
    """Whether sorts help: not a few candidates, nor where threads, hooks, servers of tables, slices, adapters or Muon read more."""
    c = group.candidates
    asked = c.in_threads or c.serves_tables or "compression" in c.columns
    asked = asked or job.model.adapters is not None or job.workload.optimizer == "muon"
    return len(c) > FEW and not (asked or group.is_tiled)


def sorts_within(job: Job, group: Group) -> Sorts | None:
    """The sorts of candidates that compute alike and send alike within a replica. Of how state is shared such traffic reads how large a
    replica is, whether units reduce what is whole on every rank of tp or how many share the sum a step, and shards of the table where
    both ends exchange its gradient."""
    meshes, names = group.meshes, _read(group.candidates, _NOT_WITHIN)
    once = job.profile.adds_terms == "step"
    reads_shards = (once and (meshes["tp"] > 1)) | (job.model.tied and group.pp > 1)
    shares = np.where(reads_shards & (meshes["zero"] >= 2), state_shards(meshes), 1)
    units = () if once else (1 * is_managed(job, meshes),)
    return sorts_by_meshes(group, (meshes.world, shares, *units), names)


def sorts_between(job: Job, group: Group) -> Sorts | None:
    """The sorts of candidates whose replicas send each other the same. Of schedules it matters when a last pass gathers in vain, and where
    weights are kept that are soon read again, whether forward runs again (`shares.near_turn`)."""
    c = group.candidates
    chunks = np.where(holds_early_C(c), c["virtual_stages"], 0)
    again = (1 * c.is_word("recompute", "full"),) if job.profile.reuse_distance else ()
    others = (chunks, 1 * c.is_word("schedule", *BREADTH_FIRST), *again)
    return sorts_by(group, (c.mesh, *_read(c, (*_NOT_BETWEEN, "mesh")), *others))


def _read(c: Candidates, others: tuple[str, ...]) -> list[str]:
    return [name for name in c.columns if name not in others]
