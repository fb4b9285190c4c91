"""Whatever names machines -> Cluster: NODE[:COUNT], cpu[:RANKS], local, a file, a mapping, a Cluster, or nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from strategist.errors import InputError, shown
from strategist.facts.flags import (
    MAX_GPUS_PER_NODE,
    MAX_NODES,
    HardwareWords,
    bounded_count,
    checked_network,
    cluster_from_flags,
    cluster_from_words,
)
from strategist.facts.gpus import backend_of, find_gpu, gpu_by_id
from strategist.facts.hardware import Cluster, Gpu, Node, NodeGroup
from strategist.facts.lookup import Found
from strategist.facts.machines import default_row, spread_over_racks
from strategist.facts.nodes import find_node, find_rack, node_by_id, reference_node
from strategist.facts.resolved import Assumption, Resolved
from strategist.reading import STANDARD_INPUT
from strategist.records import replace
from strategist.units import format_gib, parse_integer, plain_text

__all__ = [
    "HardwareWords",
    "cluster_from_flags",
    "cluster_from_words",
    "cpu_cluster",
    "load_cluster",
    "resolve_cluster",
]

Source = str | os.PathLike[str] | Mapping[str, Any] | Cluster | None

FILE_ENDINGS = (".json", ".yaml", ".yml", ".toml")
_COUNTED = re.compile(r"(?P<before>\d+) ?[x*×] ?(?P<name>.+)|(?P<named>.+?) ?[x*×] ?(?P<behind>\d+)", re.IGNORECASE)


def load_cluster(source: Source = None) -> Cluster:
    """The machines that `source` names: see resolve_cluster, which also says what was assumed."""
    return resolve_cluster(source).cluster


def resolve_cluster(source: Source = None, flag: str = "--hardware") -> Resolved:
    """The machines that `source` names, and what was assumed about them.

    A string is `NODE[:COUNT]` with a node type of the catalogue (or a GPU, for its reference node), `cpu[:RANKS]`,
    `local`, or the path of a hardware file; a mapping is the content of such a file; None is the reference machine.
    Raises InputError for names, bounds, types and files, ImpossibleError NO_PATH for machines that cannot reach each other.
    """
    if isinstance(source, Cluster):
        return Resolved(cluster=source)
    if source is None:
        return _reference_machine()
    if isinstance(source, Mapping):
        from strategist.facts.hardware_file import cluster_from_document

        return cluster_from_document(source, flag)
    if not isinstance(source, (str, os.PathLike)):
        kinds = "a name, a path, a description or a Cluster"
        raise InputError("TYPE", f"{flag} must be {kinds}.", flag=flag, value=type(source).__name__, hint='For example "dgx-h100:4".')  # fmt: skip
    return _from_file(str(source), flag) if _is_path(source) else _from_name(str(source), flag)


def _reference_machine() -> Resolved:
    row = default_row("cluster")
    group = NodeGroup(node=node_by_id(row["node"]), count=row["nodes"])
    said = Assumption(what="hardware", value=f"{row['node']}:{row['nodes']}", flag="--hardware", source=row["source"])
    return Resolved(cluster=Cluster(groups=(group,), origin="assumed"), assumptions=(said,))


def _is_path(source: str | os.PathLike[str]) -> bool:
    text = str(source)
    return (
        isinstance(source, os.PathLike)
        or text == STANDARD_INPUT
        or os.sep in text
        or text.lower().endswith(FILE_ENDINGS)
    )


def _from_file(path: str, flag: str) -> Resolved:
    from strategist.facts.hardware_file import cluster_from_file

    return cluster_from_file(path, flag)


def _from_name(text: str, flag: str) -> Resolved:
    said = plain_text(text, flag)
    name, colon, count = said.partition(":")
    if name.strip(" ").lower() == "cpu":
        return cpu_cluster(parse_integer(count, flag, high=MAX_GPUS_PER_NODE, example="cpu:4") if colon else 1)
    if said.lower() == "local":
        from strategist.facts.local import local_node

        return local_node()
    nodes = parse_integer(count, flag, high=MAX_NODES, example="dgx-h100:4") if colon else 1
    tray = find_rack(plain_text(name, flag), flag)
    if tray is not None:
        return _racks(name, tray, nodes, flag)
    try:
        found = _named_node(name, flag)
    except InputError as unknown:
        if unknown.code == "UNKNOWN_NODE" and os.path.exists(said):
            return _from_file(said, flag)
        raise _count_elsewhere(said, flag) or unknown from None
    return _catalogued(found, nodes)


def _racks(name: str, tray: Node, racks: int, flag: str) -> Resolved:
    """Whole racks, which schedulers and launchers see as that many nodes each."""
    trays = tray.fast_domain // tray.gpus
    source = f"{name} is a rack of {trays} nodes of {tray.gpus} GPUs"
    said = Assumption(what="nodes", value=f"{trays} x {tray.name} in each rack", flag=flag, source=source)
    nodes = bounded_count(racks * trays, flag, MAX_NODES)
    cluster = Cluster(groups=(NodeGroup(node=tray, count=nodes),), origin="catalogue")
    return Resolved(cluster=cluster, assumptions=(said,))


def _count_elsewhere(said: str, flag: str) -> InputError | None:
    """What is wrong with "2xdgx-h100" and "dgx-h100x2": a colon parts name and count here. None where the rest is no name either."""
    counted = _COUNTED.fullmatch(said)
    if counted is None:
        return None
    try:
        name = _named_node(counted["name"] or counted["named"], flag).value.name
    except InputError:
        return None
    return InputError("UNKNOWN_NODE", f"{flag}: no node type is called {shown(said)}.", flag=flag, value=said, hint=f"Write {name}:{counted['before'] or counted['behind']}.")  # fmt: skip


def _named_node(name: str, flag: str) -> Found[Node]:
    """A node type, or the reference node of a GPU. Of two failures the one about node types is told."""
    try:
        return find_node(name, flag)
    except InputError as unknown:
        if unknown.code != "UNKNOWN_NODE":
            raise
        try:
            gpu = find_gpu(name, flag).value
        except InputError as also:
            raise (unknown if also.code == "UNKNOWN_GPU" else also) from None
        node = reference_node(gpu.name)
        if node is None:
            backend_of(gpu)
            hint = f"Describe it with --gpu {gpu.name} --gpus-per-node N, or in a hardware file."
            raise InputError("UNKNOWN_NODE", f"{flag}: {gpu.name} is a GPU, and no node of the catalogue carries it.", flag=flag, value=name, hint=hint) from None  # fmt: skip
        return Found(node, f"{gpu.name} is a GPU; its reference node {node.name} was taken")


def _catalogued(found: Found[Node], nodes: int) -> Resolved:
    source = found.assumed or ""
    node = found.value
    counted = (
        f"{node.name}, {nodes} nodes of {node.gpus} devices" if nodes > 1 else node.name
    )  # some say h100:8 for eight devices
    said = (Assumption(what="node type", value=counted, flag="--hardware", source=source),) if source else ()
    cluster = Cluster(groups=(NodeGroup(node=spread_over_racks(node, nodes), count=nodes),), origin="catalogue")
    return checked_network(Resolved(cluster=cluster, assumptions=said))


def cpu_cluster(ranks: int, *, memory_bytes: int | None = None) -> Resolved:
    """CPU ranks of one machine that talk over gloo: one core each, and an even part of `memory_bytes`.

    Without `memory_bytes` the memory is that of the machine whose cores the catalogue has measured.
    """
    core = gpu_by_id("cpu")
    whole = core.memory_bytes if memory_bytes is None else memory_bytes
    count = bounded_count(ranks, "--hardware", MAX_GPUS_PER_NODE)
    device = replace(core, memory_bytes=whole // count)
    said = [Assumption(what="CPU core", value="one per rank, as fast as the measured one", flag="--hardware", source=core.source)]  # fmt: skip
    if memory_bytes is None:
        said.append(Assumption(what="host memory", value=f"{format_gib(whole)} in all, {format_gib(device.memory_bytes)} per rank", flag="--gpu-memory", source=core.source))  # fmt: skip
    cluster = Cluster(groups=(NodeGroup(node=_cpu_node(device, count, whole), count=1),), origin="catalogue")
    return Resolved(cluster=cluster, assumptions=tuple(said))


def _cpu_node(device: Gpu, ranks: int, ram_bytes: int) -> Node:
    return Node(
        name="cpu",
        gpu=device,
        gpus=ranks,
        fast_domain=ranks,
        topology="memory",
        intra_Bps=device.memory_Bps,
        pair_Bps=device.memory_Bps,
        inter_Bps=0.0,
        vcpus=ranks,
        ram_bytes=ram_bytes,
        basis=device.basis,
        source=device.source,
    )
