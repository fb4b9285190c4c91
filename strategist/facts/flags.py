"""A cluster from the words of the command line: --gpu, --gpus-per-node, --nodes, --gpu-memory, --intra-bw, --inter-bw."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeVar

from strategist.errors import ImpossibleError, InputError, shown
from strategist.facts.domains import inner_tiers
from strategist.facts.gpus import find_gpu
from strategist.facts.hardware import Cluster, Node, NodeGroup
from strategist.facts.machines import Overrides, device_rate, machine, spread_over_racks
from strategist.facts.network import network_tier
from strategist.facts.nodes import reference_node
from strategist.facts.resolved import Assumption, Resolved
from strategist.records import dataclass, replace
from strategist.units import (
    HIGHEST_RATE_BPS,
    LOWEST_RATE_BPS,
    TIB,
    format_gib,
    format_rate,
    parse_bytes,
    parse_integer,
    parse_rate,
    plain_text,
)

MAX_GPUS_PER_NODE = 1024
MAX_NODES = 131072
MAX_MEMORY_BYTES = 16 * TIB
ROUNDED = 1.05
"""Figures of links are printed with two digits."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HardwareWords:
    """The flags as they were typed; None where one was not given."""

    gpu: str
    gpus_per_node: str | None = None
    nodes: str | None = None
    gpu_memory: str | None = None
    intra_bw: str | None = None
    inter_bw: str | None = None


def cluster_from_words(words: HardwareWords) -> Resolved:
    """The cluster that the typed flags describe. Raises InputError with the flag that is at fault."""
    return cluster_from_flags(
        words.gpu,
        _given(words.gpus_per_node, parse_gpus_per_node),
        _given(words.nodes, parse_nodes),
        gpu_memory_bytes=_given(words.gpu_memory, lambda text: parse_bytes(text, "--gpu-memory")),
        intra_Bps=_given(words.intra_bw, lambda text: parse_rate(text, "--intra-bw", example="450GB/s")),
        inter_Bps=_given(words.inter_bw, lambda text: parse_rate(text, "--inter-bw")),
    )


def parse_gpus_per_node(text: str, flag: str = "--gpus-per-node") -> int:
    """A device count in 1..1024."""
    if text.strip(" ") == "0":
        raise InputError("TOO_SMALL", f"{flag} must be at least 1.", flag=flag, value=text, hint="To plan without GPUs of this machine, leave the flag out and name --gpu.")  # fmt: skip
    return parse_integer(text, flag, high=MAX_GPUS_PER_NODE, example="8")


def parse_nodes(text: str, flag: str = "--nodes") -> int:
    """A node count in 1..131072."""
    return parse_integer(text, flag, high=MAX_NODES, example="4")


def _given(text: str | None, parse: Callable[[str], T]) -> T | None:
    return None if text is None else parse(text)


def cluster_from_flags(
    gpu: str,
    gpus_per_node: int | None = None,
    nodes: int | None = None,
    *,
    gpu_memory_bytes: int | None = None,
    intra_Bps: float | None = None,
    inter_Bps: float | None = None,
) -> Resolved:
    """Equal nodes of one GPU. What is not given comes from the catalogue and is listed as an assumption.

    `intra_Bps` is one GPU's rate inside the node and `inter_Bps` the whole node's rate to other nodes, one direction.
    Raises InputError for names, types and bounds, ImpossibleError NO_PATH for several nodes without a network.
    """
    _refuse_a_number(plain_text(gpu, "--gpu"))
    found = find_gpu(gpu)
    assumed = [Assumption(what="GPU", value=found.value.name, flag="--gpu")] if found.assumed else []
    count = bounded_count(1 if nodes is None else nodes, "--nodes", MAX_NODES)
    if gpus_per_node is None:
        gpus_per_node = _usual_count(found.value.name)
        assumed.append(Assumption(what="GPUs per node", value=str(gpus_per_node), flag="--gpus-per-node"))
    if nodes is None:
        assumed.append(Assumption(what="nodes", value="1", flag="--nodes"))
    stated = Overrides(
        memory_bytes=bounded_memory(gpu_memory_bytes, "--gpu-memory"),
        intra_Bps=bounded_rate(intra_Bps, "--intra-bw"),
        inter_Bps=bounded_rate(inter_Bps, "--inter-bw"),
    )
    gpus = bounded_count(gpus_per_node, "--gpus-per-node", MAX_GPUS_PER_NODE)
    node, left_open = machine(found.value, gpus, stated, count)
    group = NodeGroup(node=spread_over_racks(node, count), count=count)
    cluster = Cluster(groups=(group,), origin="flags")
    return checked_network(Resolved(cluster=cluster, assumptions=(*assumed, *left_open)))


def _refuse_a_number(gpu: str) -> None:
    """Raise InputError PARSE where a number follows the device's name, as that of nodes does in --hardware."""
    name, colon, number = gpu.partition(":")
    if colon and number.strip().isdecimal():
        raise InputError(
            "PARSE",
            f"--gpu names a device, and {shown(gpu)} a number of them too.",
            flag="--gpu",
            value=gpu,
            hint=f"Write --gpu {shown(name)}, with --gpus-per-node for devices of one machine and --nodes for machines.",
        )


def _usual_count(gpu: str) -> int:
    """How many of these cards the reference node has; one where there is none."""
    node = reference_node(gpu)
    return node.gpus if node else 1


def checked_network(resolved: Resolved) -> Resolved:
    """`resolved`, when its nodes can reach each other, and the devices of each node; with a note on rates that their devices cannot have.
    Raises ImpossibleError NO_PATH."""
    for group in resolved.cluster.groups:
        _joined_inside(group)
    if not resolved.cluster.links and not _is_one_domain(resolved.cluster):
        network_tier(resolved.cluster)
    doubtful = dict.fromkeys(note for group in resolved.cluster.groups for note in _both_directions(group.node))
    return replace(resolved, notes=(*resolved.notes, *doubtful))


def _is_one_domain(cluster: Cluster) -> bool:
    """True for one node, and for nodes of one rack, which need no network beside the links that they share."""
    return cluster.nodes == 1 or (len(cluster.groups) == 1 and cluster.groups[0].node.fast_domain >= cluster.world)


def _both_directions(node: Node) -> Iterator[str]:
    """A note where a device would send more into its node than its own links carry: vendors add up both directions."""
    most = device_rate(node.gpu, node.topology)
    if most and not node.links and node.intra_Bps > ROUNDED * most:
        yield (
            f"{node.gpu.title} sends {format_rate(most)} into its node by the catalogue, and {format_rate(node.intra_Bps)} was stated. "
            "Rates here are one direction; vendors print both together."
        )


def _joined_inside(group: NodeGroup) -> None:
    node = group.node
    if node.links or all(tier.device_Bps > 0 for tier in inner_tiers(group)):
        return
    raise ImpossibleError(
        "NO_PATH",
        f"{node.gpus} x {node.gpu.title} share a node, and nothing is known that joins all of them.",
        flag="--intra-bw",
        value=node.name,
        hint="State their rate with --intra-bw, or use --gpus-per-node 1.",
    )


def bounded_count(value: int, flag: str, high: int) -> int:
    """A whole number in 1..high. Raises InputError TYPE, NEGATIVE, TOO_SMALL, TOO_LARGE."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError("TYPE", f"{flag} must be a whole number.", flag=flag, value=value, hint="Example: 8.")
    if value < 0:
        raise InputError("NEGATIVE", f"{flag} must not be negative.", flag=flag, value=value, hint="Example: 8.")
    if value == 0:
        raise InputError("TOO_SMALL", f"{flag} must be at least 1.", flag=flag, value=value, hint="Example: 8.")
    if value > high:
        raise InputError("TOO_LARGE", f"{flag} is too large. The limit is {high}.", flag=flag, value=value, hint=f"At most {high}.")  # fmt: skip
    return value


def bounded_memory(value: int | None, flag: str) -> int | None:
    """A memory size in 1 byte..16 TiB."""
    if isinstance(value, int) and value > MAX_MEMORY_BYTES:
        raise InputError("TOO_LARGE", f"{flag} is too large. The limit is {format_gib(MAX_MEMORY_BYTES)}.", flag=flag, value=value, hint="It is in bytes.")  # fmt: skip
    return None if value is None else bounded_count(value, flag, MAX_MEMORY_BYTES)


def bounded_rate(value: float | None, flag: str) -> float | None:
    """A finite rate in 1e6..1e15 bytes per second. Raises InputError NOT_FINITE, NEGATIVE, TOO_SMALL, TOO_LARGE."""
    if value is None:
        return None
    if not math.isfinite(value):
        raise InputError("NOT_FINITE", f"{flag} must be a finite number.", flag=flag, value=value, hint="Example: 50e9.")  # fmt: skip
    too_small = "TOO_SMALL" if value < LOWEST_RATE_BPS else None
    code = "NEGATIVE" if value < 0 else too_small or ("TOO_LARGE" if value > HIGHEST_RATE_BPS else None)
    if code:
        raise InputError(code, f"{flag} must lie between 1e6 and 1e15 bytes per second.", flag=flag, value=value, hint="Example: 50e9.")  # fmt: skip
    return float(value)
