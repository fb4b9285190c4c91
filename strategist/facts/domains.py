"""The tiers inside one group of equal nodes: which of its devices share which links, and at what rate."""

from __future__ import annotations

from collections.abc import Callable

from strategist.errors import ImpossibleError, InputError
from strategist.facts.hardware import Gpu, Node, NodeGroup
from strategist.facts.link_efficiency import efficiency
from strategist.facts.meshes import Rates, full_mesh, is_mesh, layouts, rates_of, worst_group
from strategist.facts.tier import Cut, Kind, Tier


def inner_tiers(group: NodeGroup) -> tuple[Tier, ...]:
    """The tiers below the network, innermost first. Nodes with links beyond a mesh belong to facts/graph_tiers.py."""
    node = group.node
    if is_mesh(node.links):
        return (_mesh(node, "nvlink", rates_of(node.links)),)
    return _BY_TOPOLOGY[node.topology](node, group.count) if node.gpus > 1 or node.fast_domain > 1 else ()


def host_rate(node: Node) -> float:
    """What one device moves through the host: its own rate on a PCIe board, else its host link; 0 when unknown."""
    return node.intra_Bps if node.topology in ("pcie-switch", "pcie-host") else node.gpu.host_Bps or 0.0


def leaves_through_host(node: Node) -> bool:
    """True where a device has no road to the network but the PCIe link that also carries its traffic in the node."""
    return node.topology in ("pcie-switch", "pcie-host", "nvlink-pairs")


def scale_up_kind(gpu: Gpu) -> Kind:
    """The kind of the links between cards of this kind on one board."""
    if gpu.vendor == "AMD":
        return "xgmi"
    return "roce-mesh" if gpu.vendor == "Intel" else "nvlink"


def _switch(node: Node, count: int) -> tuple[Tier, ...]:
    whole = max(node.fast_domain // node.gpus, 1) * node.gpus
    span = min(whole, node.gpus * count) if node.fast_domain >= node.gpus else node.fast_domain
    inner = _star(node, scale_up_kind(node.gpu), span, node.intra_Bps)
    return (inner,) if span >= node.gpus else (inner, _star(node, "pcie-host", node.gpus, host_rate(node)))


def _pairs(node: Node, count: int) -> tuple[Tier, ...]:
    """Bridged pairs; the pairs meet over the host, since bridges go with boards that promise nothing better."""
    bridge = (_star(node, scale_up_kind(node.gpu), 2, node.intra_Bps),) if node.gpus % 2 == 0 else ()
    host = (_star(node, "pcie-host", node.gpus, host_rate(node)),) if node.gpus > 2 else ()
    return bridge + host


def _full_mesh(node: Node, count: int) -> tuple[Tier, ...]:
    """Every pair has its own link: the rate of a device, spread evenly over its peers."""
    return (_mesh(node, scale_up_kind(node.gpu), full_mesh(node.gpus, node.intra_Bps / (node.gpus - 1))),)


def _whole_node(kind: Kind) -> Callable[[Node, int], tuple[Tier, ...]]:
    return lambda node, count: (_star(node, kind, node.gpus, node.intra_Bps),)


def _unlinked(node: Node, count: int) -> tuple[Tier, ...]:
    raise InputError(
        "TOPOLOGY",
        f"Node {node.name} has {node.gpus} GPUs and topology none: nothing joins them.",
        flag="--hardware",
        value=node.topology,
        hint="Give the topology, for example pcie-host, or the links.",
    )


def _star(node: Node, kind: Kind, span: int, device_Bps: float) -> Tier:
    known = efficiency(kind, node.gpu.arch)
    return Tier(
        name=kind,
        kind=kind,
        span=span,
        device_Bps=device_Bps,
        hop_s=known.hop_s,
        base_s=known.base_s,
        shares=known.shares,
        basis=node.basis,
        source=node.source,
    )


def _mesh(node: Node, kind: Kind, rates: Rates) -> Tier:
    cuts = tuple(_cut(node, kind, rates, members, stride) for members, stride in layouts(node.gpus))
    known = efficiency(kind, node.gpu.arch, in_switch=False)
    return Tier(
        name=kind,
        kind=kind,
        span=node.gpus,
        device_Bps=node.intra_Bps,
        hop_s=known.hop_s,
        base_s=known.base_s,
        shares=known.shares,
        cuts=cuts,
        port_Bps=min(rate for rate in rates.values() if rate),
        basis=node.basis,
        source=node.source,
    )


def _cut(node: Node, kind: Kind, rates: Rates, members: int, stride: int) -> Cut:
    Bps, over_host = worst_group(rates, node.gpus, members, stride, host_rate(node))
    if not Bps:
        raise ImpossibleError(
            "NO_PATH",
            f"Some GPUs of node {node.name} share no link, and the host link of {node.gpu.name} is not known.",
            flag="--hardware",
            hint="Add links between the islands.",
        )
    limiting: Kind = "pcie-host" if over_host else kind
    return Cut(members, stride, Bps, limiting, efficiency(limiting, node.gpu.arch, in_switch=False).share(members))


_BY_TOPOLOGY: dict[str, Callable[[Node, int], tuple[Tier, ...]]] = {
    "nvswitch": _switch,
    "nvlink-mesh": _full_mesh,
    "xgmi-mesh": _full_mesh,
    "roce-mesh": _full_mesh,
    "nvlink-pairs": _pairs,
    "pcie-switch": _whole_node("pcie-p2p"),
    "pcie-host": _whole_node("pcie-host"),
    "torus": _whole_node("torus"),
    "memory": _whole_node("shared-memory"),
    "none": _unlinked,
}
