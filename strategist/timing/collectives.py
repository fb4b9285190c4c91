"""Seconds of one collective: a start-up cost and bytes over the bus bandwidth that the slowest tier allows.

The bus bandwidth follows nccl-tests (NVIDIA/nccl-tests: doc/PERFORMANCE.md): an all-gather or reduce-scatter of S bytes
over n ranks moves S (n - 1) / n through every rank, an all-reduce twice that. Where the tiers come from and what share
of their nominal rate collectives reach stands in `facts/tiers.py` and the catalogue's `link_efficiency`.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from strategist.facts.groups import GroupColumns, group_bandwidth, group_columns
from strategist.facts.hardware import Cluster
from strategist.facts.tier import Tier
from strategist.facts.tiers import tiers
from strategist.space.candidates import Column, Reals
from strategist.space.traffic import Op


@cache
def cluster_tiers(cluster: Cluster) -> tuple[Tier, ...]:
    """The tiers of a cluster, worked out once."""
    return tiers(cluster)


def collective_seconds(cluster: Cluster, op: Op, payload: Reals, size: Column, stride: Column) -> Reals:
    """Seconds of one collective of `payload` bytes (C, S) among `size` ranks `stride` apart, (C,) each; 0 for one rank."""
    latency, per_byte = _costs(cluster, op, size, stride)
    alone = (size <= 1)[:, None]
    return np.where(alone, 0.0, latency[:, None] + payload * per_byte[:, None])


def _costs(cluster: Cluster, op: Op, size: Column, stride: Column) -> tuple[Reals, Reals]:
    """(start-up seconds, seconds per payload byte), (C,) each; worked out once per distinct pair of size and stride."""
    key = size * (int(stride.max(initial=1)) + 1) + stride
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    links = group_columns(cluster_tiers(cluster), size[first], stride[first])
    latency, per_byte = _op_costs(op, size[first].astype(np.float64), links)
    return latency[inverse], per_byte[inverse]


def _op_costs(op: Op, n: Reals, links: GroupColumns) -> tuple[Reals, Reals]:
    share: Reals = (n - 1.0) / np.maximum(n, 1.0)
    if op == "send":
        return links.latency_s / np.maximum(n - 1.0, 1.0), 1.0 / links.ring_Bps
    if op == "all_to_all":
        return links.latency_s, share / links.all_to_all_Bps
    if op == "all_reduce":
        return 2.0 * links.latency_s, 2.0 * share / links.all_reduce_Bps
    return links.latency_s, share / links.ring_Bps


def bus_bandwidth(cluster: Cluster) -> float:
    """Bus bandwidth that a large all-reduce over one node's devices reaches, bytes per second; 0 for a lone device."""
    gpus = min(group.node.gpus for group in cluster.groups)
    return group_bandwidth(cluster_tiers(cluster), gpus, 1).all_reduce_Bps if gpus > 1 else 0.0


def device_bandwidth_between_nodes(cluster: Cluster) -> float:
    """What each device can send to other nodes when all send at once, one direction, as achieved; 0 for one node."""
    if cluster.nodes == 1:
        return 0.0
    network = cluster_tiers(cluster)[-1]
    return network.device_Bps * network.shares[0].ring
