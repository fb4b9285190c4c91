"""What groups of ranks get on a graph, when all groups of one axis talk at the same time.

Definition. Levels of links are used in turn: those that scale up, those through the host, those between nodes
(facts/tier.py). At each level the members that lower levels have already joined are one piece; pieces that links of
this level join form an island. A ring must cross every division of an island's pieces, so the island's rate is the
narrowest cut that separates some of its pieces from others, where

* the group may pass through its own devices and through anything that is not a device, never through other groups'
  devices;
* the capacity of a link between two vertices that are not devices (uplinks, root links, links between switches) is
  divided evenly by the number of islands that use it: those with two pieces between which a shortest route crosses it.

The group's rate is that of its slowest island; a group that no level joins as a whole has rate 0. What collectives reach of
a rate depends on the links, so every level that a group crosses is kept: the widest link may be the last to be filled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from strategist.facts.tier import LEVELS, Kind

if TYPE_CHECKING:
    import networkx as nx

    Graph = nx.Graph[str]

Piece = frozenset[str]
Island = tuple[Piece, ...]
Edge = frozenset[str]


class Crossing(NamedTuple):
    """What one island gets at the level that joins its pieces: the narrowest cut and the kind of link that it cuts; how many devices
    the island has, and how many pass the same vertices with it, as those of all groups in a host's memory do; and the rate of the
    widest link of this level that one of its devices has."""

    Bps: float
    kind: Kind
    devices: int
    sharing: int
    card_Bps: float


class Limit(NamedTuple):
    """The rate of a group and the kind of link that limits it; a group of one is not limited by any."""

    Bps: float
    kind: Kind | None


def group_bandwidth_on_graph(graph: Graph, groups: Sequence[Sequence[int]]) -> tuple[Limit, ...]:
    """The limit of every group of ranks; `groups` are all groups of one axis, each rank in at most one of them."""
    crossed = crossings_on_graph(graph, groups)
    return tuple(Limit(0.0, None) if found is None else _least(found) for found in crossed)


def _least(crossings: Sequence[Crossing]) -> Limit:
    least = min(crossings, key=lambda crossing: crossing.Bps, default=None)
    return Limit(float("inf"), None) if least is None else Limit(least.Bps, least.kind)


def crossings_on_graph(graph: Graph, groups: Sequence[Sequence[int]]) -> tuple[tuple[Crossing, ...] | None, ...]:
    """What the islands of every group cross, lower levels first; None for a group that no level joins as a whole."""
    device = {data["rank"]: vertex for vertex, data in graph.nodes(data=True) if data["kind"] == "gpu"}
    pieces: list[Island] = [tuple(frozenset([device[rank]]) for rank in group) for group in groups]
    crossed: list[list[Crossing]] = [[] for _ in groups]
    for level in range(len(LEVELS)):
        part = _up_to(graph, level)
        islands = [_islands(part, held) for held in pieces]
        meeting = [_Meeting(part, island) for held in islands for island in held if len(island) > 1]
        loads = Counter(edge for one in meeting for edge in one.edges)
        for found, held in zip(crossed, islands, strict=True):
            found += (_crossing(part, one, loads, level, meeting) for one in meeting if one.island in held)
        pieces = [tuple(frozenset[str]().union(*island) for island in held) for held in islands]
    return tuple(None if len(held) > 1 else tuple(found) for held, found in zip(pieces, crossed, strict=True))


def axis_groups(world: int, size: int, stride: int) -> Iterator[tuple[int, ...]]:
    """All groups of an axis of `size` ranks at `stride` in a world that they tile."""
    block = size * stride
    starts = (first + offset for first in range(0, world, block) for offset in range(stride))
    return (tuple(range(start, start + block, stride)) for start in starts)


def _up_to(graph: Graph, level: int) -> Graph:
    """The links of this level and the lower ones, with all vertices."""
    import networkx as nx

    part: Graph = nx.Graph()
    part.add_nodes_from(graph.nodes(data=True))
    part.add_edges_from((a, b, data) for a, b, data in graph.edges(data=True) if data["level"] <= level)
    return part


def _reachable(part: Graph, piece: Piece, own: Piece) -> set[str]:
    """Every vertex that `piece` reaches through its group's devices and through what is not a device."""
    seen, front = set(piece), list(piece)
    while front:
        for vertex in part.adj[front.pop()]:
            if vertex not in seen and (vertex in own or part.nodes[vertex]["kind"] != "gpu"):
                seen.add(vertex)
                front.append(vertex)
    return seen


def _islands(part: Graph, pieces: Island) -> list[Island]:
    """The pieces of one group, put together where links join them."""
    own = frozenset[str]().union(*pieces)
    left, found = list(pieces), []
    while left:
        reached = _reachable(part, left[0], own)
        found.append(tuple(piece for piece in left if piece & reached))
        left = [piece for piece in left if not piece & reached]
    return found


def _contracted(part: Graph, island: Island, loads: Counter[Edge]) -> Graph:
    """The island with each piece as one vertex, beside the non-devices it reaches; `capacity` is its share of a link."""
    import networkx as nx

    own = frozenset[str]().union(*island)
    name = {vertex: f"piece{i}" for i, piece in enumerate(island) for vertex in piece}
    small: Graph = nx.Graph()
    for vertex in _reachable(part, island[0], own):
        for near, data in part.adj[vertex].items():
            a, b = name.get(vertex, vertex), name.get(near, near)
            foreign = near not in own and part.nodes[near]["kind"] == "gpu"
            if a != b and not foreign and vertex < near:
                before = small.edges[a, b]["capacity"] if small.has_edge(a, b) else 0.0
                share = data["Bps"] / max(loads[frozenset((vertex, near))], 1)
                small.add_edge(a, b, capacity=before + share, kind=data["kind"], level=data["level"])
    return small


class _Meeting:
    """Where the pieces of an island meet: the vertices that are no devices and the links between them, on shortest routes of two pieces."""

    def __init__(self, part: Graph, island: Island) -> None:
        small = _contracted(part, island, Counter())
        far = [_steps(small, f"piece{i}") for i in range(len(island))]
        on_route = [edge for edge in small.edges if _is_on_route(edge, far)]
        self.island = island
        self.devices = frozenset[str]().union(*island)
        self.edges = [frozenset(edge) for edge in on_route if not _ends_in_a_piece(edge)]
        self.vertices = {end for edge in on_route for end in edge if not end.startswith("piece")}


def _ends_in_a_piece(edge: tuple[str, str]) -> bool:
    return any(end.startswith("piece") for end in edge)


def _steps(small: Graph, start: str) -> dict[str, int]:
    import networkx as nx

    return dict(nx.single_source_shortest_path_length(small, start))


def _is_on_route(edge: tuple[str, str], far: Sequence[dict[str, int]]) -> bool:
    a, b = edge
    return any(
        min(one[a] + other[b], one[b] + other[a]) + 1 == one[f"piece{j}"]
        for (_, one), (j, other) in combinations(enumerate(far), 2)
    )


def _crossing(part: Graph, one: _Meeting, loads: Counter[Edge], level: int, meeting: Sequence[_Meeting]) -> Crossing:
    names = [f"piece{i}" for i in range(len(one.island))]
    small = without_dead_ends(_contracted(part, one.island, loads), names)
    kinds = [(data["capacity"], data["kind"]) for _, _, data in small.edges(data=True) if data["level"] == level]
    beside = (other.devices for other in meeting if other is one or one.vertices & other.vertices)
    own = [data["Bps"] for device in one.devices for data in part.adj[device].values() if data["level"] == level]
    return Crossing(
        Bps=narrowest_cut(small, names),
        kind=min(kinds)[1],
        devices=len(one.devices),
        sharing=len(frozenset[str]().union(*beside)),
        card_Bps=max(own, default=0.0),
    )


def narrowest_cut(small: Graph, pieces: Sequence[str]) -> float:
    """The least capacity that separates some of `pieces` from others; edges carry `capacity`, no branch is dead."""
    import networkx as nx

    if small.number_of_edges() == small.number_of_nodes() - 1:  # a tree: every edge separates pieces
        return float(min(data["capacity"] for _, _, data in small.edges(data=True)))
    flow = nx.algorithms.flow.shortest_augmenting_path
    return min(float(nx.maximum_flow_value(small, pieces[0], piece, flow_func=flow)) for piece in pieces[1:])


def without_dead_ends(small: Graph, pieces: Sequence[str]) -> Graph:
    """The graph without branches that lead to no piece."""
    pruned, kept = small.copy(), set(pieces)
    while ends := [vertex for vertex in pruned if pruned.degree[vertex] <= 1 and vertex not in kept]:
        pruned.remove_nodes_from(ends)
    return pruned
