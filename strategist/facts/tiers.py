"""The network of a cluster in closed form: a few tiers, and what a group of ranks gets out of them.

Rank r is device r % gpus of node r // gpus. All groups of one mesh axis talk at the same time and share the uplinks
evenly, so a group that has m members inside a domain may use m devices' shares of that domain's uplink. A ring
crosses every tier between its members, hence the slowest of them decides (facts/groups.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from strategist.facts.blocks import block_tiers, joined, mixed_tiers
from strategist.facts.domains import inner_tiers
from strategist.facts.groups import GroupColumns, GroupLink, group_bandwidth, group_columns, members_within
from strategist.facts.hardware import Cluster, Node
from strategist.facts.meshes import is_mesh
from strategist.facts.network import network_tier
from strategist.facts.tier import Cut, Kind, Tier

__all__ = [
    "Cut",
    "GroupColumns",
    "GroupLink",
    "Kind",
    "Tier",
    "group_bandwidth",
    "group_columns",
    "members_within",
    "tiers",
    "tiers_by_kind",
]


def tiers(cluster: Cluster) -> tuple[Tier, ...]:
    """The tiers of a cluster, innermost first; the last one spans the world, and one device alone has none.

    Mixed nodes count as their weakest: a domain is the largest block that fits every node, at the lowest rate. Nodes
    or networks described link by link go through the graph. Raises ImpossibleError NO_PATH when several nodes have no
    known network.
    """
    if needs_graph(cluster):
        from strategist.facts.graph_tiers import graph_tiers  # networkx, needed for irregular machines only

        return graph_tiers(cluster)
    groups = joined(cluster.groups)
    inner = inner_tiers(groups[0]) if len(groups) == 1 else mixed_tiers(groups)
    reached = inner[-1].span if inner else 1
    return inner if reached == cluster.world else (*inner, network_tier(cluster))


@cache
def tiers_by_kind(cluster: Cluster) -> Mapping[Node, tuple[Tier, ...]]:
    """The tiers by kind of node, as if all had the links of that kind inside, in the blocks that fit every node; of machines that go through
    the graph those that there are, under the slowest node."""
    groups = joined(cluster.groups)
    if len(groups) == 1 or needs_graph(cluster):
        return {cluster.slowest: tiers(cluster)}
    network = network_tier(cluster)
    return {group.node: (*block_tiers(groups, [inner_tiers(group)]), network) for group in groups}


def needs_graph(cluster: Cluster) -> bool:
    """True for machines whose picture is a list of links that is more than a mesh of GPUs."""
    return bool(cluster.links) or any(g.node.links and not is_mesh(g.node.links) for g in cluster.groups)
