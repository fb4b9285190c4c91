"""Bytes that a worker of a parameter server has of tables which it does not hold."""

from __future__ import annotations

from strategist.facts.job import Job
from strategist.facts.tables import ID_BYTES
from strategist.space.candidates import Candidates, Reals
from strategist.space.served import named_C


def kept_bytes_C(job: Job, c: Candidates) -> Reals:
    """Bytes from a micro-batch's forward until its backward, (C,): which rows were named, and for every id which of them it is.
    Source: strategist/executor/tables.py, RemoteTable."""
    ids, rows, _ = named_C(job, c)
    return 1.0 * ID_BYTES * (ids + rows)


def rows_C(job: Job, c: Candidates) -> Reals:
    """Elements of a micro-batch's rows, or of their gradient, (C,)."""
    return 1.0 * named_C(job, c)[2]
