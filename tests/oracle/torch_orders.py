"""The order of work that torch's own schedule classes give every rank of a pipeline, asked without any process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

CLASSES = {
    "interleaved": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "zb_h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
"""Names in torch.distributed.pipelining.schedules."""


def torch_order(word: str, pp: int, virtual: int, count: int, rank: int) -> list[tuple[str, int, int]]:
    """(kind of work, number of the stage over all chunks, micro-batch) of a rank, in order."""
    from torch.distributed.pipelining import schedules

    schedule: Any = SimpleNamespace(
        n_local_stages=virtual,
        microbatches_per_round=pp,
        pp_group_size=pp,
        _n_microbatches=count,
        _stages=range(virtual),
        num_stages=pp * virtual,
    )
    actions = getattr(schedules, CLASSES[word])._calculate_single_rank_operations(schedule, rank)
    return [(a.computation_type.name, a.stage_index, a.microbatch_index) for a in actions if a is not None]
