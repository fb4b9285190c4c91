"""The hardware rows are plausible, complete and consistent with each other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from strategist.catalog import rows
from strategist.facts.gpus import gpu_by_id, gpus
from strategist.facts.lookup import fold
from strategist.facts.nodes import nodes
from strategist.facts.tier import KINDS

HARDWARE_TABLES = ("gpus", "cpus", "nodes", "links", "collective_curves", "matmul_rates", "link_efficiency", "fabrics", "meshes", "nvlinks", "shorthands", "hardware_defaults")  # fmt: skip

RANGES = {
    "memory_marketing_GB": (8, 400), "memory_MiB": (8_000, 400_000), "memory_GBps": (200, 12_000),
    "fp32_TFLOPs": (5, 250), "tf32_TFLOPs": (10, 1_500), "fp16_TFLOPs": (10, 3_000), "bf16_TFLOPs": (20, 3_000),
    "fp8_TFLOPs": (50, 6_000), "fp4_TFLOPs": (200, 16_000), "int8_TOPs": (50, 6_000), "scaleup_GBps": (10, 2_000),
    "scaleup_pair_GBps": (10, 1_000), "pcie_GBps": (7, 130), "pcie_gen": (3, 7), "pcie_lanes": (4, 16),
    "boost_MHz": (900, 3_000), "sm_count": (2, 400), "tdp_W": (60, 1_500), "year": (2016, 2026),
    "matmul_bf16_measured_TFLOPs": (50, 2_500), "fp16_accumulate16_TFLOPs": (50, 900), "devices_per_card": (2, 2),
}  # fmt: skip

NODE_RANGES = {
    "gpus_per_node": (1, 16), "fast_domain_gpus": (1, 72), "intra_GBps": (0, 1_000), "pair_GBps": (0, 1_000),
    "nic_count": (1, 32), "nic_Gbps": (8, 800), "inter_node_Gbps": (8, 6_400), "vcpus": (4, 1_000),
    "ram_GB": (16, 5_000), "nvme_count": (0, 16), "nvme_TB": (0, 100), "nvme_read_GBps": (1, 100),
    "price_USD_per_hour": (0.1, 1_000),
}  # fmt: skip


@pytest.mark.parametrize("table", HARDWARE_TABLES)
def test_every_row_has_a_source(table: str) -> None:
    """Every row of hardware says where it comes from."""
    assert rows(table)
    assert [row for row in rows(table) if not row.get("source")] == []


@pytest.mark.parametrize(("table", "ranges"), [("gpus", RANGES), ("nodes", NODE_RANGES)])
def test_numbers_lie_in_the_range_of_their_unit(table: str, ranges: dict[str, tuple[float, float]]) -> None:
    """Every number of a row lies where its unit puts it, and every number's key has a range."""
    for row in rows(table):
        numbers = {key: value for key, value in row.items() if isinstance(value, (int, float)) and value is not True and value is not False}  # fmt: skip
        assert set(numbers) <= set(ranges)
        assert {k: v for k, v in numbers.items() if not ranges[k][0] <= v <= ranges[k][1]} == {}, row["name"]


def test_wider_numbers_are_never_faster() -> None:
    """A narrower number format is at least as fast as a wider one, up to rounding of the printed figures."""
    order = ("fp32_TFLOPs", "tf32_TFLOPs", "bf16_TFLOPs", "fp8_TFLOPs", "fp4_TFLOPs")
    for row in rows("gpus"):
        peaks = [row[key] for key in order if key in row]
        assert all(a <= b * 1.001 for a, b in itertools.pairwise(peaks)), row["name"]


def test_peaks_are_dense() -> None:
    """No measured matmul beats the peak, and none of the listed peaks is the doubled with-sparsity figure."""
    for row in rows("gpus"):
        measured, peak = row.get("matmul_bf16_measured_TFLOPs"), row.get("bf16_TFLOPs")
        assert measured is None or 0.4 * peak < measured <= peak, row["name"]


FMA_PER_SM_CLOCK = {"6.0": None, "7.0": 512, "7.5": None, "8.0": 1024, "8.6": None, "8.9": None, "9.0": 2048}
"""Dense half-precision tensor multiply-adds of one SM per clock: NVIDIA's architecture white papers."""


def test_tensor_peaks_follow_from_the_silicon() -> None:
    """SMs x multiply-adds per clock x 2 x boost clock gives the tensor peak within 6 %, where the row has both."""
    checked = 0
    for row in rows("gpus"):
        per_clock = FMA_PER_SM_CLOCK.get(row.get("compute_capability", ""))
        if per_clock is None or not {"sm_count", "boost_MHz", "fp16_TFLOPs"} <= set(row):
            continue
        silicon = row["sm_count"] * per_clock * 2 * row["boost_MHz"] * 1e6 / 1e12
        assert abs(silicon / row["fp16_TFLOPs"] - 1) < 0.06, row["name"]
        checked += 1
    assert checked >= 15


def test_the_stated_peak_check_agrees_with_the_row() -> None:
    """The check column repeats the peak it checks within 6 %, with the difference it prints."""
    for row in rows("gpus"):
        if "tensor_peak_check" in row:
            value, _, percent = row["tensor_peak_check"].partition(" ")
            peak = row.get("bf16_TFLOPs", row["fp16_TFLOPs"])
            assert abs(float(value) / peak - 1) < 0.06, row["name"]
            assert float(percent.strip("()%")) == pytest.approx((float(value) / peak - 1) * 100, abs=0.1), row["name"]


def test_reported_memory_never_exceeds_the_name() -> None:
    """What drivers report is at most the marketing size read as GiB, and within 7 % of it."""
    for row in rows("gpus"):
        if "memory_MiB" in row:
            assert 0.93 <= row["memory_MiB"] / (row["memory_marketing_GB"] * 1024) <= 1.0, row["name"]


@pytest.mark.parametrize("table", ["gpus", "nodes"])
def test_names_and_aliases_are_unique(table: str) -> None:
    """No name or alias stands for two rows, even when blanks, dashes and case are dropped."""
    said = [fold(name) for row in rows(table) for name in {fold(n) for n in (row["name"], *row.get("aliases", ()))}]
    assert len(said) == len(set(said))
    assert all(row["name"] == row["name"].lower() for row in rows(table))


def test_nodes_carry_known_gpus_and_fabrics() -> None:
    """Every node's GPU, fabric and mesh has its row, and every shorthand and default names a row."""
    known = {row["name"] for row in rows("gpus")}
    assert {row["gpu"] for row in rows("nodes")} <= known
    assert {row["gpu"] for row in rows("shorthands")} <= known
    assert {row["fabric"] for row in rows("nodes")} <= {row["fabric"] for row in rows("fabrics")}
    assert {row["mesh"] for row in rows("nodes") if "mesh" in row} == {row["name"] for row in rows("meshes")}
    assert {row["gpu"] for row in rows("collective_curves")} <= known | {"cpu"}


def test_node_rates_agree_with_their_ports() -> None:
    """A node's rate to others is its ports times their rate."""
    for row in rows("nodes"):
        if "inter_node_Gbps" in row:
            assert row["inter_node_Gbps"] == row["nic_count"] * row["nic_Gbps"], row["name"]


def test_meshes_use_no_more_links_than_a_card_has() -> None:
    """In a mesh every GPU has at most six links, and all eight of a hybrid cube mesh have exactly six."""
    for row in rows("meshes"):
        count: dict[int, int] = dict.fromkeys(range(row["gpus"]), 0)
        for a, b, links in row["links"]:
            assert 0 <= a < b < row["gpus"]
            count[a] += links
            count[b] += links
        assert max(count.values()) <= 6
        assert row["name"] != "dgx-1" or set(count.values()) == {6}


def test_rows_become_facts_without_loss() -> None:
    """A fact has the row's figures in base units: bytes, bytes per second, FLOP per second."""
    h100, t4, gb10 = gpu_by_id("h100-sxm-80gb"), gpu_by_id("t4"), gpu_by_id("gb10-dgx-spark")
    assert (h100.memory_bytes, h100.bf16_FLOPs, h100.memory_Bps) == (81559 * 2**20, 989_400_000_000_000.0, 3.352e12)
    assert (h100.host_Bps, h100.scale_up_Bps, h100.basis) == (63e9, 450e9, "datasheet")
    assert t4.bf16_FLOPs is None
    assert gb10.memory_bytes == int(128 * 1024 * 0.98) * 2**20
    assert gb10.basis == "derived"


def test_node_rates_to_others_are_exact() -> None:
    """Gigabits become bytes without rounding: 3200 Gb/s is 400e9 bytes per second."""
    listed: dict[str, Any] = {row["name"]: row for row in rows("nodes")}
    for node in nodes():
        assert node.inter_Bps * 8 == listed[node.name].get("inter_node_Gbps", 0) * 10**9


def test_every_row_becomes_a_fact() -> None:
    """Every row of GPUs and nodes loads, with a positive memory and a source."""
    assert len(gpus()) == len(rows("gpus")) + 1
    assert len(nodes()) == len(rows("nodes"))
    assert all(gpu.memory_bytes > 0 and gpu.memory_Bps > 0 and gpu.source for gpu in gpus())
    assert all(node.gpus >= 1 and node.source for node in nodes())


def test_every_kind_of_link_has_an_efficiency() -> None:
    """The closed list of link kinds and the efficiency rows name the same kinds, and every fabric is one of them."""
    assert {row["kind"] for row in rows("link_efficiency")} == set(KINDS)
    assert {row["kind"] for row in rows("fabrics")} <= set(KINDS)
