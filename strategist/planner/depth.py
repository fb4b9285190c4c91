"""How many layers each stage of a pipeline runs again where each has its own number (`recompute=by-stage`): the fewest with which it fits.

A stage of 1F1B holds as many micro-batches as there are stages from it to the last, so the first needs most recomputation, and the slowest
stage paces all of them. What a stage holds does not depend on the others' numbers, and each layer that runs again takes time: no
other numbers that fit make a shorter step. Zhu et al. 2025 (Mist, arXiv 2503.19050) and Liu et al. 2024 (Aceso, EuroSys) search for
numbers by stage; the rule is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strategist.document.estimate import MEMORY_TERMS
from strategist.facts.job import Job
from strategist.memory.estimate import device_bytes_CS, least_memory
from strategist.space.candidates import LAYERS_OF, OF_STAGE, Candidates, Column, Mask, code
from strategist.space.stages import chunk_lengths

ROUNDED = len(MEMORY_TERMS)
"""Bytes by which a ledger of whole bytes may be above what a stage holds: every term is rounded up."""


def with_depths(job: Job, candidates: Candidates) -> Candidates:
    """The layouts, those that leave the numbers of their stages to the rule with these numbers.

    Every stage runs the fewest of the first layers of each of its chunks again with which it fits; where some stage fits with none of
    them all run all of their layers again.
    """
    if "recompute_depth" not in candidates.columns:
        return candidates
    if not any(name.startswith(OF_STAGE) for name in candidates.columns):
        is_balanced = candidates.is_word("stage_split", "balanced")
        rows = np.flatnonzero((candidates["recompute_depth"] > 0) & ~is_balanced)
        found = [(rows, OF_STAGE, fewest_layers_CS(job, candidates.where(rows)))]
        if is_balanced.any():
            found += _balanced(job, candidates, np.flatnonzero(is_balanced))
        candidates = _numbered(candidates, found)
    return Candidates({**candidates.columns, "depth": candidates.depth})


def fewest_layers_CS(job: Job, c: Candidates) -> Column:
    """The rule's numbers for every stage of some pipelines, (C, S) with as many columns as the longest has stages; 0 where one has no such stage."""
    found = _layers_CS(job, c)
    longest, is_there = found.max(axis=1, initial=0), np.arange(found.shape[1]) < c["pp"][:, None]
    waiting = np.flatnonzero(_may_fit(job, c, longest))
    waiting = waiting[(_fits(job, c, waiting, longest) | ~is_there[waiting]).all(axis=1)]
    unknown, number = is_there[waiting], 0  # stages whose number is not known yet
    while len(waiting):
        fit = unknown & _fits(job, c, waiting, np.full_like(longest, number))
        found[waiting] = np.where(fit, number, found[waiting])
        unknown, number = unknown & ~fit, number + 1
        more = unknown.any(axis=1) & (number < longest[waiting])
        waiting, unknown = waiting[more], unknown[more]
    return found


def _balanced(job: Job, c: Candidates, rows: Column) -> list[tuple[Column, str, Column]]:
    """Both numbers of stages that own as many layers as makes them equally long."""
    from strategist.planner.balance import balanced_CS  # few ask for it

    layers, again = balanced_CS(job, c.where(rows))
    return [(rows, OF_STAGE, again), (rows, LAYERS_OF, layers)]


def _layers_CS(job: Job, c: Candidates) -> Column:
    """Layers of the longest chunk of every stage, (C, S)."""
    found = np.zeros((len(c), int(c["pp"].max(initial=0))), np.int64)
    first, sort = c.alike("pp", "virtual_stages", "stage_split")
    for place, row in enumerate(first.tolist()):
        pp, virtual, is_weighted = (int(c[name][row]) for name in ("pp", "virtual_stages", "stage_split"))
        found[sort == place, :pp] = chunk_lengths(job.model, pp, virtual, bool(is_weighted))
    return found


def _may_fit(job: Job, c: Candidates, number: Column) -> Mask:
    """Where a bound of memory allows so many layers of every stage, (C,)."""
    return least_memory(job, alike(c, number)).device <= job.usable_bytes


def _fits(job: Job, c: Candidates, rows: Column, number: Column) -> Mask:
    """Which stages of some rows fit with so many layers, (rows, S)."""
    return fits_CS(job, alike(c.where(rows), number[rows]), int(c["pp"].max(initial=0)))


def fits_CS(job: Job, c: Candidates, stages: int) -> Mask:
    """Which of so many stages of some layouts fit, (C, S)."""
    return np.asarray(device_bytes_CS(job, c, stages) + ROUNDED <= job.usable_bytes)


def alike(c: Candidates, number: Column) -> Candidates:
    """The same layouts with one number for all stages, (C,); a number of 0 is no recomputation."""
    recompute = np.where(number > 0, c["recompute"], code("recompute", "none"))
    return Candidates({**c.without("recompute_depth").columns, "recompute": recompute, "recompute_layers": number})


def _numbered(c: Candidates, found: Sequence[tuple[Column, str, Column]]) -> Candidates:
    """The layouts with numbers of some rows, stage by stage: which rows, what stands before the number of a stage, and the numbers, (rows, S)."""
    columns: dict[str, Column] = {}
    for rows, prefix, numbers_CS in found:
        for stage, numbers in enumerate(numbers_CS.T):
            column = columns.setdefault(f"{prefix}{stage}", np.zeros(len(c), np.int64))
            column[rows] = numbers
    return Candidates({**c.columns, **columns})
