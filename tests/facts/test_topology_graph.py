"""The graph of a cluster, and that on regular machines it gives exactly what the closed form gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.errors import ImpossibleError, InputError
from strategist.facts.clusters import load_cluster
from strategist.facts.graph_groups import axis_groups, group_bandwidth_on_graph
from strategist.facts.groups import group_bandwidth
from strategist.facts.hardware import Cluster, Link, Node, NodeGroup
from strategist.facts.nodes import node_by_id, nodes
from strategist.facts.tiers import tiers
from strategist.facts.topology import graph
from tests.examples import examples

NAMES = [node.name for node in nodes()]


def cluster_of(node: Node, count: int) -> Cluster:
    """Equal nodes."""
    return Cluster(groups=(NodeGroup(node=node, count=count),), origin="flags")


def worst_on_graph(cluster: Cluster, size: int, stride: int) -> float:
    """The rate of the worst group of an axis, by the graph."""
    groups = list(axis_groups(cluster.world, size, stride))
    return min(limit.Bps for limit in group_bandwidth_on_graph(graph(cluster), groups))


def powers(high: int) -> list[int]:
    """Powers of two up to a bound."""
    return [2**i for i in range(high.bit_length()) if 2**i <= high]


def aligned(world: int) -> list[tuple[int, int]]:
    """Every power-of-two (size, stride) that tiles the world."""
    return [(m, s) for m in powers(world)[1:] for s in powers(world // m) if world % (m * s) == 0]


@st.composite
def regular_axes(draw: st.DrawFn) -> tuple[Cluster, int, int]:
    """A node type of the catalogue, one to four of it, and an aligned axis of their ranks."""
    named = node_by_id(draw(st.sampled_from(NAMES)))
    node = replace(named, inter_Bps=named.inter_Bps * draw(st.sampled_from([1, 1, 16, 256])))
    counts = [n for n in (1, 2, 3, 4) if aligned(n * node.gpus) and (n == 1 or node.inter_Bps)]
    cluster = cluster_of(node, draw(st.sampled_from(counts or [1])))
    return cluster, *draw(st.sampled_from(aligned(cluster.world) or [(1, 1)]))


@given(regular_axes())
@examples(120)
def test_closed_form_equals_graph(axis: tuple[Cluster, int, int]) -> None:
    """On regular clusters and aligned groups the tiers and the graph give the same rate."""
    cluster, size, stride = axis
    if size > 1:
        assert group_bandwidth(tiers(cluster), size, stride).Bps == pytest.approx(worst_on_graph(cluster, size, stride), rel=1e-9)  # fmt: skip


DISTINCT = {
    (n.topology, n.gpus, n.fast_domain, n.links, n.intra_Bps, n.inter_Bps, n.gpu.host_Bps): n.name for n in nodes()
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTINCT.values())
def test_closed_form_equals_graph_everywhere(name: str) -> None:
    """For every distinct picture of a node, one to four nodes and every aligned axis, tiers and graph agree."""
    node = node_by_id(name)
    for count in (1, 2, 3, 4) if node.inter_Bps else (1,):
        cluster = cluster_of(node, count)
        for size, stride in aligned(cluster.world):
            assert group_bandwidth(tiers(cluster), size, stride).Bps == pytest.approx(worst_on_graph(cluster, size, stride), rel=1e-9)  # fmt: skip


@given(st.sampled_from(NAMES), st.sampled_from([3, 5, 6, 7]), st.integers(1, 4), st.data())
@examples(60)
def test_closed_form_never_promises_more_for_odd_groups(name: str, gpus: int, count: int, data: st.DataObject) -> None:
    """For groups that do not tile the domains the tiers give at most what the graph gives."""
    whole = node_by_id(name)
    odd = whole.gpus > gpus and not whole.links and whole.fast_domain <= whole.gpus and whole.inter_Bps
    node = replace(whole, gpus=gpus, fast_domain=gpus) if odd else whole
    cluster = cluster_of(node, count if node.inter_Bps else 1)
    axes = [(m, s) for m in range(2, cluster.world + 1) for s in range(1, cluster.world // m + 1) if cluster.world % (m * s) == 0]  # fmt: skip
    size, stride = data.draw(st.sampled_from(axes or [(1, 1)]))
    if size > 1:
        assert group_bandwidth(tiers(cluster), size, stride).Bps <= worst_on_graph(cluster, size, stride) * (1 + 1e-9)


def test_a_rack_shares_its_switch_and_not_its_uplinks() -> None:
    """Trays of one rack talk over the rack's switch; two racks talk over the ports of every tray."""
    cluster = load_cluster("dgx-gb200-nvl72-tray:36")
    half = [tuple(range(8)), tuple(range(72, 80))]
    assert [limit.Bps for limit in group_bandwidth_on_graph(graph(cluster), half)] == [900e9, 900e9]
    across = group_bandwidth_on_graph(graph(cluster), [(0, 72)])
    assert (across[0].Bps, across[0].kind) == (200e9, "infiniband")


def test_groups_that_cross_a_link_share_it() -> None:
    """Two groups across two nodes each get half of the uplink, one alone gets all of it."""
    built = graph(load_cluster("lambda-8x-h100:2"))
    alone = group_bandwidth_on_graph(built, [(0, 8)])
    both = group_bandwidth_on_graph(built, [(0, 8), (1, 9)])
    assert alone[0].Bps == 12.5e9
    assert [limit.Bps for limit in both] == [6.25e9, 6.25e9]


def test_a_group_never_borrows_foreign_devices() -> None:
    """Members without a link between them do not pass through a device of another group."""
    links = (Link(a="gpu0", b="gpu1", kind="nvlink", Bps=100e9), Link(a="gpu1", b="gpu2", kind="nvlink", Bps=100e9))
    node = replace(node_by_id("dgx-1-v100"), gpus=3, fast_domain=3, links=links)
    built = graph(cluster_of(node, 1))
    assert group_bandwidth_on_graph(built, [(0, 2)])[0] == (node.gpu.host_Bps, "pcie-host")
    assert group_bandwidth_on_graph(built, [(0, 1, 2)])[0] == (100e9, "nvlink")


def test_parallel_routes_add_up() -> None:
    """Two switches between the same sockets carry twice the rate of one: the narrowest cut, not one path."""
    halves = [Link(a=f"gpu{g}", b=f"numa{n}", kind="pcie-host", Bps=20e9) for g in range(2) for n in range(2)]
    node = replace(node_by_id("ws-2x-4090"), links=tuple(halves))
    assert group_bandwidth_on_graph(graph(cluster_of(node, 1)), [(0, 1)])[0].Bps == 40e9


def test_a_shared_socket_link_is_divided() -> None:
    """Four groups across two sockets each get a quarter of the socket link; inside a socket they get their own."""
    own = [Link(a=f"gpu{g}", b=f"numa{g // 4}", kind="pcie-host", Bps=30e9) for g in range(8)]
    node = replace(node_by_id("ws-8x-4090"), links=(*own, Link(a="numa0", b="numa1", kind="pcie-host", Bps=20e9)))
    cluster = cluster_of(node, 1)
    found = tiers(cluster)
    assert group_bandwidth(found, 2, 4).Bps == 5e9
    assert group_bandwidth(found, 4, 1).Bps == 30e9
    assert group_bandwidth(found, 8, 1).Bps == 20e9


def test_irregular_machines_get_their_tiers_from_the_graph() -> None:
    """With links beyond a mesh, every layout that tiles the node has the graph's rate, across nodes too."""
    own = [Link(a=f"gpu{g}", b=f"numa{g // 2}", kind="pcie-host", Bps=30e9) for g in range(4)]
    node = replace(node_by_id("ws-4x-4090"), links=(*own, Link(a="numa0", b="numa1", kind="pcie-host", Bps=20e9)))
    cluster = cluster_of(node, 2)
    for size, stride in aligned(cluster.world):
        assert group_bandwidth(tiers(cluster), size, stride).Bps == pytest.approx(worst_on_graph(cluster, size, stride))


def test_switched_networks_divide_their_spine() -> None:
    """Two leaves with two nodes each: groups under one leaf get the leaf's rate, all groups together share the spine."""

    def up(node: str, switch: str) -> Link:
        return Link(a=node, b=switch, kind="infiniband", Bps=400e9)

    leaves = (up("a0", "leaf0"), up("a1", "leaf0"), up("b0", "leaf1"), up("b1", "leaf1"))
    spine = Link(a="leaf0", b="leaf1", kind="infiniband", Bps=200e9)
    dgx = node_by_id("dgx-h100")
    groups = (NodeGroup(node=dgx, count=2, name="a"), NodeGroup(node=dgx, count=2, name="b"))
    cluster = Cluster(groups=groups, origin="file", links=(*leaves, spine), switches=("leaf0", "leaf1"))
    found = tiers(cluster)
    assert group_bandwidth(found, 16, 1).Bps == 400e9
    assert group_bandwidth(found, 2, 8).Bps == 50e9
    assert group_bandwidth(found, 2, 16).Bps == 200e9 / 16
    assert group_bandwidth(found, 32, 1).Bps == 200e9


def leaves(leaf_nodes: list[int], spines: int, gpus: int) -> Cluster:
    """Leaves with some nodes each, joined by spines."""
    node = replace(node_by_id("dgx-h100"), gpus=gpus, fast_domain=gpus)
    groups, links = [], []
    for leaf, count in enumerate(leaf_nodes):
        groups.append(NodeGroup(node=node, count=count, name=f"n{leaf}-"))
        names = [f"n{leaf}-"] if count == 1 else [f"n{leaf}-{i}" for i in range(count)]
        links += [Link(a=name, b=f"leaf{leaf}", kind="infiniband", Bps=400e9) for name in names]
        links += [Link(a=f"leaf{leaf}", b=f"spine{s}", kind="infiniband", Bps=150e9) for s in range(spines)]
    switches = (*(f"leaf{i}" for i in range(len(leaf_nodes))), *(f"spine{i}" for i in range(spines)))
    return Cluster(groups=tuple(groups), origin="file", links=tuple(links), switches=switches)


@given(st.sampled_from([[2, 2], [1, 1, 1, 1], [4, 4], [3, 3]]), st.integers(1, 3), st.sampled_from([1, 2, 4]))
@examples(6)
def test_linked_networks_equal_their_graph(leaf_nodes: list[int], spines: int, gpus: int) -> None:
    """On leaves and spines the tiers, worked out per node, give the rate of the graph of all devices."""
    cluster = leaves(leaf_nodes, spines, gpus)
    for size, stride in aligned(cluster.world):
        if stride % gpus == 0 or gpus % stride == 0:
            assert group_bandwidth(tiers(cluster), size, stride).Bps == pytest.approx(
                worst_on_graph(cluster, size, stride)
            )


def test_unlike_nodes_may_be_linked_too() -> None:
    """Nodes of different counts in a linked network get the graph's rates, layout by layout."""
    small = replace(node_by_id("dgx-h100"), gpus=4, fast_domain=4)
    groups = (NodeGroup(node=node_by_id("dgx-h100"), count=1, name="a"), NodeGroup(node=small, count=2, name="b"))
    links = tuple(Link(a=n, b="leaf", kind="infiniband", Bps=400e9) for n in ("a", "b0", "b1"))
    cluster = Cluster(groups=groups, origin="file", links=links, switches=("leaf",))
    for size, stride in aligned(16):
        assert group_bandwidth(tiers(cluster), size, stride).Bps <= worst_on_graph(cluster, size, stride) * (1 + 1e-9)


def test_long_lists_of_links_are_refused() -> None:
    """More nodes or devices than can be walked link by link are refused at once, with the short way to say it."""
    with pytest.raises(InputError) as caught:
        tiers(leaves([65], 1, 8))
    assert (caught.value.code, "oversubscription" in str(caught.value.hint)) == ("TOO_LARGE", True)


def test_islands_are_impossible() -> None:
    """Devices that nothing connects are an error that names both islands; a huge graph is refused."""
    pairs = (Link(a="gpu0", b="numa0", kind="pcie-host", Bps=1e9), Link(a="gpu1", b="numa1", kind="pcie-host", Bps=1e9))
    with pytest.raises(ImpossibleError) as caught:
        graph(cluster_of(replace(node_by_id("ws-2x-4090"), links=pairs), 1))
    assert (caught.value.code, caught.value.exit_code) == ("NO_PATH", 3)
    assert "node0/gpu0" in caught.value.message
    assert "node0/gpu1" in caught.value.message
    with pytest.raises(InputError) as refused:
        graph(load_cluster("dgx-h100:1024"))
    assert refused.value.code == "TOO_LARGE"


def test_unjoined_groups_have_no_rate() -> None:
    """A group whose members no level joins has rate 0."""
    built = graph(load_cluster("dgx-h100:2"))
    built.remove_node("fabric")
    assert group_bandwidth_on_graph(built, [(0, 8)])[0].Bps == 0.0


def test_every_rank_has_its_device() -> None:
    """Rank r is device r % gpus of node r // gpus."""
    built = graph(load_cluster("dgx-h100:3"))
    ranks = {data["rank"]: vertex for vertex, data in built.nodes(data=True) if data["kind"] == "gpu"}
    assert ranks == {r: f"node{r // 8}/gpu{r % 8}" for r in range(24)}
