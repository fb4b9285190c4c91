"""A node for a GPU and a count when nobody says which machine it is: the catalogue's reference node, or a generic one."""

from __future__ import annotations

from math import gcd

from strategist.catalog import Row, rows
from strategist.facts.hardware import Gpu, Node, Topology, with_gpus
from strategist.facts.nodes import reference_counts, reference_node
from strategist.facts.resolved import Assumption
from strategist.records import dataclass, replace
from strategist.units import format_gib, format_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What somebody stated instead of the catalogue, with the flags or keys that said it.

    `intra_Bps` is one device's rate inside the node, `inter_Bps` the whole node's rate to other nodes.
    """

    memory_bytes: int | None = None
    intra_Bps: float | None = None
    inter_Bps: float | None = None
    memory_flag: str = "--gpu-memory"
    intra_flag: str = "--intra-bw"
    inter_flag: str = "--inter-bw"


def machine(gpu: Gpu, gpus: int, stated: Overrides, nodes: int) -> tuple[Node, tuple[Assumption, ...]]:
    """A node with `gpus` cards, overridden by what was stated, and the assumptions left in it.

    A price is never assumed: reference nodes lose theirs.
    """
    node = replace(likely_node(gpu, gpus), price_per_hour=None, price_note="")
    return overridden(node, stated), _left_open(node, stated, nodes)


def likely_node(gpu: Gpu, gpus: int) -> Node:
    """The reference node of this GPU and count, else a part of the node that such cards usually are in, or of the next larger
    one where that has fewer, else one built from the GPU."""
    usual = reference_node(gpu.name)
    larger = next((count for count in reference_counts(gpu.name) if count > gpus), None)
    enough = usual if usual and usual.gpus > gpus else reference_node(gpu.name, larger) if larger else None
    whole = reference_node(gpu.name, gpus) or enough
    if whole is None:
        return _generic_node(gpu, gpus)
    return whole if whole.gpus == gpus else part_of(whole, gpus)


def part_of(whole: Node, gpus: int) -> Node:
    """The first `gpus` devices of a node, with an even part of its host; ports are shared out where each GPU has one."""
    part = gpus / whole.gpus
    own_port = whole.nics >= whole.gpus
    domain = max(int(whole.fast_domain * part) // gpus, 1) * gpus
    return replace(
        with_gpus(whole, gpus),
        name=f"{gpus}-of-{whole.name}",
        fast_domain=domain,
        topology=whole.topology if domain > 1 else "none",
        inter_Bps=whole.inter_Bps * part if own_port else whole.inter_Bps,
        nics=round(whole.nics * part) if own_port else whole.nics,
        vcpus=None if whole.vcpus is None else max(1, int(whole.vcpus * part)),
        ram_bytes=None if whole.ram_bytes is None else int(whole.ram_bytes * part),
        nvme_read_Bps=None if whole.nvme_read_Bps is None else whole.nvme_read_Bps * part,
        basis="assumed",
        source=f"{gpus} of the {whole.gpus} GPUs of {whole.name}: {whole.source}",
    )


def _generic_node(gpu: Gpu, gpus: int) -> Node:
    """A machine that is in no table: what the card itself says, and a network taken from the default rows."""
    topology, domain = _generic_topology(gpu, gpus)
    network = default_row("network-pcie" if natural_topology(gpu) == "pcie-host" else "network-scale-up")
    Gbps = network.get("inter_node_Gbps") or network["inter_node_Gbps_per_gpu"] * gpus
    intra_Bps = device_rate(gpu, topology)
    return Node(
        name=f"generic-{gpus}x-{gpu.name}",
        gpu=gpu,
        gpus=gpus,
        fast_domain=domain,
        topology=topology,
        intra_Bps=intra_Bps,
        pair_Bps=intra_Bps / (gpus - 1) if topology.endswith("-mesh") else intra_Bps,
        inter_Bps=Gbps * 1e9 / 8,
        nics=1,
        fabric=network["fabric"],
        rdma=network["fabric"] != "ethernet",
        basis="assumed",
        source=f"{gpu.name}: {gpu.source}; network: {network['source']}",
    )


def _generic_topology(gpu: Gpu, gpus: int) -> tuple[Topology, int]:
    """The topology of a node that is in no table, and how many of its GPUs share the fast links: those of one board."""
    topology, board = natural_topology(gpu), _board(gpu)
    if gpus == 1:
        return "none", 1
    if gpus <= board or topology in ("pcie-host", "torus"):
        return topology, gpus
    domain = gcd(gpus, board) if topology == "nvswitch" else 1
    return (topology, domain) if domain > 1 else ("pcie-host", gpus)


def _board(gpu: Gpu) -> int:
    """How many cards of this kind share fast links at most: those of a rack where the catalogue has it in racks, else of a board."""
    usual = reference_node(gpu.name)
    board: int = default_row("board")["gpus"]
    return max(board, usual.fast_domain) if usual else board


def natural_topology(gpu: Gpu) -> Topology:
    """How several cards of this kind are usually joined on one board."""
    if not gpu.scale_up_Bps or gpu.scale_up.startswith(("pcie", "connectx")):
        return "pcie-host"
    if gpu.scale_up.startswith("nvlink"):
        return "nvswitch"
    return "roce-mesh" if gpu.scale_up.startswith("roce") else "xgmi-mesh" if gpu.vendor == "AMD" else "torus"


def device_rate(gpu: Gpu, topology: Topology) -> float:
    """What one card moves to its neighbours under a topology, from the card's own facts; 0 when they are silent."""
    if topology == "none":
        return 0.0
    return (gpu.host_Bps if topology.startswith("pcie") else gpu.scale_up_Bps) or 0.0


def default_row(name: str) -> Row:
    """One row of the defaults for hardware that nobody described."""
    return next(row for row in rows("hardware_defaults") if row["name"] == name)


def spread_over_racks(node: Node, nodes: int) -> Node:
    """The node as a job of `nodes` of them meets it where a rack is one fast domain: schedulers take equal parts of
    racks (16 of 18 trays for 64), so that groups of ranks tile them. Without such a part racks stay whole."""
    per_rack = node.fast_domain // node.gpus
    if per_rack <= 1 or nodes <= per_rack or nodes % per_rack == 0:
        return node
    part = max(size for size in range(1, per_rack + 1) if nodes % size == 0)
    return replace(node, fast_domain=part * node.gpus) if 2 * part > per_rack else node


def overridden(node: Node, stated: Overrides) -> Node:
    """The node with stated figures in place of the catalogue's; its source and basis say so."""
    said = [
        flag
        for flag, value in ((stated.intra_flag, stated.intra_Bps), (stated.inter_flag, stated.inter_Bps))
        if value is not None
    ]
    factor = stated.intra_Bps / node.intra_Bps if stated.intra_Bps and node.intra_Bps else 1.0
    return replace(
        node,
        gpu=_with_memory(node.gpu, stated),
        intra_Bps=node.intra_Bps if stated.intra_Bps is None else stated.intra_Bps,
        pair_Bps=node.pair_Bps * factor,
        links=tuple(replace(link, Bps=link.Bps * factor) for link in node.links),
        inter_Bps=node.inter_Bps if stated.inter_Bps is None else stated.inter_Bps,
        basis="assumed" if said else node.basis,
        source=f"stated by {' and '.join(said)}; the rest: {node.source}" if said else node.source,
    )


def _with_memory(gpu: Gpu, stated: Overrides) -> Gpu:
    if stated.memory_bytes is None:
        return gpu
    source = f"memory stated by {stated.memory_flag}; the rest: {gpu.source}"
    return replace(gpu, memory_bytes=stated.memory_bytes, basis="assumed", source=source)


def _left_open(node: Node, stated: Overrides, nodes: int) -> tuple[Assumption, ...]:
    """What remains assumed about a node that nobody named."""
    open_: list[Assumption] = []
    if node.gpus > 1 and stated.intra_Bps is None:
        links = f"{node.topology}, {format_rate(node.intra_Bps)} per GPU, as in {node.name}"
        open_.append(Assumption(what="links inside a node", value=links, flag=stated.intra_flag, source=node.source))
    if nodes > 1 and stated.inter_Bps is None:
        network = f"{format_rate(node.inter_Bps)} per node over {node.fabric}, as in {node.name}"
        open_.append(
            Assumption(what="network between nodes", value=network, flag=stated.inter_flag, source=node.source)
        )
    if node.ram_bytes is not None:
        memory = f"{format_gib(node.ram_bytes)}, as in {node.name}"
        open_.append(Assumption(what="host memory of a node", value=memory, flag="--hardware", source=node.source))
    return tuple(open_)
