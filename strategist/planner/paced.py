"""The same search in blocks, for somebody who watches or who has not much time: between two blocks it can be seen and stopped."""

from __future__ import annotations

import numpy as np

from strategist.facts.job import Job
from strategist.planner.search import Pace, Tried
from strategist.planner.weigh import Weights, fits
from strategist.space.candidates import Candidates, Column, Mask
from strategist.timing.estimate import StepTimes, joined_times, step_times

BLOCK = 2**13
"""Layouts that are weighed and timed between two looks at the clock: some tenths of a second."""


def in_blocks(job: Job, legal: Candidates, pace: Pace, block_size: int = BLOCK) -> Tried:
    """What became of the legal layouts, or of those of the blocks there was time for. Until something fits there is always
    time: without it nobody could say whether there is a plan. Each block has meshes from everywhere, so that what is found early is not of one corner of the space."""
    weights = Weights(job, legal, later=True)
    rows = weights.waiting
    block_of = legal.mesh[rows] % -(-max(1, len(rows)) // block_size)
    parts: list[tuple[Column, StepTimes]] = []
    untried = np.zeros(len(legal), np.bool_)
    untried[rows] = True
    best: float | None = None
    done = 0
    for number in range(int(block_of.max(initial=-1)) + 1):
        if parts and pace.is_over:
            break
        block = rows[block_of == number]
        weights.weigh(block)
        untried[block] = False
        fitting = block[fits(job, legal.where(block), weights.device[block], weights.host[block])]
        if len(fitting):
            parts.append((fitting, step_times(job, legal.where(fitting))))
            best = min(float(parts[-1][1].step.min()) / 1e9, best or np.inf)
        done += len(block)
        pace.tick("layouts weighed", done, len(rows), best)
    return _joined(job, legal, weights, parts, untried)


def _joined(
    job: Job, legal: Candidates, weights: Weights, parts: list[tuple[Column, StepTimes]], untried: Mask
) -> Tried:
    """All blocks as one search."""
    left, kept = int(untried.sum()), None
    if left:
        kept = np.flatnonzero(~untried)
        legal, weights = legal.where(kept), weights.where(kept)
    fitting = np.flatnonzero(weights.fits)
    candidates = legal.where(fitting)
    if not parts:
        return Tried(legal, weights, fitting, candidates, step_times(job, candidates), left, rows=kept)
    rows = np.sort(np.concatenate([rows for rows, _ in parts]))
    return Tried(legal, weights, fitting, candidates, joined_times(parts, rows), left, rows=kept)
