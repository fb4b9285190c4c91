"""Which runs of layers a rank of a pipeline owns."""

from __future__ import annotations

BREADTH_FIRST = ("gpipe", "looped_bfs")
"""Schedules of which every rank runs all forward passes before its first backward pass."""

V_SHAPED = ("zbv", "dualpipev")
"""Schedules whose runs go down the ranks and up again: the first rank has the first run and the last, too (Qi et al. 2023, arXiv
2401.10241, section 6; https://github.com/deepseek-ai/DualPipe, DualPipeV)."""

OF_CHUNKS = ("interleaved", "looped_bfs", *V_SHAPED)
"""Schedules over several chunks of layers per rank."""


def stage_of_head(schedule: str, pp: int) -> int:
    """The stage that has the head and the loss."""
    return 0 if schedule in V_SHAPED else pp - 1


def runs_of(schedule: str, pp: int, virtual_stages: int, stage: int) -> tuple[int, ...]:
    """Numbers of a stage's runs, in forward order. Stages take turns, or under a V-shaped schedule come back in turn."""
    if schedule in V_SHAPED:
        return stage, 2 * pp - 1 - stage
    return tuple(range(stage, pp * virtual_stages, pp))
