"""Seconds of one collective: a start-up cost and bytes over the bus bandwidth that the slowest tier allows.

The bus bandwidth follows nccl-tests (NVIDIA/nccl-tests: doc/PERFORMANCE.md): an all-gather or reduce-scatter of S bytes
over n ranks moves S (n - 1) / n through every rank, an all-reduce twice that. Where the tiers come from and what share
of their nominal rate collectives reach stands in `facts/tiers.py` and the catalogue's `link_efficiency`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, reduce
from typing import NamedTuple

import numpy as np

from strategist.columns import Column, remembered
from strategist.facts.groups import GroupColumns, group_bandwidth, group_columns, worse
from strategist.facts.hardware import Cluster, PacedCluster
from strategist.facts.model_parts import Moe
from strategist.facts.routing import called_on, copies_for_nodes
from strategist.facts.tier import Tier
from strategist.facts.tiers import tiers, tiers_by_kind
from strategist.records import dataclass
from strategist.space.candidates import Candidates, Mask, Reals
from strategist.space.traffic import Op, Place, every_rank
from strategist.timing.rates import share

FULL_BYTES = 2.0**22
"""Payload from which a collective fills the links. Source: collective_curves: on every NVLink machine what a collective takes
besides start-up and bytes grows from nothing below 1 MiB to a constant that holds from 4 to 256 MiB."""

WALKS: frozenset[Op] = frozenset(("all_gather", "reduce_scatter", "broadcast", "reduce"))
"""Collectives that NCCL only has as rings, however many nodes there are; its all-reduce has trees, too, whose start-up grows with the logarithm
of nodes, and an exchange sends to every rank at once. Source: NVIDIA/nccl: src/graph/tuning.cc, ncclTopoTuneModel."""


@cache
def cluster_tiers(cluster: Cluster) -> tuple[Tier, ...]:
    """The tiers of a cluster, worked out once."""
    return tiers(cluster)


class Costs(NamedTuple):
    """Seconds of a collective: its start-up; to fill the links, which FULL_BYTES pay whole, fewer in proportion, and a send never; of the walk through
    several nodes, which is paid unless another way starts sooner and costs less, so much more per byte: words that each carry a flag, and of an
    all-reduce a tree; and per payload byte."""

    latency: Reals
    fill: Reals
    walk: Reals
    otherwise: Reals
    per_byte: Reals


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """What the ranks of every place get from the network, per mesh (M,): worked out once for all collectives."""

    sizes: Mapping[Place, Reals]
    columns: Mapping[Place, GroupColumns]
    flagged_Bps: float
    tree_share: float

    def seconds(self, op: Op, place: Place) -> Costs:
        """What one collective takes, (M,) each; nothing for a rank alone."""
        n, link = self.sizes[place], self.columns[place]
        latency, per_byte = _op_costs(op, n, link)
        walk = otherwise = np.zeros_like(n)
        fill = walk if op == "send" else link.fill_s
        if op in WALKS:
            walk = link.walk_s
            otherwise = (n - 1.0) / np.maximum(n, 1.0) / np.minimum(link.ring_Bps / 2.0, self.flagged_Bps) - per_byte
        elif op == "all_reduce":
            least = np.minimum(latency, 2.0 * link.tree_s)
            latency, walk, otherwise = least, latency - least, per_byte * (1.0 / self.tree_share - 1.0)
        return Costs(*(np.where(n > 1, cost, 0.0) for cost in (latency, fill, walk, otherwise, per_byte)))

    def leave(self, place: Place) -> Mask:
        """Whether the ranks of a place are on several nodes, (M,)."""
        return self.columns[place].leave


@remembered
def costs(cluster: Cluster, op: Op, place: Place, meshes: Candidates) -> Costs:
    """See `Links.seconds`."""
    return links(cluster, meshes).seconds(op, place)


@remembered
def leaving(cluster: Cluster, place: Place, meshes: Candidates) -> Mask:
    """See `Links.leave`."""
    return links(cluster, meshes).leave(place)


@remembered
def merged_seconds(cluster: Cluster, moe: Moe, meshes: Candidates) -> Reals:
    """Seconds per byte, (M,), of an exchange of tokens with their experts in which copies for one node travel between nodes once, and there on to
    each rank; a byte is one of the copies that ranks get. Both go on at once, so that the longer counts (DeepSeek-AI 2024, arXiv 2412.19437, section
    3.2.2; deepseek-ai/DeepEP: README.md, kernels that forward from one domain to the other)."""
    own = links(cluster, meshes)
    n, link, ranks = own.sizes["ep"], own.columns["ep"], meshes["ep"]
    inside, nodes = link.inside.astype(np.float64), n / link.inside
    within = _columns(cluster, link.inside, np.ones_like(link.inside)).all_to_all_Bps
    forwarded = (inside - 1.0) / inside / within
    copies = copies_for_nodes(moe, ranks, nodes.astype(np.int64)) / called_on(moe, ranks)
    arriving: Reals = copies * (n - 1.0) / n / link.between_Bps
    return np.maximum(forwarded, arriving)


@remembered
def links(cluster: Cluster, meshes: Candidates) -> Links:
    """The links of some meshes, one row each."""
    ranks = every_rank(meshes)
    sizes = np.concatenate([each.size for each in ranks.values()])
    strides = np.concatenate([each.stride for each in ranks.values()])
    every, rows = _columns(cluster, sizes, strides), len(meshes)
    parts = [GroupColumns._make(column[i * rows : (i + 1) * rows] for column in every) for i in range(len(ranks))]
    floats = {place: each.size.astype(np.float64) for place, each in ranks.items()}
    gpu = cluster.slowest.gpu
    return Links(
        floats, dict(zip(ranks, parts, strict=True)), share("ring_flagged_GBps", gpu) * 1e9, share("tree_share", gpu)
    )


def _columns(cluster: Cluster, sizes: Column, strides: Column) -> GroupColumns:
    """What groups get. On nodes of several kinds that is what the worst of them lets it have, but where one kind sets the pace, inside a node
    what that one does."""
    by_kind = {kind: group_columns(own, sizes, strides) for kind, own in tiers_by_kind(cluster).items()}
    every = reduce(worse, by_kind.values())
    if isinstance(cluster, PacedCluster):
        pairs = zip(every, by_kind[cluster.pace], strict=True)
        every = GroupColumns._make(np.where(every.leave, between, inside) for between, inside in pairs)
    return every


def _op_costs(op: Op, n: Reals, link: GroupColumns) -> tuple[Reals, Reals]:
    moved: Reals = (n - 1.0) / np.maximum(n, 1.0)
    if op == "send":
        return link.latency_s / np.maximum(n - 1.0, 1.0), 1.0 / link.send_Bps
    if op == "all_to_all":
        return link.latency_s, moved / link.all_to_all_Bps
    if op == "all_reduce":
        return 2.0 * link.latency_s, 2.0 * moved / link.all_reduce_Bps
    return link.latency_s, moved / link.ring_Bps


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
