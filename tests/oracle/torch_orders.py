"""The order of work that torch's own schedule classes give every rank of a pipeline, asked without any process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

CLASSES = {
    "interleaved": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "zb_h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""Names in torch.distributed.pipelining.schedules."""


Work = tuple[str, int, int]
"""Kind of work, number of the stage over all chunks, micro-batch."""


def torch_order(word: str, pp: int, virtual: int, count: int, rank: int) -> list[Work]:
    """The work of a rank, in order."""
    return [work for pair in torch_pairs(word, pp, virtual, count, rank) for work in pair]


def torch_pairs(word: str, pp: int, virtual: int, count: int, rank: int) -> list[tuple[Work, ...]]:
    """The same by actions; results of a pair are sent when both are over."""
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
    return [
        tuple((a.computation_type.name, a.stage_index, a.microbatch_index) for a in (action.sub_actions or (action,)))
        for action in actions
        if action is not None
    ]
