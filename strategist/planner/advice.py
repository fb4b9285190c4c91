"""What advice asks of a chosen layout beside its own words: links as its ranks lie on them."""

from __future__ import annotations

import numpy as np

from strategist.planner.search import Found
from strategist.timing.collectives import links
from strategist.units import GB


def tensor_parallel_links(found: Found, row: int) -> dict[str, float]:
    """What an all-reduce among the ranks that share a layer reaches: they may lie on faster links than all devices of a node do. No rate
    where one rank has the whole layer."""
    if found.candidates["tp"][row] == 1:
        return {}
    mesh = found.candidates.where(np.array([row]))
    return {"tp_bandwidth": float(links(found.question.job.cluster, mesh).columns["tp"].all_reduce_Bps[0]) / GB}
