"""The machine we run on, as far as it tells: NVML, `nvidia-smi topo -m`, network ports under /sys, else CPU ranks.

Nothing here fails because something is missing: what could not be looked at becomes a note. An unknown GPU is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from strategist.errors import InputError, nearest, shown
from strategist.facts.clusters import cpu_cluster
from strategist.facts.gpus import find_gpu, gpus
from strategist.facts.hardware import Cluster, Gpu, Node, NodeGroup
from strategist.facts.machines import Overrides, machine
from strategist.facts.matrix_node import node_from_matrix
from strategist.facts.resolved import Assumption, Resolved
from strategist.facts.sys_ports import Port, active_ports, fabric_of
from strategist.facts.topo_matrix import Matrix, parse_matrix
from strategist.records import dataclass, replace

TOPO_SECONDS = 20
NVML_SECONDS = 20.0
"""How long a driver may take to answer; one that hangs must not hold up who only asks what is here."""


class Card(NamedTuple):
    """One GPU as its driver reports it."""

    name: str
    memory_bytes: int


def import_nvml() -> Any:
    """The NVML bindings of the package nvidia-ml-py."""
    import pynvml

    return pynvml


def print_topology() -> str | None:
    """The text of `nvidia-smi topo -m`; None where the tool is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=TOPO_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@dataclass(frozen=True, slots=True)
class Senses:
    """Where to look. Tests put other machines here."""

    nvml: Callable[[], Any] = import_nvml
    topology: Callable[[], str | None] = print_topology
    infiniband: Path = Path("/sys/class/infiniband")
    meminfo: Path = Path("/proc/meminfo")
    cores: Callable[[], int | None] = os.cpu_count
    nvml_seconds: float = NVML_SECONDS


def local_node(senses: Senses | None = None) -> Resolved:
    """This machine as a cluster of one node: its GPUs, or its cores as CPU ranks when it has none.

    Raises InputError UNKNOWN_GPU, with the nearest names and the way out, for a GPU that is in no catalogue.
    """
    look = senses or Senses()
    cards, notes = _cards(look)
    memory_bytes = total_memory(look.meminfo)
    if cards:
        return _gpu_node(cards, look, notes, memory_bytes)
    found = cpu_cluster(look.cores() or 1, memory_bytes=memory_bytes)
    unread = () if memory_bytes else (f"{look.meminfo} could not be read.",)
    return replace(found, cluster=replace(found.cluster, origin="probed"), notes=(*notes, *unread))


def has_gpu(senses: Senses | None = None) -> bool:
    """True when NVML reports a GPU in this machine."""
    return bool(_cards(senses or Senses())[0])


Cards = tuple[list[Card], tuple[str, ...]]


def _cards(look: Senses) -> Cards:
    """The GPUs that NVML reports, or none and the reason. A driver that does not answer is left waiting in a thread of its own."""
    answers: list[Cards] = []
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            answers.append(_reported(look.nvml))
        except BaseException as problem:  # noqa: BLE001 - whoever asked raises it
            failures.append(problem)

    asking = Thread(target=ask, name="nvml", daemon=True)
    asking.start()
    asking.join(look.nvml_seconds)
    if failures:
        raise failures[0]
    return answers[0] if answers else ([], (f"NVML did not answer within {look.nvml_seconds:g} s.",))


def _reported(load: Callable[[], Any]) -> Cards:
    """The same, asked in this thread."""
    try:
        nvml = load()
    except ImportError:
        return [], ("NVML was not asked: the package nvidia-ml-py is not installed (pip install nvidia-ml-py).",)
    try:
        nvml.nvmlInit()
        try:
            return [_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())], ()
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as problem:
        return [], (f"NVML reports no GPU: {shown(problem)}.",)


def _card(nvml: Any, index: int) -> Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(handle)
    text = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
    return Card(text, int(nvml.nvmlDeviceGetMemoryInfo(handle).total))


def _gpu_node(cards: list[Card], look: Senses, notes: tuple[str, ...], memory_bytes: int | None) -> Resolved:
    gpu, assumed = _weakest_gpu(cards)
    node, more, noted = _wired(gpu, len(cards), look)
    ports = active_ports(look.infiniband)
    whole = _with_host(node, ports, look, memory_bytes)
    silent = () if ports else (f"No active port under {look.infiniband}: the rate to other nodes is not known.",)
    rack = ("Whether this node is part of an NVLink rack cannot be seen from it; name the node type if so.",)
    cluster = Cluster(groups=(NodeGroup(node=whole, count=1),), origin="probed")
    seen = (*notes, *noted, *silent, *(rack if "NVL72" in gpu.scale_up else ()))
    return Resolved(cluster=cluster, assumptions=(*assumed, *more), notes=seen)


def _weakest_gpu(cards: list[Card]) -> tuple[Gpu, tuple[Assumption, ...]]:
    """The catalogue's row of the card with the least memory, which all count as when they differ."""
    weakest = min(cards, key=lambda card: card.memory_bytes)
    names = sorted({card.name for card in cards})
    for name in names:
        known_gpu(name)
    fact = known_gpu(weakest.name)
    measured = replace(
        fact, memory_bytes=weakest.memory_bytes, source=f"memory reported by NVML; the rest: {fact.source}"
    )
    if len(names) == 1:
        return measured, ()
    return measured, (Assumption(what="unlike GPUs in one node", value=f"all as {fact.title}", flag="--hardware"),)


def known_gpu(name: str) -> Gpu:
    """The catalogue's GPU with this driver name, which says all of it. Raises InputError UNKNOWN_GPU saying how to describe another one."""
    try:
        found = find_gpu(name, "NVML")
    except InputError as problem:
        raise _unknown_card(name) from problem
    if found.assumed:
        raise _unknown_card(name)
    return found.value


def _unknown_card(name: str) -> InputError:
    titles = {f"{gpu.vendor} {gpu.title}": gpu.name for gpu in gpus()}
    near = [titles[title] for title in nearest(name, titles)]
    similar = f"Near names: {', '.join(near)}. " if near else ""
    return InputError(
        "UNKNOWN_GPU",
        f"This machine has a GPU that no catalogue row describes: {shown(name)}.",
        flag="--hardware",
        value=name,
        hint=f"{similar}Describe it under `gpus` in a hardware file (docs/hardware.md).",
    )


def _wired(gpu: Gpu, count: int, look: Senses) -> tuple[Node, tuple[Assumption, ...], tuple[str, ...]]:
    """The node with the links its topology matrix shows, else with those such cards usually have."""
    try:
        matrix = _matrix(look, count)
        return (*node_from_matrix(matrix, gpu, name="local"), ())
    except InputError as problem:
        node, assumed = machine(gpu, count, Overrides(), 1)
        note = f"{problem.message} The usual links of such cards were taken."
        return replace(node, name="local"), assumed, (note,)


def _matrix(look: Senses, count: int) -> Matrix:
    """The topology matrix. Raises InputError when it cannot be had or shows another machine."""
    text = look.topology()
    if text is None:
        raise InputError("MISSING", "`nvidia-smi topo -m` cannot be run here.", flag="--hardware", hint="Install it.")
    matrix = parse_matrix(text)
    if len(matrix.gpus) != count:
        raise InputError("CONFLICT", f"NVML counts {count} GPUs and `nvidia-smi topo -m` {len(matrix.gpus)}.", flag="--hardware", hint="Show all GPUs to both.")  # fmt: skip
    return matrix


def _with_host(node: Node, ports: list[Port], look: Senses, memory_bytes: int | None) -> Node:
    return replace(
        node,
        nics=len(ports),
        inter_Bps=sum(port.Bps for port in ports),
        fabric=fabric_of(ports),
        rdma=bool(ports),
        vcpus=look.cores(),
        ram_bytes=memory_bytes,
    )


def total_memory(meminfo: Path) -> int | None:
    """MemTotal in bytes; None when the file does not say."""
    return _memory(meminfo, "MemTotal")


def free_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that new work can have without swapping; None when the file does not say."""
    return _memory(meminfo, "MemAvailable")


def _memory(meminfo: Path, entry: str) -> int | None:
    try:
        found = re.search(rf"^{entry}:\s+([0-9]+) kB", meminfo.read_text(encoding="ascii", errors="replace"), re.M)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
