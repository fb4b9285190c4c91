"""A topology matrix and the kind of its GPUs -> a Node: a regular picture where there is one, else links.

Rates come from the card: NVn is n of its links, PCIe its host link. What joins two sockets no matrix tells; that rate is
a default row's part of the card's host link and listed as an assumption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

from strategist.catalog import rows
from strategist.errors import InputError
from strategist.facts.gpus import pair_Bps
from strategist.facts.hardware import Gpu, Link, Node, Topology
from strategist.facts.machines import default_row
from strategist.facts.resolved import Assumption
from strategist.facts.topo_matrix import Matrix
from strategist.records import dataclass
from strategist.units import format_rate

SWITCHED = ("PIX", "PXB")
SAME_SOCKET = (*SWITCHED, "PHB", "NODE")
PARTLY = 1.01
"""Links may add up to this much more than the card's total before a mesh cannot be one."""


@dataclass(frozen=True, slots=True)
class _Picture:
    """The topology of a node, or its links."""

    topology: Topology
    intra_Bps: float
    pair_Bps: float
    links: tuple[Link, ...] = ()


def node_from_matrix(matrix: Matrix, gpu: Gpu, name: str = "probed") -> tuple[Node, tuple[Assumption, ...]]:
    """The node that a matrix shows, with no known way out (`inter_Bps` 0), and what had to be assumed.

    Raises InputError HARDWARE_FEATURE when the matrix shows NVLink and the rate of the card's links is not known.
    """
    seen = _Seen(matrix)
    picture = _picture(seen, gpu)
    node = Node(
        name=name,
        gpu=gpu,
        gpus=seen.count,
        fast_domain=seen.count,
        topology=picture.topology,
        intra_Bps=picture.intra_Bps,
        pair_Bps=picture.pair_Bps,
        inter_Bps=0.0,
        nics=len(matrix.nics),
        links=picture.links,
        basis="derived",
        source="topology matrix of the machine, with the link rates of the card",
    )
    return node, tuple(_assumptions(seen, picture))


def _assumptions(seen: _Seen, picture: _Picture) -> Iterator[Assumption]:
    if seen.filled:
        yield Assumption(what="unseen cells of the topology matrix", value=f"{seen.filled} taken as {seen.filling}", flag="--hardware")  # fmt: skip
    between = next((link for link in picture.links if link.a.startswith("numa") and link.b.startswith("numa")), None)
    if between:
        source = default_row("socket-link")["source"]
        yield Assumption(what="link between sockets", value=format_rate(between.Bps), flag="--hardware", source=source)


class _Seen:
    """The words between GPUs; unseen cells are filled with what all seen ones agree on, else with the slowest word."""

    def __init__(self, matrix: Matrix) -> None:
        gpus = matrix.gpus
        self.count = len(gpus)
        cells = {(i, j): matrix.link(gpus[i], gpus[j]) for i, j in combinations(range(self.count), 2)}
        known = {word for word in cells.values() if word is not None}
        self.filling = next(iter(known)) if len(known) == 1 else "SYS"
        self.filled = sum(word is None for word in cells.values())
        self.words = {pair: word or self.filling for pair, word in cells.items()}
        self.cpus = [matrix.affinity.get(gpu, {}).get("CPU Affinity", "") for gpu in gpus]

    @property
    def kinds(self) -> set[str]:
        """The different words between GPUs."""
        return set(self.words.values())

    @property
    def bonds(self) -> dict[tuple[int, int], int]:
        """The pairs joined by NVLink, and by how many links."""
        return {pair: int(word[2:]) for pair, word in self.words.items() if word.startswith("NV")}

    def joined(self, together: Callable[[int, int], bool]) -> list[list[int]]:
        """The GPUs in parts, such that pairs that belong together are in one part."""
        part = list(range(self.count))
        for a, b in self.words:
            if together(a, b):
                part = [part[a] if p == part[b] else p for p in part]
        return [[i for i in range(self.count) if part[i] == p] for p in dict.fromkeys(part)]

    def on_one_socket(self, a: int, b: int) -> bool:
        """True when the PCIe path crosses no socket; behind NVLink the path is hidden and the CPUs decide."""
        word = self.words[a, b]
        return word in SAME_SOCKET or (word.startswith("NV") and self.cpus[a] == self.cpus[b])


def _picture(seen: _Seen, gpu: Gpu) -> _Picture:
    if seen.count == 1:
        return _Picture("none", 0.0, 0.0)
    if seen.kinds == {"XGMI"}:
        return _infinity_mesh(gpu, seen.count - 1)
    if seen.bonds:
        return _bonded(seen, gpu)
    host_Bps = gpu.host_Bps or 0.0
    if len(seen.kinds) == 1:
        return _Picture("pcie-switch" if seen.kinds <= set(SWITCHED) else "pcie-host", host_Bps, host_Bps)
    return _linked(seen, tuple(_host_links(seen, host_Bps)))


def _infinity_mesh(gpu: Gpu, peers: int) -> _Picture:
    """Links that each join two cards: those to cards that are not there, or that others use, are of no use to the rest."""
    whole = gpu.scale_up_Bps or 0.0
    each = min(pair_Bps(gpu) or whole, whole / peers)
    return _Picture("xgmi-mesh", each * peers, each)


def _bonded(seen: _Seen, gpu: Gpu) -> _Picture:
    """Cards with NVLink: a switch, a full mesh, bridged pairs, or unequal bonds."""
    link_Bps, links = nvlink(gpu)
    bonds, pairs = seen.bonds, seen.count * (seen.count - 1) // 2
    each = max(bonds.values())
    if len(bonds) == pairs and len(set(bonds.values())) == 1:
        if each * (seen.count - 1) <= links * PARTLY and seen.count > 2:
            return _Picture("nvlink-mesh", each * (seen.count - 1) * link_Bps, each * link_Bps)
        bridged = seen.count == 2 and gpu.scale_up.startswith("pcie")
        return _Picture("nvlink-pairs" if bridged else "nvswitch", each * link_Bps, each * link_Bps)
    if set(bonds) == {(i, i + 1) for i in range(0, seen.count, 2)} and len(set(bonds.values())) == 1:
        return _Picture("nvlink-pairs", each * link_Bps, each * link_Bps)
    mesh = tuple(Link(a=f"gpu{a}", b=f"gpu{b}", kind="nvlink", Bps=n * link_Bps) for (a, b), n in bonds.items())
    if len(seen.joined(lambda a, b: (a, b) in bonds)) == 1:
        return _linked(seen, mesh)
    return _linked(seen, (*mesh, *_host_links(seen, gpu.host_Bps or 0.0)))


def nvlink(gpu: Gpu) -> tuple[float, int]:
    """The rate of one NVLink of a card and how many it has. Raises InputError HARDWARE_FEATURE when nobody knows."""
    for row in rows("nvlinks"):
        if (
            row["scaleup"] == gpu.scale_up
            and row.get("compute_capability", gpu.compute_capability) == gpu.compute_capability
        ):
            Bps = row["link_GBps"] * 1e9
            return Bps, row.get("links") or round((gpu.scale_up_Bps or Bps) / Bps)
    raise InputError("HARDWARE_FEATURE", f"The matrix shows NVLink, and the rate of a link of {gpu.title} is not known.", flag="--hardware", value=gpu.name, hint="Describe the node in a hardware file.")  # fmt: skip


def _linked(seen: _Seen, links: tuple[Link, ...]) -> _Picture:
    busiest = max(sum(link.Bps for link in links if f"gpu{i}" in (link.a, link.b)) for i in range(seen.count))
    return _Picture("none", busiest, max(link.Bps for link in links), links)


def _host_links(seen: _Seen, host_Bps: float) -> Iterator[Link]:
    """The PCIe tree: GPUs under switches where several share one, switches and GPUs under sockets, sockets in a row."""
    switches = [part for part in seen.joined(lambda a, b: seen.words[a, b] in SWITCHED) if len(part) > 1]
    sockets = seen.joined(seen.on_one_socket)
    socket_of = {i: number for number, part in enumerate(sockets) for i in part}
    under_switch = {i for part in switches for i in part}
    for number, part in enumerate(switches):
        yield from (Link(a=f"gpu{i}", b=f"pcie{number}", kind="pcie-p2p", Bps=host_Bps) for i in part)
        yield Link(a=f"pcie{number}", b=f"numa{socket_of[part[0]]}", kind="pcie-host", Bps=host_Bps)
    alone = (i for i in range(seen.count) if i not in under_switch)
    yield from (Link(a=f"gpu{i}", b=f"numa{socket_of[i]}", kind="pcie-host", Bps=host_Bps) for i in alone)
    crossing_Bps = default_row("socket-link")["share_of_card_link"] * host_Bps
    yield from (Link(a=f"numa{a}", b=f"numa{b}", kind="pcie-host", Bps=crossing_Bps) for a, b in combinations(range(len(sockets)), 2))  # fmt: skip
