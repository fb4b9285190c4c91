"""A total order of candidates: the objective first, then what is simpler, then what is leaner, then the columns."""

from __future__ import annotations

import numpy as np

from strategist.document.plan import Objective
from strategist.space.candidates import MESH_COLUMNS, OPTION_COLUMNS, Candidates, Column


def complexity(c: Candidates) -> Column:
    """How much a layout asks of code and people, (C,): axes in use, ZeRO stage, recompute, offload, schedule."""
    axes = sum(((c[axis] > 1).astype(np.int64) for axis in ("tp", "pp", "cp", "ep")), np.zeros(len(c), np.int64))
    hybrid = ((c["dp_replicate"] > 1) & (c["dp_shard"] > 1)).astype(np.int64)
    return (
        100 * axes + 20 * c["offload"] + 10 * c["zero"] + 5 * hybrid + 2 * c["recompute"] + c["schedule"] + c["tiling"]
    )


def order(c: Candidates, step_ns: Column, device_bytes: Column, objective: Objective) -> Column:
    """Row numbers from best to worst. Ties are broken by complexity, time, bytes and finally by every column, so equal
    questions have equal answers."""
    simple = complexity(c)
    keys = {
        "time": (step_ns, simple, device_bytes),
        "cost": (step_ns, simple, device_bytes),
        "memory": (device_bytes, step_ns, simple),
        "simplicity": (simple, step_ns, device_bytes),
    }[objective]
    ties = [c[name] for name in (*MESH_COLUMNS, *OPTION_COLUMNS)]
    return np.lexsort([*reversed(ties), *reversed(keys)]).astype(np.int64)


def best(c: Candidates, step_ns: Column, device_bytes: Column, objective: Objective, among: Column) -> int:
    """The best row among some."""
    part = order(c.where(among), step_ns[among], device_bytes[among], objective)
    return int(among[part[0]])
