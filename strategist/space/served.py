"""What workers and a parameter server send each other: which rows are wanted, the rows, which rows they are, their gradients."""

from __future__ import annotations

import numpy as np

from strategist.columns import on_stages
from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.facts.tables import ID_BYTES, named_at_most, served_tables
from strategist.space.candidates import Candidates, Column, distinct
from strategist.space.shares import Group, tokens
from strategist.space.traffic import Traffic


def named_C(job: Job, c: Candidates) -> tuple[Column, Column, Column]:
    """(ids, rows, elements) that a micro-batch names at most in all tables, (C,) each: every token another row, as in a trace."""
    ids = tokens(job, c).astype(np.int64)
    first, place = distinct(ids)
    found = [named_at_most(job.model, int(number)) for number in ids[first]]
    columns = np.array([(named.ids, named.rows, named.elements) for named in found], np.int64).T
    of_ids, of_rows, of_elements = (column[place] for column in columns)
    return of_ids, of_rows, of_elements


def pulled_and_pushed(job: Job, group: Group) -> tuple[Traffic, ...]:
    """Per step: numbers of rows go to the server twice a micro-batch, rows come back, and their gradients go.

    Source: strategist/executor/tables.py, Pulled; a message for each table.
    """
    c = group.candidates
    _, rows, elements = named_C(job, c)
    tables = float(len(served_tables(job.model)))
    twice = (2.0 * c["accumulation"])[:, None] * np.ones(len(group.stages))
    ones = np.ones(len(group.stages))
    numbers = on_stages(1.0 * ID_BYTES * rows, ones)
    values = on_stages(BYTES[job.formats.parameter] * elements, ones)
    return (
        Traffic("dp", "send", numbers, twice, "server", "nothing", tables),
        Traffic("dp", "send", values, twice, "server", "nothing", tables),
    )
