"""Candidates of a group that agree in what some formulas read: such formulas are worked out once for each sort of them.

A step's formulas read two sets of choices: what weights, their gradients and their buffers come to does not depend on how many
tokens a rank works on, and what activations come to does not depend on how many ranks share the state of the weights. A group of
thousands of candidates has some hundred sorts of either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from strategist.facts.job import Job
from strategist.space.candidates import OF_LAYERS, Candidates, Column
from strategist.space.shares import (
    Group,
    Sorts,
    is_managed,
    is_plain_data_parallel,
    sorts_by_meshes,
    state_shards,
)

Read = Literal["state", "work", "layer", "schedule"]
"""What a formula reads: how the state of the weights is shared and when; how much a rank works on, and how; the same and of the state
whether gradients are shared and where they rest; where a rank is in its schedule."""

_NOT_OF_LAYER = ("mesh", "dp_replicate", "dp_shard", "zero")
_NOT_OF_WORK = (*_NOT_OF_LAYER, "offload")
NOT_READ: Mapping[Read, tuple[str, ...]] = {
    "state": ("mesh", "dp_replicate", "dp_shard", "cp", "cp_inner", "micro_batch", "recompute", "sequence_parallel", "context_parallel"),
    "work": _NOT_OF_WORK,
    "layer": _NOT_OF_LAYER,
    "schedule": (*_NOT_OF_WORK, "cp", "cp_inner", "tp", "ep", "etp", "micro_batch", "recompute", "sequence_parallel", "context_parallel", "tiling"),
}  # fmt: skip
"""Columns that such formulas do not read, or only in `_sharing`."""
INSIDE_LAYERS = (
    "tp",
    "cp",
    "cp_inner",
    "ep",
    "etp",
    "micro_batch",
    "sequence_parallel",
    "context_parallel",
    "recompute",
    "tiling",
)
"""Columns that the work inside one layer reads where they are there, beside whether DDP runs it."""
MICRO_BATCHES = 3
"""So many and more are alike to how state is shared, but for how far a pipeline is in its schedule."""
FEW = 2**10
"""Candidates that are worked out sooner than sorted."""


def sorts_of(job: Job, group: Group, read: Read, at: Column | None = None) -> Sorts | None:
    """The sorts of a group's candidates, which differ in their passes where these are `at` different places; None where they would not help,
    or where replicas' threads, hooks, slices, adapters, experts that lie apart or a policy for each layer read more."""
    key = "sorts", read, id(at)
    if key not in group.known:  # beside `at`, whose number is nobody else's as long as it is there
        group.known[key] = at, _sorted(job, group, read, at) if _has_sorts(job, group) else None
    found: Sorts | None = group.known[key][1]
    return found


def _has_sorts(job: Job, group: Group) -> bool:
    c = group.candidates
    asked = c.in_threads or "compression" in c.columns or job.model.adapters is not None
    asked = asked or any(name in c.columns and c[name].any() for name in OF_LAYERS) or bool(job.recompute_layers)
    return len(group.rows) > FEW and not (asked or group.is_tiled or group.is_v_shaped or (c["ep"] > 1).any())


def _sorted(job: Job, group: Group, read: Read, at: Column | None) -> Sorts | None:
    c, work = group.candidates, sorts_of(job, group, "work", at) if read == "layer" else None
    shared = _sharing(job, group.meshes, read)
    if work is not None:  # of which these are parts
        return sorts_by_meshes(group, shared, (work.place, "offload"))
    columns: list[Column | str] = [] if at is None else [at]
    names = [name for name in c.columns if name not in NOT_READ[read]]
    if read == "state" and (at is not None or group.pp == 1):  # passes tell how many micro-batches matter
        names.remove("accumulation")
        columns.append(np.minimum(c["accumulation"], MICRO_BATCHES))
    return sorts_by_meshes(group, shared, (*columns, *names))


def sorts_of_layers(job: Job, c: Candidates) -> tuple[Column, Column] | None:
    """One candidate of each sort of those inside whose layers the same happens, and the place of each candidate's sort; None where replicas'
    threads or adapters read more, or one is alone."""
    if len(c) == 1 or c.in_threads or job.model.adapters is not None:
        return None
    plain = is_plain_data_parallel(job, c)
    return c.sorts((*(name for name in INSIDE_LAYERS if name in c.columns), 1 * plain))


def _sharing(job: Job, c: Candidates, read: Read) -> tuple[Column, ...]:
    """What is read of how ranks share state, which is the same of all candidates of a mesh and ZeRO stage."""
    if read == "schedule":
        return ()
    several = 1 * (c.data_parallel * c["cp"] > 1) + (c["dp_replicate"] > 1)
    if read == "state":
        again = (1 * c.is_word("recompute", "full"),) if job.profile.reuse_distance else ()
        return several, state_shards(c), *again
    plain = is_plain_data_parallel(job, c)
    wrapped = 3 * several + plain + 1 * is_managed(job, c)
    return (wrapped, 1 * (c["zero"] >= 2)) if read == "layer" else (wrapped,)
