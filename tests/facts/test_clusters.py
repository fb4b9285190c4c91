"""Names and flags become clusters; what nobody said is listed, and bounds hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.errors import InputError, StrategistError
from strategist.facts.clusters import (
    HardwareWords,
    cluster_from_flags,
    cluster_from_words,
    cpu_cluster,
    load_cluster,
    resolve_cluster,
)
from strategist.facts.gpus import gpu_by_id, gpus
from strategist.facts.hardware import Cluster, Node, NodeGroup
from strategist.facts.machines import likely_node, part_of
from strategist.facts.nodes import node_by_id, nodes
from strategist.facts.resolved import Resolved
from strategist.facts.tiers import tiers


def what(resolved: Resolved) -> set[str]:
    """What a resolved cluster assumes."""
    return {said.what for said in resolved.assumptions}


def test_names_with_counts_are_clusters() -> None:
    """NODE:COUNT is that many nodes, and a full name with a count assumes nothing."""
    for source, name, nodes_, world in (("dgx-h100:4", "dgx-h100", 4, 32), ("p4d.24xlarge:2", "aws-p4d.24xlarge", 2, 16), ("DGX H100", "dgx-h100", 1, 8)):  # fmt: skip
        resolved = resolve_cluster(source)
        group = resolved.cluster.groups[0]
        assert (group.node.name, group.count, resolved.cluster.world) == (name, nodes_, world)
        assert (resolved.cluster.origin, resolved.assumptions) == ("catalogue", ())


def test_a_gpu_name_stands_for_its_reference_node() -> None:
    """A GPU in the place of a node is taken as its reference node, which is an assumption; `a100` stays ambiguous."""
    resolved = resolve_cluster("h100-sxm-80gb:2")
    assert resolved.cluster.groups[0].node.name == "dgx-h100"
    assert what(resolved) == {"node type"}
    assert resolved.assumptions[0].value == "dgx-h100, 2 nodes of 8 devices"
    with pytest.raises(InputError) as caught:
        load_cluster("a100:2")
    assert caught.value.code == "AMBIGUOUS"


@pytest.mark.parametrize(
    ("gpu", "rate", "doubtful"),
    [("h100", 900e9, True), ("h100", 450e9, False), ("h100", 300e9, False), ("a100-sxm-80gb", 600e9, True), ("rtx-3090", 112.5e9, True),
     ("rtx-3090", 56.2e9, False), ("mi300x", 896e9, True), ("gb200", 1800e9, True)],
)  # fmt: skip
def test_the_sum_of_both_directions_is_noticed(gpu: str, rate: float, doubtful: bool) -> None:
    """Datasheets print what both directions of NVLink carry together; a rate that no direction can have was taken in silence."""
    flags = cluster_from_flags(gpu, 8 if gpu != "rtx-3090" else 2, intra_Bps=rate)
    assert any("one direction" in note for note in flags.notes) is doubtful
    file = {"nodes": [{"gpu": gpu, "gpu_count": 8 if gpu != "rtx-3090" else 2, "intra_bw": f"{rate / 1e9}GB/s"}]}
    assert resolve_cluster(file).notes == flags.notes


def test_trays_of_one_rack_need_no_network() -> None:
    """What nobody knows of the way out of a rack is asked for where a job leaves it."""
    assert load_cluster("p6e-gb300.36xlarge:18").world == 72
    with pytest.raises(StrategistError) as caught:
        load_cluster("p6e-gb300.36xlarge:19")
    assert caught.value.code == "NO_PATH"


@pytest.mark.parametrize("said", ["gb200-nvl72", "DGX GB200 NVL72", "dgx-gb200-nvl72:1"])
def test_a_rack_is_all_of_its_trays(said: str) -> None:
    """An NVL72 is 72 GPUs in one domain of NVLink, which launchers see as 18 nodes; it was taken for one tray of four."""
    resolved = resolve_cluster(said)
    assert (resolved.cluster.nodes, resolved.cluster.world, what(resolved)) == (18, 72, {"nodes"})
    assert [tier.span for tier in tiers(resolved.cluster)] == [72]
    assert [tier.span for tier in tiers(load_cluster("gb300-nvl72:3"))] == [72, 216]
    assert load_cluster("dgx-gb200-nvl72-tray").world == 4
    with pytest.raises(InputError) as caught:
        load_cluster("gb200-nvl72:100000")
    assert caught.value.code == "TOO_LARGE"


def test_nothing_said_is_the_reference_machine() -> None:
    """Without any source the reference machine is assumed, and the cluster says so."""
    resolved = resolve_cluster(None)
    assert resolved.cluster.origin == "assumed"
    assert what(resolved) == {"hardware"}


def test_a_cluster_stays_itself() -> None:
    """A cluster given as a cluster is returned unchanged, with nothing assumed."""
    cluster = load_cluster("dgx-h100:2")
    assert load_cluster(cluster) is cluster
    assert resolve_cluster(cluster).assumptions == ()


def test_cpu_ranks_share_one_machine() -> None:
    """cpu:RANKS is one node of that many cores which share the memory; gloo's measured rates join them."""
    four = load_cluster("cpu:4")
    assert (four.nodes, four.world, four.groups[0].node.topology) == (1, 4, "memory")
    assert four.smallest.memory_bytes == load_cluster("cpu").smallest.memory_bytes // 4
    assert four.smallest.basis == "measured"
    assert cpu_cluster(2, memory_bytes=2**34).cluster.smallest.memory_bytes == 2**33
    assert "host memory" not in what(cpu_cluster(2, memory_bytes=2**34))


@pytest.mark.parametrize(
    ("source", "code", "exit_code"),
    [("dgx-h100:0", "TOO_SMALL", 2), ("dgx-h100:131073", "TOO_LARGE", 2), ("dgx-h100:-1", "NEGATIVE", 2),
     ("dgx-h100:1.5", "INTEGER", 2), ("dgx-h100:", "EMPTY", 2), ("dgx-h100:4:4", "PARSE", 2), ("dgx-h100:4;8", "PARSE", 2),
     ("cpu:0", "TOO_SMALL", 2), ("cpu:1025", "TOO_LARGE", 2), ("nosuchnode", "UNKNOWN_NODE", 2), ("", "EMPTY", 2),
     ("dgx-h100\x00", "CONTROL_CHAR", 2), ("rtx-4080", "UNKNOWN_NODE", 2), ("dgx", "AMBIGUOUS", 2),
     ("oci-bm.gpu.rtxpro.8:2", "NO_PATH", 3)],
)  # fmt: skip
def test_bad_names_and_counts_are_refused(source: str, code: str, exit_code: int) -> None:
    """Counts outside 1..131072 and names of nothing are refused with their code."""
    with pytest.raises(StrategistError) as caught:
        load_cluster(source)
    assert (caught.value.code, caught.value.exit_code) == (code, exit_code)
    assert caught.value.hint


def test_the_largest_cluster_is_quick() -> None:
    """131072 nodes are one group, whatever their number."""
    cluster = load_cluster("dgx-h100:131072")
    assert (cluster.world, len(cluster.groups), tiers(cluster)[-1].span) == (1048576, 1, 1048576)


def test_flags_take_the_reference_node_and_say_so() -> None:
    """Flags without rates use the reference node of GPU and count, each borrowed fact is an assumption with its flag."""
    resolved = cluster_from_flags("h100", 8, 4)
    node = resolved.cluster.groups[0].node
    assert (node.name, node.intra_Bps, node.inter_Bps, resolved.cluster.origin) == ("dgx-h100", 450e9, 400e9, "flags")
    flags = {said.what: said.flag for said in resolved.assumptions}
    assert flags == {"GPU": "--gpu", "links inside a node": "--intra-bw", "network between nodes": "--inter-bw", "host memory of a node": "--hardware"}  # fmt: skip


def test_stated_rates_replace_facts_and_are_no_assumptions() -> None:
    """A stated figure stands in the node, in its source and its basis, and not among the assumptions."""
    resolved = cluster_from_flags("h100-sxm-80gb", 8, 4, gpu_memory_bytes=64 * 2**30, intra_Bps=200e9, inter_Bps=50e9)
    node = resolved.cluster.groups[0].node
    assert (node.gpu.memory_bytes, node.intra_Bps, node.inter_Bps) == (64 * 2**30, 200e9, 50e9)
    assert (node.basis, node.gpu.basis) == ("assumed", "assumed")
    assert "--intra-bw and --inter-bw" in node.source
    assert "--gpu-memory" in node.gpu.source
    assert what(resolved) == {"host memory of a node"}
    assert [tier.device_Bps for tier in tiers(resolved.cluster)] == [200e9, 50e9 / 8]


def test_a_number_behind_a_device_is_told_where_it_belongs() -> None:
    """As nodes are counted in --hardware; the hint writes the device alone."""
    with pytest.raises(InputError) as caught:
        cluster_from_flags("mi300x:16")
    assert caught.value.code == "PARSE"
    assert "--gpu mi300x, with --gpus-per-node" in str(caught.value.hint)


def test_a_single_node_assumes_no_network() -> None:
    """With one node nothing is assumed about a network, and with one GPU nothing about links."""
    assert "network between nodes" not in what(cluster_from_flags("rtx-4090", 4, 1))
    assert "links inside a node" not in what(cluster_from_flags("rtx-4090", 1, 1))


def test_counts_left_out_are_assumed() -> None:
    """Without counts the reference node's GPUs and one node are taken, and listed."""
    resolved = cluster_from_flags("mi300x")
    assert (resolved.cluster.world, resolved.cluster.nodes) == (8, 1)
    assert {"GPUs per node", "nodes"} <= what(resolved)


def test_scaled_overrides_reach_unequal_links() -> None:
    """A stated rate inside a mesh of unequal links scales every one of them."""
    plain = cluster_from_flags("v100-sxm2-32gb", 8, 1).cluster.groups[0].node
    doubled = cluster_from_flags("v100-sxm2-32gb", 8, 1, intra_Bps=2 * plain.intra_Bps).cluster.groups[0].node
    assert [link.Bps for link in doubled.links] == [2 * link.Bps for link in plain.links]


@given(st.sampled_from([node.name for node in nodes()]), st.integers(1, 16))
def test_a_part_of_a_node_is_no_better_than_the_node(name: str, gpus_: int) -> None:
    """The first GPUs of a node have at most its rates, memory and ports, and tiers of their own."""
    whole = node_by_id(name)
    part = part_of(whole, min(gpus_, whole.gpus))
    assert part.gpus == min(gpus_, whole.gpus)
    assert part.intra_Bps <= whole.intra_Bps
    assert part.inter_Bps <= whole.inter_Bps
    assert (part.nvme_read_Bps or 0.0) * whole.gpus == pytest.approx((whole.nvme_read_Bps or 0.0) * part.gpus)
    alone = Cluster(groups=(NodeGroup(node=part, count=1),), origin="flags")
    assert part.gpus == 1 or tiers(alone)[-1].span == part.gpus


@pytest.mark.parametrize("gpu", [gpu.name for gpu in gpus() if gpu.vendor in ("NVIDIA", "AMD") and gpu.host_Bps])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 16, 1024])
def test_every_card_makes_a_node_of_every_size(gpu: str, count: int) -> None:
    """Any card and count gives a node whose tiers span it, from the catalogue or the card's own facts."""
    cluster = cluster_from_flags(gpu, count, 2).cluster
    assert tiers(cluster)[-1].span == 2 * count
    assert all(tier.device_Bps > 0 for tier in tiers(cluster))


def likely_node_of(gpu: str, count: int) -> Node:
    """The node that stands for some cards."""
    return likely_node(gpu_by_id(gpu), count)


def test_unknown_machines_are_built_from_the_card() -> None:
    """A card in no node of the catalogue keeps its own links: a switch for SXM cards, the host for PCIe cards."""
    assert (likely_node_of("a800-sxm-80gb", 8).topology, likely_node_of("rtx-4080", 4).topology) == ("nvswitch", "pcie-host")  # fmt: skip
    assert likely_node_of("h100-sxm-80gb", 16).fast_domain == 8
    assert likely_node_of("mi100", 4).topology == "xgmi-mesh"
    assert likely_node_of("h100-sxm-80gb", 7).name == "7-of-dgx-h100"


@pytest.mark.parametrize(
    ("gpu", "count", "name", "pair"),
    [("h100-sxm-80gb", 2, "2-of-dgx-h100", 450e9), ("h100-sxm-80gb", 4, "hgx-h100-4", 150e9), ("a100-sxm-80gb", 1, "1-of-dgx-a100-80gb", 300e9),
     ("a100-sxm-40gb", 4, "hgx-a100-4-40gb", 100e9), ("gh200-96gb", 4, "gh200-quad", 150e9), ("rtx-4090", 3, "3-of-ws-4x-4090", 31.5e9)],
)  # fmt: skip
def test_a_few_cards_are_a_part_of_their_usual_node(gpu: str, count: int, name: str, pair: float) -> None:
    """Two H100 are what clouds cut from a machine of eight, whose switch gives each all of its links; they were two of a board of four."""
    node = likely_node_of(gpu, count)
    assert (node.name, node.pair_Bps) == (name, pair)


def test_a_rack_told_as_one_node_is_one_domain() -> None:
    """72 GB200 said as one node had NVLink in domains of eight and PCIe between these."""
    assert [tier.span for tier in tiers(cluster_from_flags("gb200", 72, 1).cluster)] == [72]
    assert [tier.span for tier in tiers(cluster_from_flags("gb300", 36, 2).cluster)] == [36, 72]


def test_reference_prices_are_not_assumed() -> None:
    """A node that was only guessed has no price; one that was named keeps it."""
    assert cluster_from_flags("a10g", 4, 1).cluster.groups[0].node.price_per_hour is None
    assert load_cluster("aws-g5.12xlarge").groups[0].node.price_per_hour is not None


@pytest.mark.parametrize(
    ("flags", "code"),
    [({"gpus_per_node": 0}, "TOO_SMALL"), ({"gpus_per_node": 1025}, "TOO_LARGE"), ({"gpus_per_node": True}, "TYPE"),
     ({"gpus_per_node": 8.0}, "TYPE"), ({"nodes": 131073}, "TOO_LARGE"), ({"nodes": -4}, "NEGATIVE"),
     ({"gpu_memory_bytes": 17 * 2**40}, "TOO_LARGE"), ({"gpu_memory_bytes": 0}, "TOO_SMALL"),
     ({"inter_Bps": float("nan")}, "NOT_FINITE"), ({"inter_Bps": -1.0}, "NEGATIVE"), ({"intra_Bps": 0.0}, "TOO_SMALL"), ({"intra_Bps": 999999.0}, "TOO_SMALL"), ({"intra_Bps": 1e16}, "TOO_LARGE")],
)  # fmt: skip
def test_figures_out_of_bounds_are_refused(flags: dict[str, object], code: str) -> None:
    """Counts, memory and rates outside their bounds, and numbers of another type, are refused."""
    with pytest.raises(InputError) as caught:
        cluster_from_flags("h100-sxm-80gb", **({"gpus_per_node": 8, "nodes": 2} | flags))  # type: ignore[arg-type]
    assert caught.value.code == code


def test_typed_words_equal_parsed_figures() -> None:
    """The words of the command line give the cluster of their figures; 80GB equals its bytes, 400Gb/s equals 50GB/s."""
    words = HardwareWords(gpu="h100", gpus_per_node="8", nodes="4", gpu_memory="80GB", intra_bw="450GB/s", inter_bw="3200Gb/s")  # fmt: skip
    figures = cluster_from_flags("h100", 8, 4, gpu_memory_bytes=80 * 10**9, intra_Bps=450e9, inter_Bps=400e9)
    assert cluster_from_words(words) == figures


def test_paths_are_files(tmp_path: Path) -> None:
    """A path, an ending of a hardware file, or the name of an existing file is read as one."""
    file = tmp_path / "machines.toml"
    file.write_text('gpu = "h100-sxm-80gb"\ngpus_per_node = 8\nnodes = 2\n')
    assert load_cluster(file).world == load_cluster(str(file)).world == 16
    assert load_cluster({"gpu": "h100-sxm-80gb", "gpus_per_node": 8, "nodes": 2}).world == 16
    with pytest.raises(InputError) as caught:
        load_cluster("missing.json")
    assert caught.value.code == "FILE_NOT_FOUND"


@given(st.text(max_size=30))
def test_no_text_breaks_loading(text: str) -> None:
    """Any text is a cluster or an error of ours; what asks this machine or its standard input is left out."""
    if text.strip(" ").lower() in ("local", "-"):
        return
    try:
        load_cluster(text)
    except StrategistError as error:
        assert error.exit_code in (2, 3)
