"""What a cluster is made of. Bytes, bytes per second (one direction), FLOP per second; facts only, no conclusions."""

from __future__ import annotations

from typing import Literal

from strategist.records import dataclass, replace

Basis = Literal["measured", "rehearsed", "traced", "derived", "datasheet", "assumed"]
"""How a number is known, strongest first; of several inputs the weakest wins (`weakest`)."""

BASES: tuple[Basis, ...] = ("measured", "rehearsed", "traced", "derived", "datasheet", "assumed")

Topology = Literal[
    "nvswitch", "nvlink-mesh", "nvlink-pairs", "xgmi-mesh", "pcie-switch", "pcie-host", "roce-mesh", "torus", "memory", "none"
]  # fmt: skip


def weakest(*bases: Basis) -> Basis:
    """The least trustworthy of some bases: one assumed input makes the result assumed."""
    return max(bases, key=BASES.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator (or the CPU as a device). Peaks are dense with fp32 accumulation; None means unsupported. One that `shares_host` has no
    memory of its own: what leaves it for the host stays where it was."""

    name: str
    title: str
    vendor: str
    arch: str
    memory_bytes: int
    memory_Bps: float
    fp32_FLOPs: float | None
    tf32_FLOPs: float | None = None
    fp16_FLOPs: float | None = None
    bf16_FLOPs: float | None = None
    fp8_FLOPs: float | None = None
    fp4_FLOPs: float | None = None
    matmul_measured_FLOPs: float | None = None
    host_Bps: float | None = None
    shares_host: bool = False
    sm_count: int | None = None
    compute_capability: str | None = None
    tdp_W: float | None = None
    scale_up: str = ""
    scale_up_Bps: float | None = None
    basis: Basis = "datasheet"
    source: str = ""

    @property
    def chip(self) -> str:
        """What devices of one design share: the compute capability, else the architecture."""
        return self.compute_capability or self.arch


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between two ids; `Bps` is one direction.

    Inside a node the ids are gpu0, nic1, numa0, pcie0, nvswitch0, root0; between nodes they are names of nodes and
    switches.
    """

    a: str
    b: str
    kind: str
    Bps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host. `intra_Bps` is per GPU over all its fast links; `inter_Bps` is the whole node's rate to other nodes.

    `fast_domain` counts the GPUs that share the fast links; it exceeds `gpus` where a rack is one domain (NVL72) and
    falls short of it where a node holds several domains. `links`, when given, replaces the regular picture that
    `topology` stands for; links between GPUs alone describe a mesh, beside which every GPU keeps its host link.
    An `inter_Bps` of zero means that nobody knows how the node reaches others.
    """

    name: str
    gpu: Gpu
    gpus: int
    fast_domain: int
    topology: Topology
    intra_Bps: float
    pair_Bps: float
    inter_Bps: float
    nics: int = 0
    fabric: str = "none"
    rdma: bool = False
    vcpus: int | None = None
    ram_bytes: int | None = None
    nvme_read_Bps: float | None = None
    price_per_hour: float | None = None
    price_note: str = ""
    links: tuple[Link, ...] = ()
    basis: Basis = "datasheet"
    source: str = ""


def with_gpus(node: Node, gpus: int) -> Node:
    """The node with its first `gpus` devices and what joins them: in a mesh each keeps its links to those that are left."""
    left = {f"gpu{i}" for i in range(gpus)}
    links = tuple(
        link for link in node.links if all(end in left or not end.startswith("gpu") for end in (link.a, link.b))
    )
    peers = (gpus - 1) / (node.gpus - 1) if node.topology.endswith("-mesh") and node.gpus > 1 else 1.0
    return replace(
        node, gpus=gpus, fast_domain=min(node.fast_domain, gpus), intra_Bps=node.intra_Bps * peers, links=links
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """`count` equal nodes; `name` is how the links of a cluster call them."""

    node: Node
    count: int
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines of one job. `origin` says who told us; `oversubscription` divides the rate between nodes.

    `links` between named nodes and `switches`, when given, replace the single fabric that joins all nodes.
    """

    groups: tuple[NodeGroup, ...]
    origin: Literal["catalogue", "flags", "file", "probed", "assumed"]
    oversubscription: float = 1.0
    links: tuple[Link, ...] = ()
    switches: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        """How many hosts."""
        return sum(group.count for group in self.groups)

    @property
    def world(self) -> int:
        """How many devices, which is how many ranks a job on all of it has."""
        return sum(group.count * group.node.gpus for group in self.groups)

    @property
    def smallest(self) -> Gpu:
        """The device with the least memory: it decides what fits."""
        return min((group.node.gpu for group in self.groups), key=lambda gpu: gpu.memory_bytes)

    @property
    def slowest(self) -> Node:
        """The node whose devices multiply slowest: it decides how long a synchronous step takes."""
        return min((g.node for g in self.groups), key=lambda n: (n.gpu.bf16_FLOPs or n.gpu.fp16_FLOPs or n.gpu.fp32_FLOPs or 0.0))  # fmt: skip

    @property
    def without_drive(self) -> Node | None:
        """A node of which no drive is known; none where state can rest on drives."""
        return next((group.node for group in self.groups if not group.node.nvme_read_Bps), None)

    @property
    def shares_host(self) -> bool:
        """Whether devices of some node and its host have one memory."""
        return any(group.node.gpu.shares_host for group in self.groups)

    @property
    def is_regular(self) -> bool:
        """One kind of node, with the regular picture of its topology and one fabric between nodes."""
        return len(self.groups) == 1 and not self.groups[0].node.links and not self.links


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedCluster(Cluster):
    """Machines of several kinds whose step those of one kind set the `pace` of: their devices compute, and their links join what is
    inside a node. Memory, and the network between nodes, are those of all."""

    pace: Node

    @property
    def slowest(self) -> Node:
        """See above."""
        return self.pace
