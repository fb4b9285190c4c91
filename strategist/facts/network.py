"""The tier between nodes: what one device can send to other nodes."""

from __future__ import annotations

from strategist.errors import ImpossibleError
from strategist.facts.domains import host_rate, leaves_through_host
from strategist.facts.hardware import Cluster, Node
from strategist.facts.link_efficiency import efficiency, fabric_kind
from strategist.facts.tier import Tier


def network_tier(cluster: Cluster) -> Tier:
    """The tier that joins the nodes, at the share of the device whose node gives it least; of equal nodes the one whose fabric reaches
    the least of it, whichever is named first."""
    nodes = [group.node for group in cluster.groups]
    least = min(map(uplink_Bps, nodes))
    slowest = min((node for node in nodes if uplink_Bps(node) == least), key=_reached)
    if not uplink_Bps(slowest):
        raise ImpossibleError(
            "NO_PATH",
            f"Nobody knows how nodes of type {slowest.name} reach each other.",
            flag="--inter-bw",
            hint="Give the rate of one node to the others, for example --inter-bw 400Gb/s.",
        )
    kind = fabric_kind(slowest.fabric)
    known = efficiency(kind, slowest.fabric)
    return Tier(
        name="network",
        kind=kind,
        span=cluster.world,
        device_Bps=uplink_Bps(slowest) / cluster.oversubscription,
        hop_s=known.hop_s,
        base_s=known.base_s,
        tree_s=known.tree_s,
        shares=known.shares,
        port_Bps=port_Bps(slowest),
        basis=slowest.basis,
        source=slowest.source,
    )


def _reached(node: Node) -> tuple[float, float]:
    """What large collectives reach of a node's rate to others, and less the time that a message takes."""
    known = efficiency(fabric_kind(node.fabric), node.fabric)
    return known.shares[-1].ring, -known.base_s


def port_Bps(node: Node) -> float:
    """What one device's message gets of its node's way out: the ports of its own, or the whole of one that it shares, and no more than its
    road to them. A node that nobody counted the ports of has one."""
    port = node.inter_Bps / min(max(1, node.nics), node.gpus)
    road = host_rate(node)
    return min(port, road) if leaves_through_host(node) and road else port


def uplink_Bps(node: Node) -> float:
    """One device's share of its node's way out: an even part of the ports, and no more than its road to them."""
    share = node.inter_Bps / node.gpus
    road = host_rate(node)
    return min(share, road) if leaves_through_host(node) and road else share
