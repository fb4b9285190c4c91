"""Tiers in closed form: known machines, sharing of uplinks, columns equal to single groups, monotone laws."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.errors import ImpossibleError, InputError
from strategist.facts.clusters import load_cluster
from strategist.facts.groups import group_bandwidth, group_columns, members_within, worse
from strategist.facts.hardware import Cluster, NodeGroup
from strategist.facts.network import port_Bps, uplink_Bps
from strategist.facts.nodes import node_by_id, nodes
from strategist.facts.tier import Share
from strategist.facts.tiers import tiers

PLANNABLE = [node.name for node in nodes() if node.inter_Bps]


def spans(source: str) -> list[tuple[str, int, float]]:
    """Name, span and GB/s per device of the tiers of a cluster."""
    return [(tier.name, tier.span, tier.device_Bps / 1e9) for tier in tiers(load_cluster(source))]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("dgx-h100:4", [("nvlink", 8, 450), ("network", 32, 50)]),
        ("ws-4x-3090-nvlink-pairs", [("nvlink", 2, 56.25), ("pcie-host", 4, 31.5)]),
        ("azure-nc96ads_a100_v4:2", [("nvlink", 2, 300), ("pcie-host", 4, 31.5), ("network", 8, 2.5)]),
        ("dgx-gb200-nvl72-tray:18", [("nvlink", 72, 900)]),
        ("dgx-gb200-nvl72-tray:36", [("nvlink", 72, 900), ("network", 144, 50)]),
        ("dgx-gb200-nvl72-tray:2", [("nvlink", 8, 900)]),
        ("gh200-node:4", [("network", 4, 50)]),
        ("gh200-node", []),
        ("cpu:2", [("shared-memory", 2, 11.82)]),
        ("aws-g7e.48xlarge:2", [("pcie-p2p", 8, 63), ("network", 16, 25)]),
    ],
)
def test_known_machines_have_their_tiers(source: str, expected: list[tuple[str, int, float]]) -> None:
    """Tiers are listed innermost first with the right spans and shares; one device alone has none."""
    assert spans(source) == [(name, span, pytest.approx(rate)) for name, span, rate in expected]


@pytest.mark.parametrize("name", PLANNABLE)
def test_the_last_tier_spans_the_world(name: str) -> None:
    """Spans grow strictly from tier to tier, and the last one is the world."""
    cluster = Cluster(groups=(NodeGroup(node=node_by_id(name), count=3),), origin="catalogue")
    found = [tier.span for tier in tiers(cluster)]
    assert found == sorted(set(found))
    assert found[-1] == cluster.world


def test_members_share_the_uplink() -> None:
    """A group with m members in a node gets m shares of its uplink, never more than the links inside allow."""
    dgx = tiers(load_cluster("dgx-h100:4"))
    assert group_bandwidth(dgx, 8, 1).Bps == 450e9
    assert group_bandwidth(dgx, 4, 8).Bps == 50e9
    assert group_bandwidth(dgx, 8, 4).Bps == 100e9
    assert group_bandwidth(dgx, 32, 1).Bps == 400e9
    assert group_bandwidth(dgx, 32, 1).domains == 4


@pytest.mark.parametrize(
    ("machine", "size", "stride", "GBps"),
    [
        ("dgx-h100:4", 8, 1, 450),
        ("dgx-h100:4", 32, 1, 50),
        ("dgx-h100:4", 8, 4, 50),
        ("dgx-h100:4", 4, 8, 50),
        ("aws-p4d.24xlarge:2", 16, 1, 12.5),
        ("aws-p4d.24xlarge:2", 2, 8, 6.25),
        ("aws-g5.12xlarge:2", 8, 1, 5),
        ("mi300x-platform", 8, 1, 64),
    ],
)
def test_a_message_takes_one_road(machine: str, size: int, stride: int, GBps: float) -> None:
    """Rings of all devices of two nodes send as fast as one port, whole where it is shared and no other group wants it; in a mesh as fast
    as one link."""
    whole = (Share(0, 1.0, 1.0, 1.0),)
    found = tuple(
        replace(tier, shares=whole, cuts=tuple(replace(cut, share=whole[0]) for cut in tier.cuts))
        for tier in tiers(load_cluster(machine))
    )
    link = group_bandwidth(found, size, stride)
    assert link.send_Bps == pytest.approx(1e9 * GBps)
    assert link.send_Bps <= link.ring_Bps == link.Bps


def test_a_message_gets_no_less_than_a_device_s_share() -> None:
    """However many ports a node has: a port that it shares is no narrower than its even part, and ports beyond one for each device are its own."""
    for name in PLANNABLE:
        node = node_by_id(name)
        rates = [port_Bps(replace(node, nics=nics)) for nics in (0, 1, node.gpus, 2 * node.gpus, 4 * node.gpus)]
        assert rates[0] == rates[1] >= rates[2] == rates[3] == rates[4] == uplink_Bps(node)


def test_the_worse_of_two_links_is_no_better_than_either() -> None:
    """Groups of every size and stride on two kinds of nodes: no rate is higher than on either, no walk shorter, whichever is named first."""
    size, stride = (column.ravel() for column in np.meshgrid([1, 2, 4, 8, 16], [1, 2, 4, 8]))
    one, other = (
        group_columns(tiers(load_cluster(name)), size, stride) for name in ("dgx-h100:16", "aws-g5.48xlarge:16")
    )
    found, turned = worse(one, other), worse(other, one)
    for name in ("Bps", "ring_Bps", "all_reduce_Bps", "all_to_all_Bps", "send_Bps"):
        assert np.array_equal(getattr(found, name), np.minimum(getattr(one, name), getattr(other, name)))
        assert np.array_equal(getattr(found, name), getattr(turned, name))
    for name in ("latency_s", "fill_s", "walk_s", "tree_s", "leave"):
        assert np.array_equal(getattr(found, name), np.maximum(getattr(one, name), getattr(other, name)))


def test_a_walk_fills_the_links_of_every_node_and_the_steps_between_them() -> None:
    """Inside a node nothing is added; through n nodes n - 1 times what fills one of them and a step to the next."""
    found = tiers(load_cluster("dgx-h100:16"))
    node = group_bandwidth(found, 8)
    assert (node.walk_s, group_bandwidth(found, 2).walk_s) == (0.0, 0.0)
    for many in (2, 4, 16):
        through = group_bandwidth(found, 8 * many)
        assert through.fill_s == node.fill_s
        assert through.walk_s == pytest.approx((many - 1) * (node.fill_s + 11.3e-6))
        assert group_bandwidth(found, many, 8).walk_s == pytest.approx((many - 1) * 11.3e-6)


def test_meshes_give_what_their_narrowest_cut_gives() -> None:
    """In a mesh a group has only the links between its members: 1 of 7 for two, all 7 for eight."""
    mi300x, h100x4, dgx1 = (tiers(load_cluster(s)) for s in ("mi300x-platform", "hgx-h100-4", "dgx-1-v100"))
    assert [group_bandwidth(mi300x, n, 1).Bps / 1e9 for n in (2, 4, 8)] == pytest.approx([64, 192, 448])
    assert [group_bandwidth(h100x4, n, s).Bps / 1e9 for n, s in ((2, 1), (2, 2), (4, 1))] == pytest.approx([150, 150, 450])  # fmt: skip
    assert [group_bandwidth(dgx1, n, s).Bps / 1e9 for n, s in ((2, 1), (2, 4), (4, 1), (8, 1))] == [25, 25, 100, 150]


def test_oversubscription_divides_the_network() -> None:
    """Oversubscription divides the rate between nodes and leaves the inside alone."""
    plain = load_cluster("dgx-h100:4")
    inner, outer = tiers(replace(plain, oversubscription=4.0))
    assert (inner.device_Bps, outer.device_Bps) == (450e9, 12.5e9)


def test_a_group_of_one_is_not_limited() -> None:
    """One rank alone has no tier, no latency and infinite rates, on every machine."""
    for source in ("dgx-h100:2", "gh200-node"):
        link = group_bandwidth(tiers(load_cluster(source)), 1, 1)
        assert (link.tier, link.latency_s, link.fill_s, link.walk_s, link.domains) == (None, 0.0, 0.0, 0.0, 1)
        assert link.Bps == link.ring_Bps == link.all_reduce_Bps == float("inf")


def test_switches_help_only_all_reduce_inside_their_domain() -> None:
    """In-switch reduction lifts an all-reduce of eight H100 above the ring, and neither smaller nor wider groups."""
    dgx = tiers(load_cluster("dgx-h100:4"))
    inside, across = group_bandwidth(dgx, 8, 1), group_bandwidth(dgx, 32, 1)
    assert inside.all_reduce_Bps > 1.2 * inside.ring_Bps
    assert inside.ring_Bps < 450e9 * 0.8
    assert across.all_reduce_Bps == across.ring_Bps


def test_exchanges_between_nodes_are_slower_than_rings() -> None:
    """An all-to-all sends most bytes of every device over its own share of the uplink."""
    link = group_bandwidth(tiers(load_cluster("dgx-h100:2")), 16, 1)
    assert link.all_to_all_Bps == pytest.approx(50e9 * 15 / 8 * 0.953)
    assert link.all_to_all_Bps < link.ring_Bps


def test_unaligned_groups_count_as_their_smallest_piece() -> None:
    """Groups that straddle a border take the smallest piece: 12 ranks over nodes of 8 leave pieces of 4."""
    dgx = tiers(load_cluster("dgx-h100:3"))
    assert group_bandwidth(dgx, 12, 1).Bps == 4 * 50e9
    rack = tiers(load_cluster("dgx-gb200-nvl72-tray:36"))
    assert group_bandwidth(rack, 16, 1).Bps == 8 * 50e9
    assert group_bandwidth(rack, 8, 1).Bps == 900e9


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 200))
def test_members_within_never_exceeds_any_piece(size: int, stride: int, span: int) -> None:
    """The count is a lower bound of every group's smallest non-empty piece, and exact where blocks and domains tile."""
    bound = int(members_within(np.array([size]), np.array([stride]), span)[0])
    pieces = []
    for block in range(min(span, 40)):
        start = block * size * stride + stride - 1
        inside = [(start + i * stride) // span for i in range(size)]
        pieces += [inside.count(domain) for domain in set(inside)]
    assert 1 <= bound <= min(pieces)
    if span % (size * stride) == 0 or ((size * stride) % span == 0 and span % stride == 0):
        assert bound == min(max(span // stride, 1), size)


@given(st.sampled_from(PLANNABLE), st.integers(1, 64), st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=6))  # fmt: skip
def test_columns_equal_single_groups(name: str, count: int, groups: list[tuple[int, int]]) -> None:
    """A column of groups gives bit for bit what its groups give one by one."""
    found = tiers(Cluster(groups=(NodeGroup(node=node_by_id(name), count=count),), origin="catalogue"))
    columns = group_columns(found, np.array([s for s, _ in groups]), np.array([s for _, s in groups]))
    for row, (size, stride) in enumerate(groups):
        one = group_bandwidth(found, size, stride)
        assert (one.Bps, one.ring_Bps, one.all_reduce_Bps, one.all_to_all_Bps, one.latency_s, one.fill_s, one.walk_s, one.tree_s, one.domains) == (
            columns.Bps[row], columns.ring_Bps[row], columns.all_reduce_Bps[row], columns.all_to_all_Bps[row],
            columns.latency_s[row], columns.fill_s[row], columns.walk_s[row], columns.tree_s[row], columns.domains[row],
        )  # fmt: skip


@given(st.sampled_from(PLANNABLE), st.integers(1, 8), st.sampled_from([2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8]), st.floats(1.0, 10.0))  # fmt: skip
def test_faster_links_never_slow_a_group(name: str, count: int, size: int, stride: int, factor: float) -> None:
    """Raising the rate inside or between nodes never lowers what any group gets."""
    node = node_by_id(name)
    plain = group_bandwidth(tiers(_cluster(node_by_id(name), count)), size, stride)
    wider = replace(node, inter_Bps=node.inter_Bps * factor)
    quicker = replace(node, intra_Bps=node.intra_Bps * factor, links=tuple(replace(k, Bps=k.Bps * factor) for k in node.links))  # fmt: skip
    for faster in (wider, quicker):
        assert group_bandwidth(tiers(_cluster(faster, count)), size, stride).Bps >= plain.Bps * (1 - 1e-12)


def _cluster(node: object, count: int) -> Cluster:
    return Cluster(groups=(NodeGroup(node=node, count=count),), origin="flags")  # type: ignore[arg-type]


def test_splitting_a_list_of_equal_nodes_changes_nothing() -> None:
    """Equal nodes written as several groups have the tiers of one group."""
    node = node_by_id("dgx-gb200-nvl72-tray")
    split = Cluster(groups=(NodeGroup(node=node, count=10), NodeGroup(node=node, count=26)), origin="file")
    assert tiers(split) == tiers(_cluster(node, 36))


def test_unlike_nodes_count_as_the_weakest() -> None:
    """In a mix, blocks fit every node and get the worst node's rate; adding a weak node never helps."""
    fast, slow = node_by_id("dgx-h100"), node_by_id("aws-g5.12xlarge")
    mix = Cluster(groups=(NodeGroup(node=fast, count=2), NodeGroup(node=slow, count=2)), origin="file")
    inner, outer = tiers(mix)
    assert (inner.span, outer.span) == (4, 24)
    assert group_bandwidth(tiers(mix), 4, 1).Bps == 31.5e9
    assert outer.device_Bps == slow.inter_Bps / 4
    assert group_bandwidth(tiers(mix), 4, 1).ring_Bps == group_bandwidth(tiers(_cluster(slow, 1)), 4, 1).ring_Bps


def test_nodes_without_a_known_network_cannot_be_joined() -> None:
    """Several nodes whose rate to others nobody knows are impossible, and the way out is named."""
    with pytest.raises(ImpossibleError) as caught:
        tiers(_cluster(node_by_id("oci-bm.gpu.rtxpro.8"), 2))
    assert (caught.value.code, "--inter-bw" in str(caught.value.hint)) == ("NO_PATH", True)
    assert len(tiers(_cluster(node_by_id("oci-bm.gpu.rtxpro.8"), 1))) == 1


def test_gpus_without_any_link_are_refused() -> None:
    """A node with several GPUs and topology none is refused with a sentence."""
    with pytest.raises(InputError) as caught:
        tiers(_cluster(replace(node_by_id("gh200-node"), gpus=2), 1))
    assert caught.value.code == "TOPOLOGY"


def test_a_node_of_several_boards_has_both_tiers() -> None:
    """Where a node holds several fast domains, the host joins them."""
    node = replace(node_by_id("dgx-h100"), gpus=16, fast_domain=8)
    assert [(t.name, t.span, t.device_Bps) for t in tiers(_cluster(node, 1))] == [("nvlink", 8, 450e9), ("pcie-host", 16, 63e9)]  # fmt: skip


def test_the_way_out_of_a_pcie_node_is_its_pcie_link() -> None:
    """Where PCIe carries everything, ports faster than it add nothing; GPUs with their own links are not held back."""
    for name in ("ws-4x-4090", "ws-4x-3090-nvlink-pairs", "aws-g7e.48xlarge"):
        node = replace(node_by_id(name), inter_Bps=8 * 400e9)
        road = node.gpu.host_Bps if node.topology == "nvlink-pairs" else node.intra_Bps
        assert tiers(_cluster(node, 2))[-1].device_Bps == road
        assert group_bandwidth(tiers(_cluster(node, 2)), 2, node.gpus).Bps == road
    assert tiers(_cluster(replace(node_by_id("dgx-h100"), inter_Bps=8 * 400e9), 2))[-1].device_Bps == 400e9


def test_latency_is_a_walk_around_the_ring() -> None:
    """Latency is one base cost and a hop per step, those between nodes at the network's price."""
    inner, outer = tiers(load_cluster("dgx-h100:4"))
    link = group_bandwidth((inner, outer), 32, 1)
    assert link.latency_s == pytest.approx(inner.base_s + 28 * inner.hop_s + 3 * outer.hop_s)


def test_a_tree_joins_nodes_in_steps_that_double_them() -> None:
    """One way up: a step to every further device of a node, then one for each doubling of the nodes, at NCCL's price; inside a node it is the walk,
    and over EFA, whose steps were measured, a step takes what one along the ring does."""
    inner, outer = tiers(load_cluster("dgx-h100:16"))
    assert group_bandwidth((inner, outer), 128).tree_s == pytest.approx(inner.base_s + 7 * inner.hop_s + 4 * 5.0e-6)
    assert group_bandwidth((inner, outer), 16, 8).tree_s == pytest.approx(outer.base_s + 4 * 5.0e-6)
    node = group_bandwidth((inner, outer), 8)
    assert node.tree_s == node.latency_s
    efa = tiers(load_cluster("p5.48xlarge:16"))[-1]
    assert efa.tree_s == efa.hop_s == pytest.approx(25.7e-6)


def test_tiers_need_no_networkx() -> None:
    """Loading a named cluster and its tiers leaves networkx, torch and pydantic alone."""
    code = (
        "import sys; from strategist.facts.clusters import load_cluster; from strategist.facts.tiers import tiers;"
        "tiers(load_cluster('dgx-h100:4'));"
        "print(*[m for m in ('networkx', 'torch', 'pydantic', 'rich', 'yaml') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
