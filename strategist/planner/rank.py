"""A total order of candidates: the objective first, then what is simpler, then what is leaner, then the columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from strategist.document.plan import Objective
from strategist.space.candidates import Candidates, Column


def complexity(c: Candidates) -> Column:
    """How much a layout asks of code and people, (C,): axes in use, ZeRO stage, recompute, offload, schedule."""
    axes = sum(((c[axis] > 1).astype(np.int64) for axis in ("tp", "pp", "cp", "ep")), np.zeros(len(c), np.int64))
    hybrid = ((c["dp_replicate"] > 1) & (c["dp_shard"] > 1)).astype(np.int64)
    return (
        100 * axes + 20 * c["offload"] + 10 * c["zero"] + 5 * hybrid + 2 * c["recompute"] + c["schedule"] + c["tiling"]
    )


Key = Callable[[Candidates, Column, Column], Column]

_TIME: Key = lambda c, step_ns, device_bytes: step_ns  # noqa: E731
_BYTES: Key = lambda c, step_ns, device_bytes: device_bytes  # noqa: E731
_SIMPLE: Key = lambda c, step_ns, device_bytes: complexity(c)  # noqa: E731

KEYS: Mapping[Objective, tuple[Key, ...]] = {
    "time": (_TIME, _SIMPLE, _BYTES),
    "cost": (_TIME, _SIMPLE, _BYTES),
    "memory": (_BYTES, _TIME, _SIMPLE),
    "simplicity": (_SIMPLE, _TIME, _BYTES),
}
"""What each objective looks at, in order. On a fixed cluster cost is time."""


def best(c: Candidates, step_ns: Column, device_bytes: Column, objective: Objective, among: Column) -> int:
    """The best row among some: ties on one key are broken by the next, at last by every column, so that equal questions
    have equal answers."""
    for key in KEYS[objective]:
        value = key(c, step_ns, device_bytes)[among]
        among = among[value == value.min()]
        if len(among) == 1:
            return int(among[0])
    for name in c.choices:
        value = c[name][among]
        among = among[value == value.min()]
    return int(among[0])
