"""Topology matrices of real machines are read exactly, whatever their layout, and never misread."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.errors import InputError
from strategist.facts.clusters import load_cluster
from strategist.facts.gpus import gpu_by_id
from strategist.facts.groups import group_bandwidth
from strategist.facts.hardware import Cluster, NodeGroup
from strategist.facts.link_efficiency import efficiency
from strategist.facts.machines import default_row
from strategist.facts.matrix_node import node_from_matrix
from strategist.facts.tiers import tiers
from strategist.facts.topo_matrix import parse_matrix

FOLDER = Path(__file__).parents[1] / "data" / "topo"
FACTS: dict[str, dict[str, Any]] = {fact["id"]: fact for fact in json.loads((FOLDER / "facts.json").read_text(encoding="utf-8"))}  # fmt: skip
LAYOUTS = sorted(path.name for path in FOLDER.glob("*.txt") if path.name.split(".")[1] in ("tab", "space", "ansi"))

CARDS = {
    "h200x8_cloud_roce_8nic": "h200-sxm-141gb", "h100x8_nvswitch_no_nic": "h100-sxm-80gb", "h100x8_nvswitch_no_nic_noht": "h100-sxm-80gb",
    "a100x8_nvswitch_no_nic": "a100-sxm-80gb", "a100x8_nvswitch_10nic": "a100-sxm-80gb", "gpu4_partial_nvlink_pairs": "v100-sxm2-16gb",
    "gpu4_phb_48vcpu_cloud": "l4", "gpu2_nvlink_bridge": "rtx-2080ti", "gpu2_phb": "rtx-4090", "v100x8_dgx1_cube_mesh": "v100-sxm2-32gb",
    "dgx_a100_40gb_12nic": "a100-sxm-40gb", "a100x8_4nic_one_side": "a100-sxm-80gb", "rtx4090x8_pcie_sys_2nic": "rtx-4090",
    "gpu4_phb_desktop": "rtx-4090", "gpu5_mixed_5090_4090": "rtx-4090", "rtx3090x2_sys_numa_na": "rtx-3090", "h100x4_nv6_4nic": "h100-sxm-80gb",
    "gb200_tray4_numa": "gb200", "gb200_tray4_gpu_numa_id": "gb200", "a100x2_of_8_container_blank_affinity": "a100-sxm-80gb",
    "gpu8_pcie_pix_pairs_2017": "p100-pcie-16gb", "dgx_h100_12nic": "h100-sxm-80gb", "dgx2_v100x16_10nic": "v100-sxm2-32gb",
}  # fmt: skip


def text_of(name: str) -> str:
    """The text of a fixture."""
    return (FOLDER / name).read_text(encoding="utf-8")


def seen_node(name: str) -> Any:
    """The node that the matrix of a fixture shows, with a card that such a machine has."""
    matrix = parse_matrix(text_of(f"{name}.tab.txt"))
    return node_from_matrix(matrix, gpu_by_id(CARDS[name]))


def test_every_machine_is_tested() -> None:
    """Every machine of the facts has a layout and a card."""
    assert set(FACTS) == {name.split(".")[0] for name in LAYOUTS} == set(CARDS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_facts(name: str) -> None:
    """Tabs, blanks and colours give the same devices, links, affinities and NIC names as the facts."""
    fact, matrix = FACTS[name.split(".")[0]], parse_matrix(text_of(name))
    assert list(matrix.devices) == fact["devices"]
    assert [list(row) for row in matrix.links] == fact["links"]
    assert {gpu: dict(cells) for gpu, cells in matrix.affinity.items()} == _stated(fact["affinity"])
    assert dict(matrix.nic_names) == fact["nic_names"]


def _stated(affinity: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    return {gpu: cells for gpu, cells in affinity.items() if any(cells.values())}


def test_a_paste_that_lost_its_tabs_is_refused() -> None:
    """Glued columns are an error that shows the glued word."""
    with pytest.raises(InputError) as caught:
        parse_matrix(text_of("dgx_h100_12nic.glued.txt"))
    assert caught.value.code == "PARSE"
    assert "NIC8NIC9" in caught.value.message


def test_glued_cells_are_refused_too() -> None:
    """With a good header, a row of glued cells is refused for the cell or for its length."""
    good = text_of("h100x4_nv6_4nic.tab.txt")
    for broken in (good.replace("PIX\tSYS\tSYS\tSYS", "PIX\tSYSSYS\tSYS", 1), good.replace("PIX\tSYS\tSYS\tSYS\t6,", "PIX\tSYS\tSYS6,", 1)):  # fmt: skip
        assert broken != good
        with pytest.raises(InputError) as caught:
            parse_matrix(broken)
        assert caught.value.code == "PARSE"


def test_contradictions_and_gaps_are_refused() -> None:
    """A matrix that contradicts itself, lacks a row, has no header or carries control characters is refused."""
    good = text_of("gpu2_phb.tab.txt")
    for broken, code in (
        (good.replace("GPU1\tPHB", "GPU1\tSYS"), "PARSE"),
        (good.replace(" X ", "PHB", 1), "PARSE"),
        ("\n".join(good.splitlines()[:2]), "PARSE"),
        ("no matrix at all", "PARSE"),
        ("", "PARSE"),
        (good.replace("PHB", "PHB\x07", 1), "CONTROL_CHAR"),
        (good.replace("GPU1", "GPU0"), "PARSE"),
    ):
        with pytest.raises(InputError) as caught:
            parse_matrix(broken)
        assert caught.value.code == code


def test_link_type_tables_of_amd_are_read() -> None:
    """Devices by PCI address become GPU0 to GPU7, and a full xGMI table is a mesh."""
    matrix = parse_matrix(text_of("amd_mi_x8_xgmi.link_type.txt"))
    assert matrix.gpus == tuple(f"GPU{i}" for i in range(8))
    node, assumed = node_from_matrix(matrix, gpu_by_id("mi300x"))
    assert (node.topology, node.intra_Bps, node.pair_Bps, assumed) == ("xgmi-mesh", 448e9, 64e9, ())


def test_half_the_gpus_may_have_no_near_nic() -> None:
    """NICs on one socket are near to the GPUs of that socket only."""
    matrix = parse_matrix(text_of("a100x8_4nic_one_side.tab.txt"))
    assert [bool(matrix.near_nics(gpu)) for gpu in matrix.gpus] == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    ("name", "topology", "intra"),
    [("h200x8_cloud_roce_8nic", "nvswitch", 450e9), ("a100x8_nvswitch_10nic", "nvswitch", 300e9), ("h100x4_nv6_4nic", "nvlink-mesh", 450e9),
     ("dgx2_v100x16_10nic", "nvswitch", 150e9), ("gb200_tray4_numa", "nvswitch", 900e9), ("gpu4_partial_nvlink_pairs", "nvlink-pairs", 25e9),
     ("gpu2_nvlink_bridge", "nvlink-pairs", 50e9), ("gpu2_phb", "pcie-host", 31.5e9), ("rtx4090x8_pcie_sys_2nic", "pcie-host", 31.5e9),
     ("a100x2_of_8_container_blank_affinity", "nvswitch", 300e9)],
)  # fmt: skip
def test_regular_machines_are_recognised(name: str, topology: str, intra: float) -> None:
    """A switch, a full mesh, bridged pairs and plain PCIe are recognised, at the rates of the card's own links."""
    node, _ = seen_node(name)
    assert (node.topology, node.intra_Bps, node.links) == (topology, intra, ())


def test_unequal_machines_keep_their_links() -> None:
    """The cube mesh keeps its sixteen bonds; PIX pairs under two sockets become a PCIe tree with a shared middle."""
    cube, _ = seen_node("v100x8_dgx1_cube_mesh")
    assert len(cube.links) == 16
    assert {sum(link.Bps for link in cube.links if f"gpu{i}" in (link.a, link.b)) for i in range(8)} == {150e9}
    tree, assumed = seen_node("gpu8_pcie_pix_pairs_2017")
    found = tiers(Cluster(groups=(NodeGroup(node=tree, count=1),), origin="probed"))
    assert group_bandwidth(found, 2, 1).Bps == 15.75e9
    assert group_bandwidth(found, 2, 4).Bps == 10e9 / 4
    assert {said.what for said in assumed} == {"unseen cells of the topology matrix", "link between sockets"}


@pytest.mark.parametrize("name", FACTS)
def test_every_machine_has_tiers(name: str) -> None:
    """Every fixture becomes a node whose last tier spans its GPUs."""
    node, _ = seen_node(name)
    assert node.gpus == len([device for device in FACTS[name]["devices"] if device.startswith("GPU")])
    assert tiers(Cluster(groups=(NodeGroup(node=node, count=1),), origin="probed"))[-1].span == node.gpus


def test_bonds_of_a_card_without_known_links_are_refused() -> None:
    """NVLink in the matrix of a card whose link rate nobody knows is an error, not a guess."""
    with pytest.raises(InputError) as caught:
        node_from_matrix(parse_matrix(text_of("gpu2_nvlink_bridge.tab.txt")), gpu_by_id("rtx-4090"))
    assert caught.value.code == "HARDWARE_FEATURE"


@given(st.sampled_from(LAYOUTS), st.data())
def test_damage_is_refused_or_harmless(name: str, data: st.DataObject) -> None:
    """With any one character gone the matrix is refused, or its link words are still the facts' own."""
    text = text_of(name)
    at = data.draw(st.integers(0, len(text) - 1))
    try:
        matrix = parse_matrix(text[:at] + text[at + 1 :])
    except InputError as error:
        assert error.code in ("PARSE", "CONTROL_CHAR")
        return
    true = FACTS[name.split(".")[0]]["links"]
    wrong = [(i, j) for i, row in enumerate(matrix.links) for j, cell in enumerate(row) if cell != true[i][j]]
    assert all(true[i][j] is None or str(true[i][j]).startswith("NV") for i, j in wrong)


@given(st.text(alphabet="GPUNIC01 X\t\nVSYPHB?", max_size=120))
def test_no_text_breaks_the_parser(text: str) -> None:
    """Any text is a matrix or an input error."""
    try:
        assert parse_matrix(text).gpus
    except InputError as error:
        assert error.hint


def square(count: int, word: Callable[[int, int], str], cpus: Callable[[int], str] = lambda gpu: "0-31") -> str:
    """The matrix of `count` GPUs whose pairs see each other as `word` says."""
    lines = ["\t".join(["", *(f"GPU{i}" for i in range(count)), "CPU Affinity"])]
    for i in range(count):
        lines.append("\t".join([f"GPU{i}", *("X" if i == j else word(min(i, j), max(i, j)) for j in range(count)), cpus(i)]))  # fmt: skip
    return "\n".join(lines) + "\n"


def ring_rate(text: str, gpu: str, size: int, stride: int) -> float:
    """What a large ring of one layout reaches on the machine of a matrix."""
    node, _ = node_from_matrix(parse_matrix(text), gpu_by_id(gpu))
    cluster = Cluster(groups=(NodeGroup(node=node, count=1),), origin="probed")
    return group_bandwidth(tiers(cluster), size, stride).ring_Bps


def test_the_numbering_of_bridged_pairs_changes_no_rate() -> None:
    """Four cards in two bridged pairs reach the same whether 0 and 1 are bridged or 0 and 2: that was 10 and 37 GB/s. The bridge is
    the narrowest cut, and the host's memory what a ring through all four waits for."""
    side, across = (
        square(4, lambda a, b, n=n: "NV4" if b - a == n and (n == 2 or a % 2 == 0) else "PHB") for n in (1, 2)
    )
    assert ring_rate(side, "rtx-3090", 4, 1) == pytest.approx(ring_rate(across, "rtx-3090", 4, 1))
    assert ring_rate(side, "rtx-3090", 2, 1) == pytest.approx(ring_rate(across, "rtx-3090", 2, 2))
    assert ring_rate(side, "rtx-3090", 2, 2) == pytest.approx(ring_rate(across, "rtx-3090", 2, 1))


def test_a_socket_border_is_paid_once() -> None:
    """Shares of links through the host are measured on whole machines, whose sockets they contain: eight cards in two sockets reach
    what eight cards in a machine of the catalogue do, or what two cards reach over the border between the sockets where that is less."""
    text = square(
        8, lambda a, b: "NODE" if a // 4 == b // 4 else "SYS", lambda gpu: f"{gpu // 4 * 32}-{gpu // 4 * 32 + 31}"
    )
    known = group_bandwidth(tiers(load_cluster("ws-8x-4090")), 8, 1).ring_Bps
    border = default_row("socket-link")["GBps"] * 1e9 * efficiency("pcie-host").share(2).ring
    assert ring_rate(text, "rtx-4090", 8, 1) == pytest.approx(min(known, border))
    assert ring_rate(text, "rtx-4090", 4, 1) > known
    assert ring_rate(text, "rtx-4090", 2, 4) < known


def test_groups_in_one_socket_share_its_memory() -> None:
    """Two groups of two cards each under one host bridge reach what four cards do, each of them alone more."""
    pairs = square(4, lambda a, b: "PHB")
    one = square(4, lambda a, b: "NV4" if (a, b) == (0, 1) else "PHB")
    assert ring_rate(one, "rtx-3090", 2, 2) == pytest.approx(ring_rate(pairs, "rtx-3090", 2, 2))
    assert ring_rate(one, "rtx-3090", 2, 1) > 1.5 * ring_rate(pairs, "rtx-3090", 2, 1)


def test_a_card_without_a_bridge_keeps_the_pair_beside_it() -> None:
    """Three cards of which two are bridged are links, not pairs, and what joins their sockets is an assumption."""
    text = square(3, lambda a, b: "NV4" if (a, b) == (0, 1) else "SYS", lambda gpu: f"{gpu // 2}")
    node, assumed = node_from_matrix(parse_matrix(text), gpu_by_id("rtx-3090"))
    assert node.topology == "none"
    assert [link.Bps for link in node.links if link.kind == "nvlink"] == [56.25e9]
    assert [said.what for said in assumed] == ["link between sockets"]


@pytest.mark.parametrize(("gpus_", "pair", "whole"), [(2, 64e9, 64e9), (4, 64e9, 192e9), (8, 64e9, 448e9)])
def test_a_part_of_an_infinity_fabric_has_a_part_of_its_links(gpus_: int, pair: float, whole: float) -> None:
    """Two MI300X have one link of 64 GB/s between them; all seven were counted."""
    node, _ = node_from_matrix(parse_matrix(square(gpus_, lambda a, b: "XGMI")), gpu_by_id("mi300x"))
    assert (node.topology, node.pair_Bps, node.intra_Bps) == ("xgmi-mesh", pair, whole)


def test_further_tables_and_names_of_ports_are_read() -> None:
    """amd-smi prints more tables below the one that is read, and ports are called `bnxt_re0` and `ionic_0` too."""
    table = text_of("amd_mi_x8_xgmi.link_type.txt")
    assert parse_matrix(f"{table}\nNUMA BW TABLE:\n   0c 3d\n0c N/A 50-50\n") == parse_matrix(table)
    text = "\tGPU0\tbnxt_re0\tionic_0\nGPU0\tX\tPIX\tSYS\nbnxt_re0\tPIX\tX\tSYS\nionic_0\tSYS\tSYS\tX\n"
    assert parse_matrix(text).nics == ("bnxt_re0", "ionic_0")
