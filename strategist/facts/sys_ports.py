"""Active InfiniBand, RoCE and EFA ports and their rates, as Linux shows them under /sys/class/infiniband."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) Gb/sec(?: \(\S+ (\S+)\))?")


class Port(NamedTuple):
    """One active port: its device, its rate one direction, its link layer, and its generation where the rate says."""

    device: str
    Bps: float
    layer: str
    generation: str


def active_ports(root: Path) -> list[Port]:
    """Every active port, by device name; none where the folder does not exist or cannot be read."""
    try:
        folders = sorted(root.glob("*/ports/*"))
    except OSError:
        return []
    found = (_port(folder) for folder in folders)
    return [port for port in found if port is not None]


def _port(folder: Path) -> Port | None:
    """The port described by a folder, if it is active and names its rate."""
    state, rate = _read(folder / "state"), _RATE.match(_read(folder / "rate"))
    if "ACTIVE" not in state or rate is None:
        return None
    return Port(folder.parent.parent.name, float(rate[1]) * 1e9 / 8, _read(folder / "link_layer"), rate[2] or "")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def fabric_of(ports: list[Port]) -> str:
    """The name of the fabric that most of the ports' rate belongs to, in the words of the catalogue."""
    if not ports:
        return "none"
    fastest = max(ports, key=lambda port: port.Bps)
    if fastest.layer == "InfiniBand":
        return f"IB {fastest.generation}".strip()
    return "RoCE" if fastest.layer == "Ethernet" else "EFA"
