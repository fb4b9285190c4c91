"""Seconds that workers wait for a parameter server."""

from __future__ import annotations

from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.facts.tables import ID_BYTES, served_elements
from strategist.space.candidates import Candidates, Reals
from strategist.space.served import named_C
from strategist.timing.optimizer import touched_bytes
from strategist.timing.rates import share

OF_ROWS = 5.0
"""Passes of the server over a worker's rows: it reads and writes them, and adds their gradient to what it has (read, read, write)."""
PASSES_OF_GRADIENTS = 4.0
"""Beside the update: a norm reads them, they are multiplied (read, write), and they are zero again (write)."""


def served_seconds(job: Job, c: Candidates) -> Reals:
    """Seconds of a step, (C,): rows and gradients over each rank's host link, what one process does to the rows of all workers, one
    after the other, and to its tables once a step. None of it is hidden: forward begins with the rows, backward ends with their
    gradients, and the update waits for the norm of all.

    Source: strategist/executor/parameter_server.py, Tables; the rate of the host's memory is that assumed of a CPU AdamW.
    """
    gpu = job.cluster.slowest.gpu
    link = (gpu.host_Bps or gpu.memory_Bps) * share("host_link_share", gpu)
    memory = share("host_update_Bps", gpu)
    _, rows, elements = named_C(job, c)
    stored, gradient = BYTES[job.formats.parameter], BYTES[job.formats.gradient]
    values, micro = stored * elements, 1.0 * c["accumulation"]
    sent = micro * 2.0 * (values + ID_BYTES * rows) / link
    at_rows = micro * c["dp_replicate"] * OF_ROWS * values / memory
    once = (touched_bytes(job) + PASSES_OF_GRADIENTS * gradient) * served_elements(job.model).total / memory
    return sent + at_rows + once
