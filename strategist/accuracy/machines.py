"""A run's machines: cards by name, nodes as the row counts them, links as far as it states their rates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from strategist.accuracy.table import Run, Unexpressed, needed, number, whole
from strategist.catalog import rows
from strategist.errors import StrategistError
from strategist.facts.clusters import cluster_from_flags
from strategist.facts.gpus import gpu_by_id, gpu_row, possible_gpus
from strategist.facts.hardware import Cluster, Node, NodeGroup
from strategist.facts.machines import Overrides, overridden, part_of, spread_over_racks
from strategist.facts.nodes import find_node, node_by_id
from strategist.records import dataclass, replace

_FABRICS = (
    ("efa", "EFA v2"), ("roce", "RoCE"), ("omni", "IB EDR"), ("xdr", "IB XDR"), ("ndr", "IB NDR"), ("rdma", "RoCE"),
    ("infiniband", "IB HDR"), ("ib ", "IB HDR"), ("gig ethernet", "ethernet"),
)  # fmt: skip
"""Words of a network's description, and the fabric of the catalogue that they stand for; the first hit counts."""

_BLOCKING: tuple[tuple[str, str, int], ...] = (("jean zay", "A100", 20),)
"""A machine by a word of its network's description, a card of it, and the most nodes on which its jobs ran unless the CPU waited
for every kernel. Source: bigscience-workshop/bigscience: train/tr11-176B-ml/chronicles-prequel.md, "dealing with JZ hanging on the
large model": 20 nodes may hang and 40 always do without CUDA_LAUNCH_BLOCKING=1, which was kept for what followed."""

_PORTS = re.compile(r"(\d+) ?[x×] ?[^,;+]*?(\d+) ?Gb")
"""Ports of one network: how many, and the rate of each, with the adapter's name and number between them."""
_COMPUTE = re.compile(r"\bcompute\b[^:,;]*:([^,;]*)", re.IGNORECASE)
"""The part of a list of networks that carries the job; the others are for storage and management."""
_PER_NODE = re.compile(r"(\d+) Gb/s(?: measured)? per node")
_PER_GPU = re.compile(r"(\d+) Gb/s (?:\(.*\) )?per GPU")
_PAIR = re.compile(r"~ ?(\d+(?:\.\d+)?) GB/s")
_LANES = re.compile(r"pcie ?(?:gen ?)?(\d)(?:\.0)? ?x ?(\d+)\b", re.IGNORECASE)
"""A slot: its generation and its lanes, of whose rate collectives get the share that they get of any; a rate beside it is what somebody copied at."""
_BRIDGE = re.compile(r"\bnvlink bridges?\b", re.IGNORECASE)
"""Cards of a bus that are joined in pairs."""
_SIZE = re.compile(r"[ _-](\d+) ?GB?\b")
_MAKERS = re.compile(r"\b(?:NVIDIA|AMD|GeForce|Tesla|Instinct|OAM|DGX|HGX)\b ?", re.IGNORECASE)
_FORM = re.compile(r"(?<=SXM)\d\b", re.IGNORECASE)
"""The generation of a form, which a card's own name says too."""
_REMARK = re.compile(r" ?\(.*\)")
_OTHER_SIZE = 4 / 3
"""Memory so many times as large as a card's, or as small, is another card's; GB for GiB and what drivers keep are closer."""
_COUNTED = re.compile(r"^\d+ ?[x×] ?|[, ]+[x×] ?\d+$", re.IGNORECASE)
_BESIDE = re.compile(r" ?\b(?:HBM\d\w?|GDDR\d\w?|NVL\d+|GPUs?|Tensor Cores?)\b", re.IGNORECASE)
"""What stands beside a card's name: its kind of memory, the rack that it hangs in, what it is."""


@dataclass(frozen=True, slots=True)
class Machines:
    """What a row says of its machines, reduced to what makes a cluster. A run on a part of one node uses `gpus_per_node` of
    the `gpus_of_node` that it has. Where the row counts cards of several dies, each of which is a device, `devices_per_gpu` says how
    many; all other numbers are of devices. `node` is the type of node that a row names in place of a card; cards `in_pairs` are bridged."""

    gpu: str
    gpus_per_node: int
    gpus_of_node: int
    nodes: int
    intra_Bps: float | None
    inter_Bps: float | None
    fabric: str | None
    devices_per_gpu: int = 1
    node: str = ""
    in_pairs: bool = False

    @property
    def counted_gpus(self) -> float:
        """GPUs as the row counts them."""
        return self.nodes * self.gpus_per_node / self.devices_per_gpu


def machines_of(run: Run) -> Machines:
    """The machines of a run. Raises Unexpressed for cards that are not in the catalogue and counts that do not divide."""
    gpu, node = _named(run)
    dies = _dies(gpu, number(run, "gpu_mem_gb"))
    _of_its_memory(gpu, dies, number(run, "gpu_mem_gb"))
    world = needed(run, "gpus_total") * dies
    stated = whole(run, "gpus_per_node") or (node_by_id(node).gpus if node else None)
    of_node = (stated or 8 // dies) * dies
    per_node = min(world, of_node)
    if world % per_node:
        raise Unexpressed(f"gpus_total {world} is no multiple of gpus_per_node {per_node}")
    between = run.get("inter_node", "")
    return Machines(
        gpu=gpu,
        gpus_per_node=per_node,
        gpus_of_node=of_node if stated else per_node,
        nodes=world // per_node,
        intra_Bps=_lanes_Bps(run) or _pair_Bps(run),
        inter_Bps=_node_Bps(between, per_node),
        fabric=_fabric(between),
        devices_per_gpu=dies,
        node=node if node and of_node == node_by_id(node).gpus else "",
        in_pairs=per_node % 2 == 0 and bool(_BRIDGE.search(run.get("intra_node", ""))),
    )


def launches_wait(run: Run, machines: Machines) -> bool:
    """Whether the run's kernels were launched one after the other, because larger jobs on its machine hung otherwise."""
    between, card = run.get("inter_node", "").lower(), run["hardware"]
    return any(word in between and gpu in card and machines.nodes > most for word, gpu, most in _BLOCKING)


@cache
def cluster_of(machines: Machines) -> Cluster:
    """The cluster. What the row does not say is the catalogue's reference node for that card; a part of a node has the links
    of that node, not those of a smaller machine."""
    try:
        cluster = _whole_nodes(machines)
    except StrategistError as problem:
        raise Unexpressed(f"hardware: {problem.message}") from None
    group = cluster.groups[0]
    node = group.node if machines.fabric is None else replace(group.node, fabric=machines.fabric)
    used = node if machines.gpus_per_node == node.gpus else part_of(node, machines.gpus_per_node)
    return replace(cluster, groups=(replace(group, node=used),))


def _whole_nodes(machines: Machines) -> Cluster:
    """Nodes of the type that the row names, or of the card's; what the row says of links counts."""
    intra, inter = machines.intra_Bps, machines.inter_Bps if machines.nodes > 1 else None
    if not machines.node:
        found = cluster_from_flags(
            machines.gpu, machines.gpus_of_node, machines.nodes, intra_Bps=intra, inter_Bps=inter
        )
        return _bridged(found.cluster) if machines.in_pairs else found.cluster
    node = overridden(node_by_id(machines.node), Overrides(intra_Bps=intra, inter_Bps=inter))
    group = NodeGroup(node=spread_over_racks(node, machines.nodes), count=machines.nodes)
    return Cluster(groups=(group,), origin="catalogue")


def _bridged(cluster: Cluster) -> Cluster:
    """The same cards, in pairs where the catalogue joins them by nothing but a bus."""
    group = cluster.groups[0]
    is_bus = group.node.topology == "pcie-host"
    node = replace(group.node, topology="nvlink-pairs", fast_domain=2) if is_bus else group.node
    return replace(cluster, groups=(replace(group, node=node),))


def _named(run: Run) -> tuple[str, str]:
    """The card, and the type of node that is named in its place. Raises Unexpressed for a name that neither has, or that may be several
    cards."""
    said = run["hardware"]
    if not said:
        raise Unexpressed("hardware is not stated")
    found, several = _first_known(tuple(_spellings(run)))
    if found is not None:
        return found, ""
    node = _node_called(said)
    if node is None:
        unclear = f"may be {several}: which is not stated"
        raise Unexpressed(f"hardware {said} {unclear if several else 'is not in the catalogue'}")
    return node.gpu.name, node.name


@cache
def _node_called(name: str) -> Node | None:
    """The type of node of that name; none where the catalogue has no such, or several."""
    try:
        return find_node(name).value
    except StrategistError:  # the card's own name is what the refusal speaks of
        return None


def _spellings(run: Run) -> Iterator[str]:
    """What the card may be called: its own name, its class with and without the memory, its name without its maker's and with its
    form, which is that of servers unless a bus joins the cards."""
    said, kind = run["hardware"], run.get("gpu_class", "")
    named = _SIZE.search(said)
    size = run.get("gpu_mem_gb", "") or (named[1] if named else "")
    plain = _BESIDE.sub("", _COUNTED.sub("", _REMARK.sub("", said)))
    formless = _FORM.sub("", plain)
    bare = _SIZE.sub("", formless)
    short = _MAKERS.sub("", bare).strip()
    form = "PCIe" if "pcie" in run.get("intra_node", "").lower() else "SXM"
    yield from (said, plain, formless)
    if kind and size:
        yield f"{kind}-{size}GB"
    yield from (bare, kind)
    if size:
        yield from (f"{short}-{size}GB", f"{short}-{form}-{size}GB")
    yield from (short, f"RTX {short}", f"{short}-{form}")


def _dies(gpu: str, stated_GB: float | None) -> int:
    """How many devices one GPU of the row is: those of a card where the memory that it states is a card's."""
    row = gpu_row(gpu)
    is_card = stated_GB is not None and stated_GB > 1.5 * row.get("memory_marketing_GB", stated_GB)
    return row.get("devices_per_card", 1) if is_card else 1


def _of_its_memory(gpu: str, dies: int, stated_GB: float | None) -> None:
    """Raises Unexpressed for a card of another size than the row says."""
    own_GB = gpu_by_id(gpu).memory_bytes * dies / 1e9
    if stated_GB is not None and not 1 / _OTHER_SIZE < stated_GB / own_GB < _OTHER_SIZE:
        raise Unexpressed(f"the row contradicts itself: gpu_mem_gb is {stated_GB:g}, and {gpu} has {own_GB:.3g}")


@cache
def _first_known(names: tuple[str, ...]) -> tuple[str | None, str]:
    """The card that the first known name stands for; none, and the cards that the first unclear one may be, where no name stands for one."""
    several = ""
    for name in names:
        choices = possible_gpus(name)
        if len(choices) == 1:
            return choices[0], ""
        several = several or ", ".join(choices)
    return None, several


def _lanes_Bps(run: Run) -> float | None:
    """The rate of the slots that a row describes, one direction, by the catalogue's of sixteen lanes; None where it does not or nobody knows them."""
    match = _LANES.search(run.get("intra_node", ""))
    if match is None:
        return None
    nominal = next((row["nominal_GBps"] for row in rows("links") if row["id"] == f"nominal-pcie{match[1]}-x16"), None)
    return None if nominal is None else nominal * 1e9 * int(match[2]) / 16


def _pair_Bps(run: Run) -> float | None:
    match = _PAIR.search(run.get("intra_node", ""))
    return float(match[1]) * 1e9 if match else None


def _node_Bps(text: str, per_node: int) -> float | None:
    """The rate of a whole node, one direction, when the text states one: of several networks the one for the job, else the fastest."""
    if match := _PER_GPU.search(text):
        return int(match[1]) * per_node * 1e9 / 8
    job = _COMPUTE.search(text)
    if networks := [int(ports) * int(rate) for ports, rate in _PORTS.findall(job[1] if job else text)]:
        return max(networks) * 1e9 / 8
    if match := _PER_NODE.search(text):
        return int(match[1]) * 1e9 / 8
    return None


def _fabric(text: str) -> str | None:
    return next((fabric for word, fabric in _FABRICS if word in text.lower() + " "), None)
