"""Hardware files: both forms, every bad input with its code, and the wiring checks."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.errors import ImpossibleError, InputError, StaleError, StrategistError
from strategist.facts.clusters import HardwareWords, cluster_from_words, load_cluster, resolve_cluster
from strategist.facts.groups import group_bandwidth
from strategist.facts.hardware_file import cluster_from_document
from strategist.facts.tiers import tiers
from tests.cli.harness import call
from tests.examples import examples

ROOT = Path(__file__).parents[2]
TWO_PAIRS = [{"a": "gpu0", "b": "gpu1", "kind": "nvlink", "bw": "50GB/s"}, {"a": "gpu2", "b": "gpu3", "kind": "nvlink", "bw": "50GB/s"}]  # fmt: skip


OWN = {"name": "mine", "memory": "80GB", "memory_bw": "1TB/s", "bf16_TFLOPs": 100}


def node(**keys: Any) -> dict[str, Any]:
    """A described node of two H100s."""
    return {"gpu": "h100-sxm-80gb", "gpu_count": 2} | keys


def written(folder: Path, name: str, content: str | bytes) -> str:
    """The path of a file with this content."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def of_words(**words: str) -> Callable[[Path], Any]:
    """A case of the flags."""
    return lambda folder: cluster_from_words(HardwareWords(**({"gpu": "h100-sxm-80gb"} | words)))


def of_file(name: str, content: str | bytes) -> Callable[[Path], Any]:
    """A case of a file's content."""
    return lambda folder: load_cluster(written(folder, name, content))


def fifo(folder: Path) -> Any:
    """A pipe nobody writes to."""
    os.mkfifo(folder / "pipe.json")
    return load_cluster(str(folder / "pipe.json"))


def same_memory(folder: Path) -> Any:
    """80e9 bytes, written in two units."""
    decimal = cluster_from_words(HardwareWords(gpu="h100-sxm-80gb", gpus_per_node="8", gpu_memory="80GB"))
    binary = cluster_from_words(HardwareWords(gpu="h100-sxm-80gb", gpus_per_node="8", gpu_memory="74.505805969238281250GiB"))  # fmt: skip
    assert decimal == binary


FLAT = '{"gpu": "h100-sxm-80gb", "gpus_per_node": 8, "nodes": 2}'
ALIASES = "a: &a [x, x]\n" + "".join(f"{c}: &{c} [*{p}, *{p}, *{p}, *{p}, *{p}, *{p}, *{p}, *{p}]\n" for p, c in zip("abcdef", "bcdefg", strict=True))  # fmt: skip

CASES: dict[tuple[str, str], Callable[[Path], Any]] = {
    ("--gpus-per-node", "0"): of_words(gpus_per_node="0"),
    ("--gpus-per-node", "1.5"): of_words(gpus_per_node="1.5"),
    ("--gpus-per-node", "8.0"): of_words(gpus_per_node="8.0"),
    ("--gpus-per-node", "1e3"): of_words(gpus_per_node="1e3"),
    ("--gpus-per-node", "1025"): of_words(gpus_per_node="1025"),
    ("--gpus-per-node", "7"): of_words(gpus_per_node="7"),
    ("--gpus-per-node", "1"): of_words(gpus_per_node="1"),
    ("--nodes", "-4"): of_words(nodes="-4"),
    ("--nodes", "1000000000"): of_words(nodes="1000000000"),
    ("--nodes", "4;8"): of_words(nodes="4;8"),
    ("--nodes", "1:4"): of_words(nodes="1:4"),
    ("--gpu", "a100"): of_words(gpu="a100"),
    ("--gpu", "h100"): of_words(gpu="h100"),
    ("--gpu", ""): of_words(gpu=""),
    ("--gpu", "rtx 4090"): of_words(gpu="rtx 4090"),
    ("--gpu", "mi300x"): of_words(gpu="mi300x"),
    ("--gpu", "h100\\x1b[2J"): of_words(gpu="h100\x1b[2J"),
    ("--gpu-memory", "80"): of_words(gpu_memory="80"),
    ("--gpu-memory", "80Gb"): of_words(gpu_memory="80Gb"),
    ("--gpu-memory", "-80GiB"): of_words(gpu_memory="-80GiB"),
    ("--gpu-memory", "80GB vs 74.5GiB"): same_memory,
    ("--inter-bw", "400"): of_words(inter_bw="400"),
    ("--inter-bw", "400Gb/s"): of_words(inter_bw="400Gb/s"),
    ("--inter-bw", "nan"): of_words(inter_bw="nan"),
    ("--inter-bw", "-1GB/s"): of_words(inter_bw="-1GB/s"),
    ("--hardware", "missing.json"): lambda folder: load_cluster("missing.json"),
    ("--hardware", "a directory"): lambda folder: load_cluster(str(folder)),
    ("--hardware", "/dev/zero"): lambda folder: load_cluster("/dev/zero"),
    ("--hardware", "a FIFO with no writer"): fifo,
    ("--hardware", "truncated JSON"): of_file("a.json", FLAT[:-9]),
    ("--hardware", "JSON with NaN"): of_file("a.json", '{"nodes": [{"gpu_count": NaN}]}'),
    ("--hardware", "JSON with duplicate key gpus"): of_file(
        "a.json", '{"gpus": [], "gpus": [], "gpu": "h100-sxm-80gb"}'
    ),
    ("--hardware", "JSON nested 200000 deep"): of_file("a.json", "[" * 200_000),
    ("--hardware", "UTF-16 file"): of_file("a.json", FLAT.encode("utf-16")),
    ("--hardware", "UTF-8 with BOM"): of_file("a.json", b"\xef\xbb\xbf" + FLAT.encode()),
    ("--hardware", 'gpu_count: "8" (string)'): of_file("a.json", '{"nodes": [{"gpu_count": "8"}]}'),
    ("--hardware", "gpu_count: true"): of_file("a.json", '{"nodes": [{"gpu_count": true}]}'),
    ("--hardware", "link to a GPU id that does not exist"): of_file(
        "a.json", json.dumps({"nodes": [node(links=[{"a": "gpu0", "b": "gpu9"}])]})
    ),
    ("--hardware", "disconnected node graph"): of_file(
        "a.json", json.dumps({"nodes": [node(gpu_count=4, links=TWO_PAIRS)]})
    ),
    ("--hardware", "YAML: !!python/object/apply:os.system"): of_file(
        "a.yaml", "nodes: !!python/object/apply:os.system ['touch /tmp/never']"
    ),
    ("--hardware", "YAML alias bomb (330 bytes expanding to 52 MB as JSON)"): of_file("a.yaml", ALIASES),
    ("--hardware", "YAML nodes: 010"): of_file("a.yaml", "gpu: h100-sxm-80gb\nnodes: 010\n"),
    ("--hardware", "YAML duplicate key"): of_file("a.yaml", "gpu: h100-sxm-80gb\nnodes: 1\nnodes: 2\n"),
}


def listed() -> list[dict[str, str]]:
    """The rows of the corpus that describe machines."""
    flags = {flag for flag, _ in CASES}
    with open(ROOT / "tests/data/bad_inputs.csv", encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["flag"] in flags]


def test_every_listed_input_has_a_case() -> None:
    """No row of the list is left out, and no case is invented."""
    assert {(row["flag"], row["value"]) for row in listed()} == set(CASES)


@pytest.mark.parametrize("row", listed(), ids=lambda row: f"{row['flag']} {row['value']}")
def test_listed_inputs_end_as_listed(row: dict[str, str], tmp_path: Path) -> None:
    """Each listed input is accepted or ends with its exit code and error code, and with a hint."""
    wanted = re.search(r"exit=(\d)(?:; code=E_(\w+))?", row["expected"])
    assert wanted is not None
    try:
        CASES[row["flag"], row["value"]](tmp_path)
        outcome: tuple[int, str | None] = (0, None)
    except StrategistError as error:
        outcome = (error.exit_code, error.code)
        assert error.hint
        assert "\x1b" not in error.message
    assert outcome == (int(wanted[1]), wanted[2])


def refused(document: Any) -> StrategistError:
    """The error that a document ends with."""
    with pytest.raises(StrategistError) as caught:
        cluster_from_document(document)
    return caught.value


@pytest.mark.parametrize("count", ["8", True, 8.5, None, [8]])
def test_a_wrong_type_wins_over_what_is_missing(count: Any) -> None:
    """A wrong type is told with its path, whatever else is missing or unknown in the same file."""
    error = refused({"nodes": [{"gpu_count": count, "colour": "green"}], "shelf": 3})
    if count is None:
        assert error.code in ("UNKNOWN_KEY", "MISSING")
    else:
        assert (error.code, error.flag) == ("TYPE", "$.nodes[0].gpu_count")


def test_unknown_keys_come_with_near_ones() -> None:
    """An unknown key is named with its path and the nearest known key."""
    error = refused({"nodes": [node(gpu_cuont=2)]})
    assert (error.code, error.flag) == ("UNKNOWN_KEY", "$.nodes[0].gpu_cuont")
    assert "Did you mean gpu_count" in str(error.hint)
    assert " gpu_count," in str(
        refused({"nodes": [node(gpus_per_node=2)]}).hint
    )  # the flag's word: the list of keys has the file's
    assert refused({"gpu": "h100-sxm-80gb", "gpus_per_nod": 8}).code == "UNKNOWN_KEY"


def test_links_that_lead_nowhere_are_told_first() -> None:
    """A link to a missing GPU, NIC, word or node names the dangling end, even when keys are missing or unknown."""
    for links, end in (
        ([{"a": "gpu0", "b": "gpu2", "kind": "nvlink", "bw": "1GB/s"}], "gpu2"),
        ([{"a": "gpu0", "b": "gpu7"}], "gpu7"),
        ([{"a": "gpu0", "b": "toaster0", "kind": "nvlink", "bw": "1GB/s"}], "toaster0"),
        ([{"a": "gpu0", "b": "gpu1"}, {"a": "gpu1", "b": "gpu01"}], "gpu01"),
    ):
        error = refused({"nodes": [node(links=links)], "unknown": 1})
        assert (error.code, error.exit_code) == ("TOPOLOGY", 2)
        assert end in error.message
    error = refused({"nodes": [node(name="a"), node(name="b")], "links": [{"a": "a", "b": "c", "kind": "roce", "bw": "1GB/s"}]})  # fmt: skip
    assert (error.code, "c" in error.message) == ("TOPOLOGY", True)
    assert refused({"nodes": [node(nics=1, links=[{"a": "gpu0", "b": "nic1"}])]}).code == "TOPOLOGY"
    assert refused({"nodes": [node(links=[{"a": "gpu0", "b": "gpu0"}])]}).code == "TOPOLOGY"


def test_islands_name_both_sides() -> None:
    """Devices or nodes that nothing connects are impossible, and one member of each island is named."""
    inside = refused({"nodes": [node(gpu_count=4, links=TWO_PAIRS)]})
    assert isinstance(inside, ImpossibleError)
    assert (inside.code, inside.exit_code) == ("NO_PATH", 3)
    assert "gpu0, gpu1" in inside.message
    assert "gpu2, gpu3" in inside.message
    between = refused({"nodes": [node(name=n) for n in "abc"], "links": [{"a": "a", "b": "b", "kind": "roce", "bw": "50GB/s"}]})  # fmt: skip
    assert (between.code, "c" in between.message) == ("NO_PATH", True)


def test_the_flat_form_equals_the_flags() -> None:
    """The flat form gives the nodes that the same words give as flags."""
    words = {"gpu": "h100", "gpu_memory": "80GB", "intra_bw": "450GB/s", "inter_bw": "3200Gb/s"}
    flags = cluster_from_words(HardwareWords(gpus_per_node="8", nodes="4", **words)).cluster
    file = cluster_from_document(words | {"gpus_per_node": 8, "nodes": 4}).cluster
    assert file.origin == "file"
    assert [(t.name, t.span, t.device_Bps) for t in tiers(file)] == [(t.name, t.span, t.device_Bps) for t in tiers(flags)]  # fmt: skip
    assert file.smallest.memory_bytes == flags.smallest.memory_bytes == 80 * 10**9


def test_json_yaml_and_toml_say_the_same(tmp_path: Path) -> None:
    """One description in three languages gives one cluster."""
    as_json = written(tmp_path, "a.json", '{"nodes": [{"gpu": "mi300x", "gpu_count": 8, "count": 2, "inter_bw": "3200Gb/s"}]}')  # fmt: skip
    as_yaml = written(tmp_path, "a.yaml", "nodes:\n- gpu: mi300x\n  gpu_count: 8\n  count: 2\n  inter_bw: 3200Gb/s\n")
    as_toml = written(
        tmp_path, "a.toml", '[[nodes]]\ngpu = "mi300x"\ngpu_count = 8\ncount = 2\ninter_bw = "3200Gb/s"\n'
    )
    assert load_cluster(as_json) == load_cluster(as_yaml) == load_cluster(as_toml)


def test_custom_gpus_equal_catalogue_rows_of_the_same_figures() -> None:
    """A described GPU with a catalogue card's figures has its memory, rates and tiers."""
    described = {"name": "my-h100", "memory": "81559MiB", "memory_bw": "3352GB/s", "bf16_TFLOPs": 989.4, "host_bw": "63GB/s", "scale_up_bw": "450GB/s", "arch": "Hopper"}  # fmt: skip
    shape = {"gpu_count": 8, "count": 2, "topology": "nvswitch", "intra_bw": "450GB/s", "inter_bw": "400GB/s", "fabric": "IB NDR"}  # fmt: skip
    own = cluster_from_document({"gpus": [described], "nodes": [shape | {"gpu": "my-h100"}]}).cluster
    known = cluster_from_document({"nodes": [shape | {"gpu": "h100-sxm-80gb"}]}).cluster
    assert own.smallest.memory_bytes == known.smallest.memory_bytes
    assert own.smallest.bf16_FLOPs == known.smallest.bf16_FLOPs
    assert [(t.kind, t.span, t.device_Bps, t.shares, t.hop_s) for t in tiers(own)] == [(t.kind, t.span, t.device_Bps, t.shares, t.hop_s) for t in tiers(known)]  # fmt: skip


@pytest.mark.parametrize("names", [("g0", "g1", "g2"), ("alpha", "beta", "gamma"), ("a0", "b", "a1")])
def test_alike_nodes_are_one_kind_however_they_are_listed(names: tuple[str, ...]) -> None:
    """Nodes that a file lists by their names one by one make the cluster, the tiers and the assumptions of as many in one entry, of which
    nobody is told that one kind alone is slower; another node between them makes two kinds."""
    one = cluster_from_document({"nodes": [node(name="g", count=3)]})
    listed = cluster_from_document({"nodes": [node(name=name) for name in names]})
    assert [(group.count, group.node.gpus) for group in listed.cluster.groups] == [(3, 2)]
    assert (tiers(listed.cluster), listed.assumptions) == (tiers(one.cluster), one.assumptions)
    other = [node(name=names[0]), node(name="x", gpu="a100-sxm-80gb"), *(node(name=name) for name in names[1:])]
    assert [group.count for group in cluster_from_document({"nodes": other}).cluster.groups] == [3, 1]


def test_nodes_that_differ_or_are_wired_one_by_one_stay_apart() -> None:
    """A rate, a link to a switch, or a rack of their own are what makes nodes listed apart other than nodes listed together."""
    slower = cluster_from_document({"nodes": [node(name="a"), node(name="b", inter_bw="1GB/s")]}).cluster
    wires = [{"a": name, "b": "leaf", "kind": "roce", "bw": "1GB/s"} for name in "ab"]
    wired = cluster_from_document({"nodes": [node(name="a"), node(name="b")], "switches": ["leaf"], "links": wires})
    trays = cluster_from_document({"nodes": [{"gpu": "gb200", "gpu_count": 4, "count": 9}] * 2}).cluster
    for cluster in (slower, wired.cluster, trays):
        assert len(cluster.groups) == 2


def test_described_links_give_their_rates() -> None:
    """A pair over NVLink in a host of four: the pair gets its bridge, all four the root."""
    host = [{"a": f"gpu{i}", "b": "root0", "kind": "pcie-host", "bw": "25GB/s"} for i in range(4)]
    cluster = cluster_from_document({"nodes": [{"gpu": "rtx-3090", "gpu_count": 4, "links": TWO_PAIRS + host}]}).cluster
    found = tiers(cluster)
    assert group_bandwidth(found, 2, 1).Bps == 50e9
    assert group_bandwidth(found, 2, 2).Bps == 25e9
    assert group_bandwidth(found, 4, 1).Bps == 50e9


def test_a_link_with_the_name_of_an_entry_means_all_its_nodes() -> None:
    """`a` joined to a switch joins a0 and a1; the switches joined by a thin link share it."""
    document = {
        "nodes": [{"name": "a", "gpu": "h100-sxm-80gb", "gpu_count": 8, "count": 2}, {"name": "b", "gpu": "h100-sxm-80gb", "gpu_count": 8, "count": 2}],
        "switches": ["leaf0", "leaf1"],
        "links": [{"a": "a", "b": "leaf0", "kind": "infiniband", "bw": "400GB/s"}, {"a": "b", "b": "leaf1", "kind": "infiniband", "bw": "400GB/s"}, {"a": "leaf0", "b": "leaf1", "kind": "infiniband", "bw": "200GB/s"}],
    }  # fmt: skip
    found = tiers(cluster_from_document(document).cluster)
    assert (group_bandwidth(found, 2, 8).Bps, group_bandwidth(found, 2, 16).Bps) == (50e9, 200e9 / 16)


def test_stated_topologies_take_the_cards_rates() -> None:
    """A topology without a rate takes the card's own; where the card is silent the rate must be given."""
    pcie = cluster_from_document({"nodes": [node(topology="pcie-switch")]}).cluster.groups[0].node
    assert (pcie.topology, pcie.intra_Bps) == ("pcie-switch", 63e9)
    meshed = cluster_from_document({"nodes": [node(gpu_count=4, topology="nvlink-mesh", pair_bw="100GB/s")]}).cluster.groups[0].node  # fmt: skip
    assert meshed.intra_Bps == 300e9
    assert refused({"nodes": [{"gpu": "gb10-dgx-spark", "gpu_count": 2, "topology": "pcie-host"}]}).code == "MISSING"


def test_what_a_file_leaves_out_is_listed() -> None:
    """A bare entry assumes links and network with the paths of the keys that would say them; a full one does not."""
    bare = cluster_from_document({"nodes": [node(gpu_count=8, count=2)]})
    assert {said.flag for said in bare.assumptions} >= {"$.nodes[0].intra_bw", "$.nodes[0].inter_bw"}
    full = cluster_from_document({"nodes": [node(gpu_count=8, count=2, topology="nvswitch", intra_bw="450GB/s", inter_bw="400GB/s", ram="2TB")]})  # fmt: skip
    assert full.assumptions == ()


@pytest.mark.parametrize(
    ("document", "code"),
    [
        ([], "TYPE"), ("text", "TYPE"), ({}, "MISSING"), ({"nodes": []}, "TOO_SMALL"), ({"nodes": 4}, "MISSING"),
        ({"nodes": [node(count=0)]}, "TOO_SMALL"), ({"nodes": [node(count=131073)]}, "TOO_LARGE"),
        ({"nodes": [node(count=131072), node()]}, "TOO_LARGE"), ({"nodes": [node(gpu_count=-1)]}, "NEGATIVE"),
        ({"nodes": [node(gpu="h1000")]}, "UNKNOWN_GPU"), ({"nodes": [node(gpu="a100")]}, "AMBIGUOUS"),
        ({"nodes": [node(intra_bw="450")]}, "UNIT"), ({"nodes": [node(inter_bw="fast")]}, "PARSE"),
        ({"nodes": [node(intra_bw="999KB/s")]}, "TOO_SMALL"), ({"nodes": [node(inter_bw="1Mb/s")]}, "TOO_SMALL"),
        ({"nodes": [node(gpu_memory="80Gb")]}, "UNIT"), ({"nodes": [node(gpu_memory="17TiB")]}, "TOO_LARGE"),
        ({"nodes": [node(topology="string")]}, "CHOICE"), ({"nodes": [node(name="a b")]}, "NAME"),
        ({"nodes": [node(name="a\x1b")]}, "CONTROL_CHAR"), ({"nodes": [node(name="a"), node(name="a")]}, "CONFLICT"),
        ({"nodes": [node()], "oversubscription": 0.5}, "RANGE"), ({"nodes": [node()], "format": "strategist-plan/1"}, "KIND"),
        ({"nodes": [node(name="a"), node(name="b")], "oversubscription": 2.0, "links": [{"a": "a", "b": "b", "kind": "roce", "bw": "1GB/s"}]}, "CONFLICT"),
        ({"nodes": [node()], "gpus": [{"name": "x", "memory": "80GB", "memory_bw": "1TB/s"}]}, "MISSING"),
        ({"nodes": [node()], "gpus": [OWN | {"name": "H100 SXM 80GB".replace(" ", "-")}]}, "CONFLICT"),
        ({"nodes": [node()], "gpus": [OWN, OWN | {"memory": "40GB"}]}, "CONFLICT"),
    ],
)  # fmt: skip
def test_other_mistakes_have_their_codes(document: Any, code: str) -> None:
    """Each mistake in a document ends with its own code and a hint."""
    error = refused(document)
    assert (error.code, bool(error.hint)) == (code, True)


MATRIX = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\tX\tNV4\t0-7\nGPU1\tNV4\tX\t0-7\n"


def test_a_node_may_have_the_matrix_of_its_machine(tmp_path: Path) -> None:
    """The text, or the name of a file beside the description, says how GPUs are joined and how many there are; the rest stays assumed."""
    inside = cluster_from_document({"nodes": [{"gpu": "rtx-3090", "count": 2, "matrix": MATRIX}]})
    built = inside.cluster.groups[0].node
    assert (built.gpus, built.topology, built.intra_Bps) == (2, "nvlink-pairs", 56.25e9)
    assert {said.what for said in inside.assumptions} == {"network between nodes", "host memory of a node"}
    written(tmp_path, "topo.txt", MATRIX)
    beside = written(tmp_path, "machines.yaml", "nodes:\n  - {gpu: rtx-3090, count: 2, matrix: topo.txt}\n")
    assert load_cluster(beside) == inside.cluster
    tray = cluster_from_document({"nodes": [{"gpu": "gb200", "count": 2, "matrix": MATRIX.replace("NV4", "NV18")}]})
    assert [tier.span for tier in tiers(tray.cluster)] == [4]


@pytest.mark.parametrize(
    ("keys", "code"),
    [({"gpu_count": 4}, "CONFLICT"), ({"topology": "nvswitch"}, "CONFLICT"), ({"links": TWO_PAIRS[:1]}, "CONFLICT"), ({"intra_bw": "50GB/s"}, "CONFLICT"),
     ({"matrix": "GPU0 GPU1"}, "PARSE"), ({"matrix": ""}, "PARSE"), ({"gpu": "rtx-4090"}, "HARDWARE_FEATURE"), ({"matrix": 4}, "TYPE")],
)  # fmt: skip
def test_a_matrix_beside_other_words_is_refused(keys: dict[str, Any], code: str) -> None:
    """What contradicts a matrix, or cannot be read as one, is an error with its own code."""
    assert refused({"nodes": [{"gpu": "rtx-3090", "matrix": MATRIX} | keys]}).code == code


def test_a_matrix_alone_is_no_machine(tmp_path: Path) -> None:
    """The output of `nvidia-smi topo -m` in place of a hardware file was refused as bad JSON; now the sentence says where it belongs."""
    with pytest.raises(InputError) as caught:
        load_cluster(written(tmp_path, "topo.txt", MATRIX))
    assert (caught.value.code, "`matrix`" in str(caught.value.hint)) == ("KIND", True)
    missing = written(tmp_path, "machines.yaml", "nodes:\n  - {gpu: rtx-3090, matrix: nothing.txt}\n")
    with pytest.raises(StrategistError) as lost:
        load_cluster(missing)
    assert lost.value.flag == "$.nodes[0].matrix"


CARDS = "".join(
    f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-5fd4f087-86f3-7a43-b711-4771313afc5{i})\n" for i in range(8)
)


@pytest.mark.parametrize(
    ("text", "hint"),
    [("node01 slots=8\n# spare\nnode02 slots=8 max_slots=8\n", "--gpu NAME --gpus-per-node 8 --nodes 2"), ("a:4\nb:4\nc:4\n", "--gpus-per-node 4 --nodes 3"),
     ("a slots=8\nb slots=4\n", "each kind as a node"), (CARDS, '--gpu "NVIDIA H100 80GB HBM3" --gpus-per-node 8'),
     (CARDS.replace("H100 80GB HBM3", "L4", 1), "each kind as a node"), (CARDS + "  MIG 1g.10gb     Device  0: (UUID: MIG-c6d4)\n", "--gpu-memory")],
)  # fmt: skip
def test_listings_of_other_tools_are_told_what_to_say(text: str, hint: str, tmp_path: Path) -> None:
    """A file of hosts, or the output of `nvidia-smi -L`, was refused as bad JSON; its hint now holds the flags that say the same."""
    with pytest.raises(InputError) as caught:
        load_cluster(written(tmp_path, "listing.txt", text))
    assert (caught.value.code, hint in str(caught.value.hint)) == ("KIND", True)


def test_other_versions_are_stale() -> None:
    """A file of a later format is stale, not misread."""
    assert isinstance(refused({"format": "strategist-hardware/2", "nodes": [node()]}), StaleError)


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["h100-sxm-80gb", "gpu0", "gpu1", "450GB/s", "nvswitch"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "nodes",
                    "gpu",
                    "gpu_count",
                    "count",
                    "links",
                    "matrix",
                    "a",
                    "b",
                    "kind",
                    "bw",
                    "name",
                    "switches",
                    "gpus",
                    "x",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(junk)
@examples(80)
def test_no_document_breaks_the_reader(document: Any) -> None:
    """Any document is a cluster or an error of ours with exit code 2, 3 or 4."""
    try:
        cluster_from_document(document)
    except StrategistError as error:
        assert error.exit_code in (2, 3, 4)


def test_the_documented_examples_are_true(tmp_path: Path) -> None:
    """Every example of docs/hardware.md loads, and its tiers can be worked out."""
    text = (ROOT / "docs/hardware.md").read_text(encoding="utf-8")
    examples = re.findall(r"```(yaml|json|toml)\n(.*?)```", text, re.S)
    assert len(examples) >= 4
    written(tmp_path, "topo.txt", MATRIX)
    for number, (language, content) in enumerate(examples):
        assert tiers(load_cluster(written(tmp_path, f"example{number}.{language}", content)))


def test_a_mapping_is_read_like_a_file() -> None:
    """A mapping given from Python goes through the same door as a file."""
    assert resolve_cluster({"gpu": "h100", "gpus_per_node": 8}).cluster.world == 8
    with pytest.raises(InputError) as caught:
        load_cluster({"gpu": "h100", "gpus_per_node": "8"})
    assert caught.value.code == "TYPE"


@pytest.mark.parametrize(("other", "library"), [("mi300x", "RCCL"), ("cpu", "gloo")])
def test_devices_whose_collectives_do_not_meet_make_no_job(other: str, library: str, tmp_path: Path) -> None:
    """Nodes of two vendors can be drawn, and no job is planned across them; two kinds of one vendor are planned."""
    nodes = [{"name": name, "gpu": gpu, "gpu_count": 4} for name, gpu in (("a", "h100-sxm-80gb"), ("b", other))]
    path = written(tmp_path, "a.json", json.dumps({"nodes": nodes}))
    refused = call("plan", "--model", "gpt2", "--hardware", str(path), "--json").error
    assert refused["code"] == "E_UNSUPPORTED_DEVICE"
    assert "through NCCL and" in refused["message"] and library in refused["message"]
    nodes[1]["gpu"] = "a100-sxm-80gb"
    path = written(tmp_path, "b.json", json.dumps({"nodes": nodes}))
    assert call("predict", "--model", "gpt2", "--hardware", str(path), "--strategy", "dp=8", "--json").code == 0
