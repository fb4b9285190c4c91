"""How many layers each stage of a pipeline runs again where each has its own number (`recompute=by-stage`): the fewest with which it fits.

A stage of 1F1B holds as many micro-batches as there are stages from it to the last, so the first needs most recomputation, and the slowest
stage paces all of them. What a stage holds does not depend on the others' numbers, and each layer that runs again takes time: no
other numbers that fit make a shorter step. Zhu et al. 2025 (Mist, arXiv 2503.19050) and Liu et al. 2024 (Aceso, EuroSys) search for
numbers by stage; the rule is ours.
"""

from __future__ import annotations

import numpy as np

from strategist.document.estimate import MEMORY_TERMS
from strategist.facts.job import Job
from strategist.facts.model import layer_sequence
from strategist.memory.estimate import device_bytes_CS, least_memory
from strategist.space.candidates import OF_STAGE, Candidates, Column, Mask, code

ROUNDED = len(MEMORY_TERMS)
"""Bytes by which a ledger of whole bytes may be above what a stage holds: every term is rounded up."""


def with_depths(job: Job, candidates: Candidates) -> Candidates:
    """The layouts, those that leave the numbers of their stages to the rule with these numbers.

    Every stage runs the fewest of the first layers of each of its chunks again with which it fits, up to an equal share; all of them
    run an equal share again where some stage does not fit with it.
    """
    if "recompute_depth" not in candidates.columns:
        return candidates
    if not any(name.startswith(OF_STAGE) for name in candidates.columns):
        rows = np.flatnonzero(candidates["recompute_depth"])
        candidates = _numbered(candidates, rows, fewest_layers_CS(job, candidates.where(rows)))
    return Candidates({**candidates.columns, "depth": candidates.depth})


def fewest_layers_CS(job: Job, c: Candidates) -> Column:
    """The rule's numbers for every stage of some pipelines, (C, S) with as many columns as the longest has stages; 0 where one has no such stage."""
    share = len(layer_sequence(job.model)) // (c["pp"] * c["virtual_stages"])
    stages = np.arange(int(c["pp"].max(initial=0)))
    is_there = stages < c["pp"][:, None]
    found = np.where(is_there, share[:, None], 0)
    open_ = np.flatnonzero(_may_fit(job, c, share))
    open_ = open_[(_fits(job, c, open_, share) | ~is_there[open_]).all(axis=1)]
    left = is_there[open_]  # stages whose number is not known yet
    number = 0
    while len(open_):
        fit = left & _fits(job, c, open_, np.full_like(share, number))
        found[open_] = np.where(fit, number, found[open_])
        left = left & ~fit
        number += 1
        waits = left.any(axis=1) & (number < share[open_])
        open_, left = open_[waits], left[waits]
    return found


def _may_fit(job: Job, c: Candidates, number: Column) -> Mask:
    """Where a bound of memory allows so many layers of every stage, (C,)."""
    return least_memory(job, _alike(c, number)).device <= job.usable_bytes


def _fits(job: Job, c: Candidates, rows: Column, number: Column) -> Mask:
    """Which stages of some rows fit with so many layers, (rows, S)."""
    held = device_bytes_CS(job, _alike(c.where(rows), number[rows]), int(c["pp"].max(initial=0)))
    return np.asarray(held + ROUNDED <= job.usable_bytes)


def _alike(c: Candidates, number: Column) -> Candidates:
    """The same layouts with one number for all stages, (C,); a number of 0 is no recomputation."""
    recompute = np.where(number > 0, c["recompute"], code("recompute", "none"))
    return Candidates({**c.without("recompute_depth").columns, "recompute": recompute, "recompute_layers": number})


def _numbered(c: Candidates, rows: Column, numbers_CS: Column) -> Candidates:
    """The layouts with the numbers of some rows, stage by stage."""
    columns = {}
    for stage, numbers in enumerate(numbers_CS.T):
        columns[f"{OF_STAGE}{stage}"] = column = np.zeros(len(c), np.int64)
        column[rows] = numbers
    return Candidates({**c.columns, **columns})
