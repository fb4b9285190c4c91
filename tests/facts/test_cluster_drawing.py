"""Drawings are well-formed, small, harmless and complete; outlines say the same in text."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.facts.clusters import cluster_from_flags, load_cluster
from strategist.facts.drawing import svg, text_tree
from strategist.facts.gpus import gpu_by_id
from strategist.facts.hardware import Cluster, NodeGroup
from strategist.facts.matrix_node import node_from_matrix
from strategist.facts.nodes import node_by_id, nodes
from strategist.facts.tiers import tiers
from strategist.facts.topo_matrix import parse_matrix
from tests.examples import examples

SVG = "{http://www.w3.org/2000/svg}"


def words(drawing: str) -> list[str]:
    """The texts of a drawing."""
    return [element.text or "" for element in ElementTree.fromstring(drawing).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", [node.name for node in nodes()])
def test_every_node_type_can_be_drawn(name: str) -> None:
    """Every node type gives a well-formed drawing under 200 KB with each of its devices and tiers."""
    cluster = Cluster(groups=(NodeGroup(node=node_by_id(name), count=1),), origin="catalogue")
    drawing = svg(cluster)
    texts = words(drawing)
    assert len(drawing.encode()) < 200_000
    assert [t for t in texts if t.startswith("gpu")] == [f"gpu{i}" for i in range(cluster.world)]
    assert all(any(tier.name in text for text in texts) for tier in tiers(cluster))


@given(st.integers(1, 1024), st.integers(1, 131072))
@examples(25)
def test_any_size_stays_readable(gpus: int, count: int) -> None:
    """One to 1024 devices in up to 131072 nodes: at most 72 are drawn, nodes collapse to a count, all inside the frame."""
    drawing = svg(cluster_from_flags("h100-sxm-80gb", gpus, count).cluster)
    root = ElementTree.fromstring(drawing)
    assert len(drawing.encode()) < 200_000
    assert len([t for t in words(drawing) if t.startswith("gpu")]) == min(gpus, 72)
    assert any(f"{count} x " in text for text in words(drawing))
    width, height = (float(x) for x in root.attrib["viewBox"].split()[2:])
    for box in root.iter(f"{SVG}rect"):
        assert float(box.attrib.get("x", 0)) + float(box.attrib["width"]) <= width
        assert float(box.attrib.get("y", 0)) + float(box.attrib["height"]) <= height + 1


def test_hostile_names_are_escaped() -> None:
    """Names with markup or control characters neither break the drawing nor reach it raw."""
    node = replace(node_by_id("dgx-h100"), name="<script>alert(1)</script>", fabric='"&\x1b[2J')
    cluster = Cluster(groups=(NodeGroup(node=node, count=2),), origin="file")
    drawing = svg(cluster)
    assert ElementTree.fromstring(drawing).find(".//{*}script") is None
    assert "<script" not in drawing
    assert "\x1b" not in drawing + text_tree(cluster)


def test_a_drawing_refers_to_nothing_outside() -> None:
    """No scripts, handlers, links, images or remote addresses beside the namespace."""
    drawing = svg(load_cluster("dgx-1-v100:4"))
    assert drawing.count("http") == 1
    for element in ElementTree.fromstring(drawing).iter():
        assert element.tag.removeprefix(SVG) in ("svg", "title", "rect", "text", "line", "path")
        assert not [key for key in element.attrib if key.startswith("on") or "href" in key]


def test_links_are_drawn_one_by_one() -> None:
    """A mesh shows each of its links, and helpers of described links are named."""
    cube = ElementTree.fromstring(svg(load_cluster("dgx-1-v100")))
    assert len(list(cube.iter(f"{SVG}path"))) == 16
    matrix = (
        "\tGPU0\tGPU1\tGPU2\tCPU Affinity\nGPU0\t X \tPIX\tSYS\t0\nGPU1\tPIX\t X \tSYS\t0\nGPU2\tSYS\tSYS\t X \t1\n"
    )
    node, _ = node_from_matrix(parse_matrix(matrix), gpu_by_id("l4"))
    texts = words(svg(Cluster(groups=(NodeGroup(node=node, count=1),), origin="probed")))
    assert {"pcie0", "numa0", "numa1"} <= set(texts)


def test_the_outline_names_tiers_nodes_and_rates() -> None:
    """The text tree has the tiers innermost first, each kind of node, its memory, its links and its way out."""
    outline = text_tree(load_cluster("dgx-h100:4"))
    lines = outline.splitlines()
    assert lines[0] == "cluster: 4 nodes, 32 devices (catalogue)"
    assert outline.index("nvlink: joins 8 devices, 450 GB/s") < outline.index("network over infiniband: joins 32 devices, 50 GB/s")  # fmt: skip
    for said in ("4 x dgx-h100: 8 x H100-SXM-80GB", "79.6 GiB per device", "400 GB/s per node over IB NDR, RDMA"):
        assert said in outline
    assert outline.endswith("\n")


def test_long_lists_are_cut_and_counted() -> None:
    """Many kinds of node and many links end with how many more there are."""
    kinds = tuple(NodeGroup(node=replace(node_by_id("dgx-h100"), name=f"kind{i}"), count=1) for i in range(60))
    cluster = Cluster(groups=kinds, origin="file")
    assert "and 36 more kinds of node" in text_tree(cluster)
    assert len(svg(cluster).encode()) < 200_000
    assert any("36 more kinds of node" in text for text in words(svg(cluster)))
