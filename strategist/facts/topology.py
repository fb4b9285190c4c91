"""A cluster as a graph, for machines that no small list of tiers describes, and as an independent check of the tiers.

Vertices carry `kind` (gpu, switch, root, numa, nic, uplink, fabric) and GPUs their `rank`; edges carry `Bps` of one
direction, the `kind` of link and its `level` (facts/tier.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strategist.errors import ImpossibleError, InputError
from strategist.facts.domains import host_rate, leaves_through_host, scale_up_kind
from strategist.facts.hardware import Cluster, Node, NodeGroup
from strategist.facts.link_efficiency import fabric_kind
from strategist.facts.meshes import full_mesh, is_mesh
from strategist.facts.tier import level_of

if TYPE_CHECKING:
    import networkx as nx

    Graph = nx.Graph[str]

DEVICE_LIMIT = 4096
"""The graph is for looking closely; a plan for more devices than this uses the tiers."""

VERTEX_KINDS = ("gpu", "nvswitch", "pcie", "root", "numa", "nic", "uplink", "memory", "node", "switch", "fabric")


def graph(cluster: Cluster) -> Graph:
    """The graph of a cluster. Raises InputError TOO_LARGE beyond 4096 devices, ImpossibleError NO_PATH for islands."""
    import networkx as nx  # 130 ms, needed for irregular machines and drawings of links only

    if cluster.world > DEVICE_LIMIT:
        raise InputError("TOO_LARGE", f"A graph of {cluster.world} devices is too large; the limit is {DEVICE_LIMIT}.", flag="--hardware", hint="Look at fewer nodes.")  # fmt: skip
    built: Graph = nx.Graph()
    for host in hosts(cluster):
        _add_inside(built, host)
    if cluster.nodes > 1:
        _add_network(built, cluster)
    _refuse_islands(built)
    return built


class Host:
    """One node of a cluster: its facts, its number, its name in links, and the first of its ranks."""

    def __init__(self, node: Node, index: int, name: str, first_rank: int, rack: str) -> None:
        self.node, self.index, self.name, self.first_rank, self.rack = node, index, name, first_rank, rack

    def at(self, vertex: str) -> str:
        """The graph's name of a vertex inside this node."""
        return f"node{self.index}/{vertex}"

    @property
    def gpus(self) -> list[str]:
        """The graph's names of the devices, in rank order."""
        return [self.at(f"gpu{i}") for i in range(self.node.gpus)]


def hosts(cluster: Cluster) -> Iterator[Host]:
    """The nodes of a cluster in rank order."""
    index = first_rank = 0
    for number, group in enumerate(cluster.groups):
        for position in range(group.count):
            name = group.name if group.count == 1 else f"{group.name}{position}"
            yield Host(group.node, index, name, first_rank, _rack(group, number, position))
            index, first_rank = index + 1, first_rank + group.node.gpus


def _rack(group: NodeGroup, number: int, position: int) -> str:
    """The name of the fast domain of a node; nodes of one rack share it."""
    per_rack = max(group.node.fast_domain // group.node.gpus, 1)
    return f"group{number}rack{position // per_rack}"


def _add_inside(built: Graph, host: Host) -> None:
    for offset, vertex in enumerate(host.gpus):
        built.add_node(vertex, kind="gpu", rank=host.first_rank + offset, host=host.index)
    if host.node.links:
        for link in host.node.links:
            _join(built, host.at(link.a), host.at(link.b), link.Bps, link.kind)
        if is_mesh(host.node.links):
            _add_root(built, host, host_rate(host.node), "pcie-host")
    elif host.node.gpus > 1 or host.node.fast_domain > 1 or leaves_through_host(host.node):
        _add_regular(built, host)


def _add_regular(built: Graph, host: Host) -> None:
    """The links that a topology word stands for."""
    node, topology = host.node, host.node.topology
    if topology.endswith("-mesh"):
        for (a, b), Bps in full_mesh(node.gpus, node.intra_Bps / (node.gpus - 1)).items():
            _join(built, host.gpus[a], host.gpus[b], Bps, scale_up_kind(node.gpu))
    elif topology == "nvlink-pairs":
        _add_pairs(built, host)
    elif topology == "nvswitch":
        _add_switches(built, host)
    elif topology in ("pcie-switch", "pcie-host"):
        _add_root(built, host, node.intra_Bps, "pcie-p2p" if topology == "pcie-switch" else "pcie-host")
    else:
        _add_star(
            built, host.gpus, host.at("memory"), node.intra_Bps, "torus" if topology == "torus" else "shared-memory"
        )


def _add_pairs(built: Graph, host: Host) -> None:
    if host.node.gpus % 2 == 0:
        for a, b in zip(host.gpus[::2], host.gpus[1::2], strict=True):
            _join(built, a, b, host.node.intra_Bps, scale_up_kind(host.node.gpu))
    _add_root(built, host, host_rate(host.node), "pcie-host")


def _add_switches(built: Graph, host: Host) -> None:
    """One switch per fast domain, whether the domain is a part of the node, the node, or a rack of nodes."""
    node = host.node
    if node.fast_domain >= node.gpus:
        _add_star(built, host.gpus, f"{host.rack}/nvswitch", node.intra_Bps, scale_up_kind(node.gpu))
        return
    for first in range(0, node.gpus, node.fast_domain):
        domain = host.gpus[first : first + node.fast_domain]
        _add_star(built, domain, host.at(f"nvswitch{first}"), node.intra_Bps, scale_up_kind(node.gpu))
    _add_root(built, host, host_rate(node), "pcie-host")


def _add_root(built: Graph, host: Host, Bps: float, kind: str) -> None:
    _add_star(built, host.gpus, host.at("root"), Bps, kind)


def _add_star(built: Graph, devices: list[str], centre: str, Bps: float, kind: str) -> None:
    for device in devices:
        _join(built, device, centre, Bps, kind)


def _join(built: Graph, a: str, b: str, Bps: float, kind: str) -> None:
    """An edge; a second link between the same two adds to the first."""
    for vertex in (a, b):
        if vertex not in built:
            built.add_node(vertex, kind=_vertex_kind(vertex))
    before = built.edges[a, b]["Bps"] if built.has_edge(a, b) else 0.0
    built.add_edge(a, b, Bps=before + Bps, kind=kind, level=level_of(kind))


def _vertex_kind(vertex: str) -> str:
    word = vertex.rsplit("/", 1)[-1].rstrip("0123456789")
    return word if word in VERTEX_KINDS else "switch"


def _add_network(built: Graph, cluster: Cluster) -> None:
    """Every node's way out: to one fabric, or to the switches and nodes that the cluster's links name."""
    ways_out = {host.name: _add_uplink(built, host) for host in hosts(cluster)}
    for link in cluster.links:
        a, b = (ways_out.get(end, f"switch/{end}") for end in (link.a, link.b))
        _join(built, a, b, link.Bps, link.kind)
    if not cluster.links:
        for host in hosts(cluster):
            Bps = host.node.inter_Bps / cluster.oversubscription
            _join(built, host.at("uplink"), "fabric", Bps, fabric_kind(host.node.fabric))


def _add_uplink(built: Graph, host: Host) -> str:
    """Devices reach the node's ports through the host where PCIe is their only road, else each on its own."""
    node, kind, uplink = host.node, fabric_kind(host.node.fabric), host.at("uplink")
    nics = sorted({end for link in node.links for end in (link.a, link.b) if end.startswith("nic")})
    Bps = node.inter_Bps or float("inf")
    if nics:
        _add_star(built, [host.at(nic) for nic in nics], uplink, Bps / len(nics), kind)
    elif leaves_through_host(node) and not node.links:
        _join(built, host.at("root"), uplink, Bps, kind)
    else:
        _add_star(built, host.gpus, uplink, Bps, kind)
    return uplink


def _refuse_islands(built: Graph) -> None:
    """Raise NO_PATH when some devices cannot reach others, naming one device of two islands."""
    import networkx as nx

    islands = [sorted(v for v in part if built.nodes[v]["kind"] == "gpu") for part in nx.connected_components(built)]
    devices = sorted((part for part in islands if part), key=lambda part: (-len(part), part))
    if len(devices) > 1:
        raise no_path(devices[0], devices[1])


def no_path(one: list[str], other: list[str]) -> ImpossibleError:
    """The error for two islands of a graph."""
    return ImpossibleError(
        "NO_PATH",
        f"Nothing connects {_listed(one)} with {_listed(other)}.",
        flag="--hardware",
        hint="Add the missing link, or leave one of the islands out.",
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
