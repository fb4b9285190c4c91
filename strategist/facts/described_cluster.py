"""Described nodes and links -> a Cluster. What a document leaves out comes from the catalogue and is listed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from strategist.errors import InputError
from strategist.facts.described import DescribedGpu, DescribedLink, DescribedNode, Paths, checked_name, gpu_from
from strategist.facts.flags import MAX_GPUS_PER_NODE, MAX_MEMORY_BYTES, MAX_NODES, bounded_count, checked_network
from strategist.facts.gpus import find_gpu
from strategist.facts.gpus import gpus as catalogued
from strategist.facts.hardware import Cluster, Gpu, Link, Node, NodeGroup, Topology
from strategist.facts.lookup import fold
from strategist.facts.machines import Overrides, device_rate, machine
from strategist.facts.matrix_node import node_from_matrix
from strategist.facts.nodes import reference_node
from strategist.facts.resolved import Assumption, Resolved
from strategist.facts.topo_matrix import Matrix, parse_matrix
from strategist.facts.wiring import expanded, node_names, refuse_large
from strategist.records import dataclass, replace
from strategist.units import parse_bytes, parse_rate, plain_text


@dataclass(frozen=True, slots=True)
class _Entry:
    """One described node, its place in the document, and the devices the document defines itself."""

    said: DescribedNode
    index: int
    paths: Paths
    own: Mapping[str, Gpu]
    nodes: int

    def path(self, key: str) -> str:
        return self.paths.of(self.index, key)


def build_cluster(
    nodes: tuple[DescribedNode, ...],
    paths: Paths,
    *,
    gpus: tuple[DescribedGpu, ...] = (),
    links: tuple[DescribedLink, ...] = (),
    switches: tuple[str, ...] = (),
    oversubscription: float = 1.0,
) -> Resolved:
    """The cluster that a document describes. Raises InputError with the path of the key at fault."""
    if not nodes:
        raise InputError("TOO_SMALL", "$.nodes names no node.", flag="$.nodes", hint="Describe at least one.")
    _check_oversubscription(oversubscription, bool(links))
    for switch in switches:
        checked_name(switch, "$.switches")
    total = sum(bounded_count(node.count, paths.of(i, "count"), MAX_NODES) for i, node in enumerate(nodes))
    bounded_count(total, "$.nodes", MAX_NODES)
    own = _own_gpus(gpus)
    built = [_group(_Entry(node, i, paths, own, total)) for i, node in enumerate(nodes)]
    _refuse_equal_names([group.name for group, _ in built if group.name])
    built = built if links else _alike_together(built)
    cluster = Cluster(
        groups=tuple(group for group, _ in built),
        origin="file",
        oversubscription=float(oversubscription),
        links=tuple(_between(links, {node.name: node.count for node in nodes if node.name})),
        switches=switches,
    )
    refuse_large(cluster)
    return checked_network(Resolved(cluster=cluster, assumptions=tuple(a for _, said in built for a in said)))


def _own_gpus(gpus: tuple[DescribedGpu, ...]) -> dict[str, Gpu]:
    """The devices that a document defines, by folded name. Raises InputError CONFLICT for a name that another one or a card of the catalogue has:
    machines are looked up by it."""
    known = {fold(gpu.name): gpu.name for gpu in catalogued()}
    found: dict[str, Gpu] = {}
    for i, said in enumerate(gpus):
        gpu, path = gpu_from(said, f"$.gpus[{i}]"), f"$.gpus[{i}].name"
        name = fold(said.name)
        if name in known:
            raise InputError("CONFLICT", f"{path}: {known[name]} is a card of the catalogue.", flag=path, value=said.name, hint=f"Give yours a name of its own, such as my-{known[name]}.")  # fmt: skip
        if name in found:
            raise InputError("CONFLICT", f"Two entries of $.gpus are called {found[name].name}.", flag=path, value=said.name, hint="Rename one.")  # fmt: skip
        found[name] = gpu
    return found


_Built = tuple[NodeGroup, tuple[Assumption, ...]]


def _alike_together(built: list[_Built]) -> list[_Built]:
    """Groups of which no two have nodes that differ in nothing but their name: those that a file lists one by one are one kind, and what was
    assumed of the first holds of all. Trays of racks stay apart, since a group fills its own racks."""
    alike: dict[object, list[_Built]] = {}
    for number, one in enumerate(built):
        node = one[0].node
        plain = replace(node, name="", source="", gpu=replace(node.gpu, source=""))
        alike.setdefault(plain if node.fast_domain <= node.gpus else number, []).append(one)
    taken = {group.name for group, _ in built}
    return [some[0] if len(some) == 1 else _one_group(some, taken) for some in alike.values()]


def _one_group(some: list[_Built], taken: set[str]) -> _Built:
    """Alike groups as one, under the first and the last of its nodes' names, or what these begin with where they are numbered in order."""
    groups, first = [group for group, _ in some], some[0][0]
    count = sum(group.count for group in groups)
    if not all(group.name for group in groups):
        return replace(first, count=count, name=""), some[0][1]
    names = [name for group in groups for name in node_names(group.name, group.count)]
    stem = names[0].rstrip("0123456789")
    is_numbered = stem not in {"", *taken} and names == node_names(stem, count)
    title = stem if is_numbered else f"{names[0]} to {names[-1]}"
    node = replace(first.node, name=title)
    return replace(first, node=node, count=count, name=stem if is_numbered else ""), some[0][1]


def _check_oversubscription(value: float, linked: bool) -> None:
    if not 1.0 <= value <= 1e6:
        raise InputError("RANGE", "$.oversubscription must lie between 1 and 1e6.", flag="$.oversubscription", value=value, hint="1 means none.")  # fmt: skip
    if linked and value != 1.0:
        raise InputError("CONFLICT", "$.oversubscription and $.links say the same thing twice.", flag="$.oversubscription", value=value, hint="Put the rates into the links.")  # fmt: skip


def _refuse_equal_names(names: list[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError("CONFLICT", f"Two entries of $.nodes are called {twice}.", flag="$.nodes", value=twice, hint="Rename one.")  # fmt: skip


def _between(links: tuple[DescribedLink, ...], entries: Mapping[str, int]) -> Iterator[Link]:
    for index, link in enumerate(links):
        Bps = parse_rate(link.bw, f"$.links[{index}].bw")
        for a in expanded(link.a, entries):
            yield from (Link(a=a, b=b, kind=link.kind, Bps=Bps) for b in expanded(link.b, entries))


def _group(entry: _Entry) -> _Built:
    said = entry.said
    name = checked_name(said.name, entry.path("name")) if said.name else ""
    gpu, assumed = _named_gpu(entry)
    gpus, assumed = _gpu_count(entry, gpu, assumed)
    stated = Overrides(
        memory_bytes=_memory(entry),
        intra_Bps=_rate(entry, "intra_bw", said.intra_bw),
        inter_Bps=_rate(entry, "inter_bw", said.inter_bw),
        memory_flag=entry.path("gpu_memory"),
        intra_flag=entry.path("intra_bw"),
        inter_flag=entry.path("inter_bw"),
    )
    node, left_open = machine(gpu, gpus, stated, entry.nodes)
    wired, shown = _wired(entry, _dressed(entry, node))
    answered = _answered(said)
    kept = tuple(a for a in left_open if a.what not in answered)
    return NodeGroup(node=wired, count=said.count, name=name), (*assumed, *kept, *shown)


def _answered(said: DescribedNode) -> set[str]:
    """The assumptions that the document makes needless."""
    given = {
        "links inside a node": bool(said.links or said.matrix or (said.topology and (said.intra_bw or said.pair_bw))),
        "host memory of a node": said.ram is not None,
    }
    return {what for what, stated in given.items() if stated}


def _named_gpu(entry: _Entry) -> tuple[Gpu, tuple[Assumption, ...]]:
    """The device by its name: one the document defines, else the catalogue's."""
    own = entry.own.get(fold(entry.said.gpu))
    if own is not None:
        return own, ()
    found = find_gpu(entry.said.gpu, entry.path("gpu"))
    said = Assumption(what="GPU", value=found.value.name, flag=entry.path("gpu"))
    return found.value, (said,) if found.assumed else ()


def _gpu_count(entry: _Entry, gpu: Gpu, assumed: tuple[Assumption, ...]) -> tuple[int, tuple[Assumption, ...]]:
    if entry.said.matrix is not None:
        return _counted(entry), assumed
    if entry.said.gpu_count is not None:
        return bounded_count(entry.said.gpu_count, entry.path("gpu_count"), MAX_GPUS_PER_NODE), assumed
    usual = reference_node(gpu.name)
    count = usual.gpus if usual else 1
    return count, (*assumed, Assumption(what="GPUs per node", value=str(count), flag=entry.path("gpu_count")))


def _counted(entry: _Entry) -> int:
    """How many GPUs the matrix shows. Raises InputError CONFLICT where another count is stated."""
    count, said = len(_matrix(entry).gpus), entry.said.gpu_count
    if said not in (None, count):
        path = entry.path("gpu_count")
        raise InputError("CONFLICT", f"{path} is {said}, and the matrix shows {count}.", flag=path, value=said, hint="Leave the count out.")  # fmt: skip
    return count


def _matrix(entry: _Entry) -> Matrix:
    return parse_matrix(entry.said.matrix or "", entry.path("matrix"))


def _memory(entry: _Entry) -> int | None:
    text = entry.said.gpu_memory
    return None if text is None else parse_bytes(text, entry.path("gpu_memory"), high=MAX_MEMORY_BYTES)


def _rate(entry: _Entry, key: str, text: str | None) -> float | None:
    return None if text is None else parse_rate(text, entry.path(key))


def _dressed(entry: _Entry, node: Node) -> Node:
    """The node with the plain facts of the document in place of the assumed ones."""
    said = entry.said
    ram = None if said.ram is None else parse_bytes(said.ram, entry.path("ram"), high=2**60, example="2TB")
    return replace(
        node,
        name=said.name or node.name,
        nics=node.nics if said.nics is None else bounded_count(said.nics, entry.path("nics"), MAX_GPUS_PER_NODE),
        fabric=node.fabric if said.fabric is None else plain_text(said.fabric, entry.path("fabric")),
        rdma=node.rdma if said.rdma is None else said.rdma,
        ram_bytes=node.ram_bytes if ram is None else ram,
    )


def _wired(entry: _Entry, node: Node) -> tuple[Node, tuple[Assumption, ...]]:
    """The node with the links, the topology or the matrix of the document, and what a matrix leaves open."""
    if entry.said.matrix is not None:
        return _pictured(entry, node)
    if entry.said.links:
        return _linked(entry, node), ()
    return node if entry.said.topology is None else _shaped(entry, node, entry.said.topology), ()


def _pictured(entry: _Entry, node: Node) -> tuple[Node, tuple[Assumption, ...]]:
    """The node as its matrix shows it, which cannot see a rack beyond the node. Raises InputError CONFLICT beside other words for the same links."""
    for key in ("links", "topology", "intra_bw", "pair_bw"):
        if getattr(entry.said, key):
            raise InputError("CONFLICT", f"{entry.path('matrix')} and {entry.path(key)} both say how GPUs are joined.", flag=entry.path(key), hint="Keep one of them.")  # fmt: skip
    seen, assumed = node_from_matrix(_matrix(entry), node.gpu)
    pictured = replace(
        node,
        topology=seen.topology,
        fast_domain=node.fast_domain if seen.topology == node.topology == "nvswitch" else seen.fast_domain,
        intra_Bps=seen.intra_Bps,
        pair_Bps=seen.pair_Bps,
        links=seen.links,
        source=f"{entry.path('matrix')}; the rest: {node.source}",
    )
    return pictured, assumed


def _linked(entry: _Entry, node: Node) -> Node:
    links = tuple(
        Link(a=said.a, b=said.b, kind=said.kind, Bps=parse_rate(said.bw, f"{entry.path('links')}[{i}].bw"))
        for i, said in enumerate(entry.said.links)
    )
    busiest = max(sum(k.Bps for k in links if f"gpu{i}" in (k.a, k.b)) for i in range(node.gpus))
    return replace(
        node,
        topology=entry.said.topology or "none",
        fast_domain=node.gpus,
        intra_Bps=busiest,
        pair_Bps=max(link.Bps for link in links),
        links=links,
        source=f"links stated by {entry.path('links')}; the rest: {node.source}",
    )


def _shaped(entry: _Entry, node: Node, topology: Topology) -> Node:
    """A node whose topology was stated; its rate is the stated one, else the catalogue's or the card's."""
    pair_Bps = _rate(entry, "pair_bw", entry.said.pair_bw)
    intra_Bps = _rate(entry, "intra_bw", entry.said.intra_bw)
    if intra_Bps is None and pair_Bps is not None:
        intra_Bps = pair_Bps * (node.gpus - 1) if topology.endswith("-mesh") else pair_Bps
    if intra_Bps is None:
        intra_Bps = node.intra_Bps if topology == node.topology else device_rate(node.gpu, topology)
    if node.gpus > 1 and not intra_Bps:
        raise InputError("MISSING", f"{entry.path('intra_bw')} is missing: the rate of {node.gpu.name} over {topology} is not known.", flag=entry.path("intra_bw"), hint="Add it, for example 450GB/s.")  # fmt: skip
    same = topology == node.topology
    return replace(
        node,
        topology=topology,
        intra_Bps=intra_Bps,
        pair_Bps=pair_Bps or (node.pair_Bps if same else intra_Bps),
        links=node.links if same else (),
        fast_domain=node.fast_domain if same else node.gpus,
    )
