"""This machine, seen through NVML, nvidia-smi and /sys, with other machines put in their place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from strategist.errors import InputError
from strategist.facts.clusters import load_cluster
from strategist.facts.local import Senses, has_gpu, known_gpu, local_node, total_memory
from strategist.facts.sys_ports import active_ports, fabric_of

TOPO = Path(__file__).parents[1] / "data" / "topo"


class NvmlError(Exception):
    """What a driver that is not there raises."""


def nvml(names: list[str | bytes], memory_bytes: int = 143771 * 2**20, *, broken: bool = False) -> Any:
    """A driver with these cards, as far as the real bindings are used."""
    calls: list[str] = []

    def init() -> None:
        if broken:
            raise NvmlError("Driver Not Loaded")
        calls.append("init")

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=init,
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: names[handle],
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=memory_bytes - handle * 2**20),
        calls=calls,
    )


def absent() -> Any:
    """Bindings that are not installed."""
    raise ImportError("No module named 'pynvml'")


def ports(root: Path, devices: dict[str, tuple[str, str, str]]) -> Path:
    """A /sys/class/infiniband with these devices: state, rate, link layer."""
    for device, (state, rate, layer) in devices.items():
        folder = root / device / "ports" / "1"
        folder.mkdir(parents=True)
        for name, text in (("state", state), ("rate", rate), ("link_layer", layer)):
            (folder / name).write_text(f"{text}\n")
    return root


@pytest.fixture
def host(tmp_path: Path) -> Senses:
    """A machine with 1 TiB of memory, 192 CPUs, eight NDR ports of which one is down, and no GPU."""
    (tmp_path / "meminfo").write_text(f"MemTotal:       {2**30} kB\nMemFree:        5 kB\n")
    up = {f"mlx5_{i}": ("4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand") for i in range(7)}
    down = {"mlx5_7": ("1: DOWN", "40 Gb/sec (4X QDR)", "InfiniBand")}
    return Senses(
        nvml=absent,
        topology=lambda: None,
        infiniband=ports(tmp_path / "infiniband", up | down),
        meminfo=tmp_path / "meminfo",
        cores=lambda: 192,
    )


def h200(count: int = 8) -> list[str | bytes]:
    """Driver names of H200 cards."""
    return ["NVIDIA H200"] * count


def test_a_gpu_machine_is_read_from_all_sources(host: Senses) -> None:
    """Cards and memory come from NVML, links from the matrix, ports from /sys, the rest from the catalogue."""
    matrix = (TOPO / "h200x8_cloud_roce_8nic.ansi.txt").read_text()
    driver = nvml(h200())
    found = local_node(replace(host, nvml=lambda: driver, topology=lambda: matrix))
    node = found.cluster.groups[0].node
    assert (found.cluster.origin, found.cluster.world, node.gpu.name, node.topology) == ("probed", 8, "h200-sxm-141gb", "nvswitch")  # fmt: skip
    assert node.gpu.memory_bytes == (143771 - 7) * 2**20
    assert "NVML" in node.gpu.source
    assert (node.inter_Bps, node.nics, node.fabric, node.rdma) == (7 * 50e9, 7, "IB NDR", True)
    assert (node.ram_bytes, node.vcpus) == (2**40, 192)
    assert (found.assumptions, found.notes) == ((), ())
    assert driver.calls == ["init", "shutdown"]


def test_names_in_bytes_are_names(host: Senses) -> None:
    """Old bindings give names as bytes."""
    found = local_node(replace(host, nvml=lambda: nvml([b"NVIDIA H200"])))
    assert found.cluster.smallest.name == "h200-sxm-141gb"


def test_without_a_matrix_the_usual_links_are_assumed(host: Senses) -> None:
    """Where nvidia-smi is missing, shows other GPUs or prints nonsense, the usual links are taken and noted."""
    two = (TOPO / "gpu2_phb.tab.txt").read_text()
    for text in (None, two, "garbage"):
        found = local_node(replace(host, nvml=lambda: nvml(h200()), topology=lambda text=text: text))
        assert found.cluster.groups[0].node.topology == "nvswitch"
        assert any("usual links" in note for note in found.notes)
        assert {said.what for said in found.assumptions} >= {"links inside a node"}


def test_without_gpus_there_are_cpu_ranks(host: Senses) -> None:
    """No bindings, a driver that fails, or no card: CPU ranks, one per core, sharing the memory, and a note why."""
    for driver in (absent, lambda: nvml([], broken=True), lambda: nvml([])):
        found = local_node(replace(host, nvml=driver))
        assert (found.cluster.origin, found.cluster.world, found.cluster.smallest.vendor) == ("probed", 192, "CPU")
        assert found.cluster.smallest.memory_bytes == 2**40 // 192
    assert "nvidia-ml-py" in local_node(host).notes[0]
    assert "Driver Not Loaded" in local_node(replace(host, nvml=lambda: nvml([], broken=True))).notes[0]


def test_a_driver_that_hangs_holds_up_nobody(host: Senses) -> None:
    """A driver that never answers counts as no driver, and a note says so; one that answers with a fault of ours raises it."""
    hanging = replace(host, nvml=lambda: SimpleNamespace(nvmlInit=Event().wait, NVMLError=NvmlError), nvml_seconds=0.01)
    assert local_node(hanging).notes[0] == "NVML did not answer within 0.01 s."
    assert not has_gpu(hanging)
    with pytest.raises(AttributeError, match="nvmlInit"):
        has_gpu(replace(host, nvml=lambda: SimpleNamespace(NVMLError=NvmlError)))


def test_gpus_are_noticed_without_reading_the_rest(host: Senses) -> None:
    """has_gpu is true exactly when NVML reports a card."""
    assert has_gpu(replace(host, nvml=lambda: nvml(h200(1))))
    assert not has_gpu(replace(host, nvml=lambda: nvml([])))
    assert not has_gpu(host)


def test_unreadable_memory_is_noted(host: Senses, tmp_path: Path) -> None:
    """Where /proc/meminfo does not answer, the measured machine's memory is assumed, and both are said."""
    found = local_node(replace(host, meminfo=tmp_path / "nowhere"))
    assert any("could not be read" in note for note in found.notes)
    assert "host memory" in {said.what for said in found.assumptions}
    (tmp_path / "odd").write_text("MemFree: 1 kB\n")
    assert total_memory(tmp_path / "odd") is None


def test_an_unknown_gpu_is_an_error_with_a_way_out(host: Senses) -> None:
    """A card that no row describes is named, with near names and how to describe it; it is never guessed."""
    with pytest.raises(InputError) as caught:
        local_node(replace(host, nvml=lambda: nvml(["NVIDIA GeForce RTX 9090"])))
    assert (caught.value.code, caught.value.exit_code) == ("UNKNOWN_GPU", 2)
    assert "RTX 9090" in caught.value.message
    assert "hardware file" in str(caught.value.hint)
    with pytest.raises(InputError) as hostile:
        known_gpu("NVIDIA\x1b[2J")
    assert "\x1b" not in hostile.value.message


def test_unlike_cards_count_as_the_smallest(host: Senses) -> None:
    """Two kinds of card in one node count as the one with the least memory, which is an assumption."""
    found = local_node(replace(host, nvml=lambda: nvml(["NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 4090"])))
    assert found.cluster.smallest.name == "rtx-4090"
    assert "unlike GPUs in one node" in {said.what for said in found.assumptions}


def test_a_rack_cannot_be_seen_from_one_node(host: Senses) -> None:
    """A tray of an NVLink rack says that its rack is out of sight."""
    matrix = (TOPO / "gb200_tray4_numa.tab.txt").read_text()
    found = local_node(replace(host, nvml=lambda: nvml(["NVIDIA GB200"] * 4), topology=lambda: matrix))
    assert any("rack" in note for note in found.notes)


def test_ports_are_summed_and_named(tmp_path: Path) -> None:
    """Active ports count with their rate; the fabric is that of the fastest; broken folders are passed over."""
    root = ports(
        tmp_path / "sys",
        {"mlx5_0": ("4: ACTIVE", "200 Gb/sec (2X NDR)", "Ethernet"), "mlx5_1": ("4: ACTIVE", "garbage", "Ethernet"), "mlx5_2": ("2: INIT", "200 Gb/sec", "Ethernet")},
    )  # fmt: skip
    (root / "odd" / "ports" / "1").mkdir(parents=True)
    found = active_ports(root)
    assert [(port.device, port.Bps) for port in found] == [("mlx5_0", 25e9)]
    assert fabric_of(found) == "RoCE"
    assert fabric_of(active_ports(ports(tmp_path / "efa", {"rdmap0": ("4: ACTIVE", "100 Gb/sec", "Unspecified")}))) == "EFA"  # fmt: skip
    assert active_ports(tmp_path / "nowhere") == []
    assert fabric_of([]) == "none"


def test_this_very_machine_can_be_read() -> None:
    """`local` gives a cluster of one node here, whatever this machine is."""
    assert load_cluster("local").nodes == 1


def test_a_driver_name_is_not_completed(host: Senses) -> None:
    """`NVIDIA H100` may be the card of 64 GB or that of 80: what a driver says is the whole name or none of the catalogue's."""
    with pytest.raises(InputError) as caught:
        local_node(replace(host, nvml=lambda: nvml(["NVIDIA H100"])))
    assert caught.value.code == "UNKNOWN_GPU"
    assert known_gpu("NVIDIA GeForce RTX 4070 Ti SUPER").name == "rtx-4070ti-super"
