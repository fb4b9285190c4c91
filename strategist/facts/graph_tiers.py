"""Tiers of machines that are described link by link: measured on their graph, layout by layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strategist.facts.blocks import block_tiers, joined, tilings
from strategist.facts.domains import inner_tiers
from strategist.facts.graph_groups import Crossing, axis_groups, crossings_on_graph
from strategist.facts.hardware import Cluster, NodeGroup
from strategist.facts.link_efficiency import efficiency
from strategist.facts.meshes import is_mesh
from strategist.facts.network import network_tier
from strategist.facts.tier import HOST, SHARED_MEDIA, Cut, Share, Tier
from strategist.facts.topology import graph
from strategist.facts.wiring import has_equal_counts, refuse_large
from strategist.records import replace


def graph_tiers(cluster: Cluster) -> tuple[Tier, ...]:
    """The tiers of an irregular cluster: blocks that fit every node, then the network.

    Each layout (members, stride) that tiles a block has its own rate, the worst over the nodes; other layouts get the
    worst of all. Raises InputError TOO_LARGE for more links than can be walked.
    """
    refuse_large(cluster)
    groups = joined(cluster.groups)
    inner = block_tiers(groups, [_node_tiers(group) for group in groups])
    if cluster.nodes == 1:
        return inner
    return (*inner, _linked_network(cluster) if cluster.links else network_tier(cluster))


def _node_tiers(group: NodeGroup) -> tuple[Tier, ...]:
    """The tiers of one node alone."""
    node = group.node
    if not node.links or is_mesh(node.links):
        return inner_tiers(group)
    alone = Cluster(groups=(replace(group, count=1),), origin="file")
    cuts = _cuts(alone)
    best = max(cuts, key=lambda cut: cut.Bps)
    known = efficiency(best.kind, node.gpu.arch)
    return (
        Tier(
            name="node",
            kind=best.kind,
            span=node.gpus,
            device_Bps=best.Bps,
            hop_s=known.hop_s,
            base_s=known.base_s,
            cuts=cuts,
            basis=node.basis,
            source=node.source,
        ),
    )


def _linked_network(cluster: Cluster) -> Tier:
    """The tier of a network whose links are given: every layout of the world has its own rate."""
    cuts = tuple(_network_cuts(cluster)) if has_equal_counts(cluster) else _cuts(cluster)
    slowest = min(cuts, key=lambda cut: cut.Bps)
    known = efficiency(slowest.kind)
    return Tier(
        name="network",
        kind=slowest.kind,
        span=cluster.world,
        device_Bps=slowest.Bps,
        hop_s=known.hop_s,
        base_s=known.base_s,
        tree_s=known.tree_s,
        cuts=cuts,
        basis=cluster.groups[0].node.basis,
        source=cluster.groups[0].node.source,
    )


def _network_cuts(cluster: Cluster) -> Iterator[Cut]:
    """The cuts of equal-sized nodes, worked out with one device per node.

    A group that has m of a node's devices shares everything outside the node evenly with the groups of the others, so
    it gets m parts of what the whole nodes would get. Layouts that do not follow the nodes are left out.
    """
    gpus = cluster.groups[0].node.gpus
    parts = [m for m in range(1, gpus + 1) if gpus % m == 0]
    for cut in _cuts(_of_whole_nodes(cluster)):
        for part in parts if cut.stride == 1 else (1,):
            stride = cut.stride * gpus // part
            yield replace(cut, members=cut.members * part, stride=stride, Bps=cut.Bps * part / gpus)


def _of_whole_nodes(cluster: Cluster) -> Cluster:
    """The cluster with one device for each node, which keeps the node's way out."""
    groups = tuple(
        replace(g, node=replace(g.node, gpus=1, fast_domain=1, topology="none", links=())) for g in cluster.groups
    )
    return replace(cluster, groups=groups)


def _cuts(cluster: Cluster) -> tuple[Cut, ...]:
    built, arch = graph(cluster), cluster.groups[0].node.gpu.arch
    return tuple(
        _cut(crossings_on_graph(built, list(axis_groups(cluster.world, members, stride))), members, stride, arch)
        for members, stride in tilings(cluster.world)
    )


def _cut(groups: Sequence[tuple[Crossing, ...] | None], members: int, stride: int, arch: str) -> Cut:
    """The worst that groups of one layout get: the narrowest cut, and what collectives reach over the slowest links, which may be others."""
    if any(group is None for group in groups):
        return Cut(members, stride, 0.0, "tcp", efficiency("tcp").share(members))
    crossings = [crossing for group in groups for crossing in group or ()]
    Bps = min(crossing.Bps for crossing in crossings)
    reached = [(crossing, _reached(crossing, arch)) for crossing in crossings]
    slowest, share = min(reached, key=lambda pair: pair[1].ring)
    worst = Share(
        gpus=members,
        ring=share.ring / Bps,
        all_reduce=min(found.all_reduce for _, found in reached) / Bps,
        all_to_all=min(found.all_to_all for _, found in reached) / Bps,
        fill_s=max(found.fill_s for _, found in reached),
    )
    return Cut(members, stride, Bps, slowest.kind, worst)


def _reached(crossing: Crossing, arch: str) -> Share:
    """What collectives reach of a crossing, in bytes per second.

    Shares of links through the host are measured over a card's own link, on whole machines: where all devices share the host's memory they
    hold for all that talk, and a link inside the host that is narrower than a card's counts once, as between two devices.
    """
    known = efficiency(crossing.kind, arch, in_switch=False)
    share = known.share(crossing.sharing if crossing.kind in SHARED_MEDIA else crossing.devices)
    pair = known.share(2) if crossing.kind in HOST else share
    widest = max(crossing.Bps, crossing.card_Bps) if crossing.kind in HOST else crossing.Bps
    return Share(
        gpus=crossing.devices,
        ring=min(crossing.Bps * pair.ring, widest * share.ring),
        all_reduce=min(crossing.Bps * pair.all_reduce, widest * share.all_reduce),
        all_to_all=min(crossing.Bps * pair.all_to_all, widest * share.all_to_all),
        fill_s=share.fill_s,
    )
