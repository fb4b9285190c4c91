"""Candidates of a group that agree in what some formulas read: such formulas are worked out once for each sort of them.

A step's formulas read two sets of choices: what weights, their gradients and their buffers come to does not depend on how many
tokens a rank works on, and what activations come to does not depend on how many ranks share the state of the weights. A group of
thousands of candidates has some hundred sorts of either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from strategist.facts.job import Job
from strategist.records import dataclass, names_of
from strategist.space.candidates import OF_LAYERS, Candidates, Column
from strategist.space.shares import Group, is_managed, is_plain_data_parallel, part_of, state_shards

Read = Literal["state", "work", "layer", "schedule"]
"""What a formula reads: how the state of the weights is shared and when; how much a rank works on, and how; the same and of the state
whether gradients are shared and where they rest; where a rank is in its schedule."""

_NOT_OF_WORK = ("mesh", "dp_replicate", "dp_shard", "zero", "offload")
NOT_READ: Mapping[Read, tuple[str, ...]] = {
    "state": ("mesh", "dp_replicate", "dp_shard", "cp", "cp_inner", "micro_batch", "recompute", "sequence_parallel", "context_parallel"),
    "work": _NOT_OF_WORK,
    "layer": _NOT_OF_WORK,
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
FEW = 2**10
"""Candidates that are worked out sooner than sorted."""
ALIKE = 2
"""How many candidates of a sort make it worth while."""


@dataclass(frozen=True, slots=True, eq=False)
class Sorts:
    """One candidate of each sort as a group, its place among all, and the place of each candidate's sort."""

    group: Group
    firsts: Column
    place: Column


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
    c = group.candidates
    columns = [column for name, column in c.columns.items() if name not in NOT_READ[read]]
    columns += [] if at is None else [at]
    firsts, place = c.sorts((*columns, *_sharing(job, c, read)))
    if ALIKE * len(firsts) > len(c):
        return None
    return Sorts(part_of(group, firsts), firsts, place)


def sorts_of_layers(job: Job, c: Candidates) -> tuple[Column, Column] | None:
    """One candidate of each sort of those inside whose layers the same happens, and the place of each candidate's sort; None as above."""
    if len(c) <= FEW or c.in_threads or job.model.adapters is not None:
        return None
    plain = is_plain_data_parallel(job, c)
    firsts, place = c.sorts((*(c[name] for name in INSIDE_LAYERS if name in c.columns), 1 * plain))
    return None if ALIKE * len(firsts) > len(c) else (firsts, place)


def _sharing(job: Job, c: Candidates, read: Read) -> tuple[Column, ...]:
    """What is read of how ranks share state."""
    if read == "schedule":
        return ()
    several = 1 * (c.data_parallel * c["cp"] > 1) + (c["dp_replicate"] > 1)
    if read == "state":
        return several, state_shards(c)
    plain = is_plain_data_parallel(job, c)
    wrapped = 3 * several + plain + 1 * is_managed(job, c)
    return (wrapped, 1 * (c["zero"] >= 2), c["offload"]) if read == "layer" else (wrapped,)


def rows_of(values: Any, rows: Column) -> Any:
    """Some rows of an array (C,) or (..., C, S), or the array where it is alike for all of them; of each of several arrays."""
    if isinstance(values, tuple):
        return tuple(rows_of(each, rows) for each in values)
    if isinstance(values, float):
        return values
    if values.ndim == 0 or values.shape[-2:][0] == 1:
        return values
    if values.ndim == 1:
        return values.take(rows)
    return values.swapaxes(-1, -2).take(rows, axis=-1, mode="wrap").swapaxes(-1, -2)  # the quickest: all rows are there


def record_of(record: Any, rows: Column) -> Any:
    """Some rows of every array of a record; what is one array under two names stays one."""
    every = {id(values): values for values in (getattr(record, name) for name in names_of(type(record)))}
    own = {number: rows_of(values, rows) for number, values in every.items()}
    return type(record)(**{name: own[id(getattr(record, name))] for name in names_of(type(record))})
