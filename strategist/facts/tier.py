"""The words of a network: kinds of link, what a collective gets out of them, and one tier of a cluster."""

from __future__ import annotations

from typing import Literal, get_args

from strategist.facts.hardware import Basis
from strategist.records import dataclass

Kind = Literal[
    "nvlink", "xgmi", "roce-mesh", "torus", "shared-memory", "pcie-p2p", "pcie-host",
    "infiniband", "efa", "roce", "slingshot", "tcpx", "tcp",
]  # fmt: skip
"""Closed list of link kinds: those that scale up, those through the host, those between nodes."""

KINDS: tuple[Kind, ...] = get_args(Kind)
SCALE_UP: tuple[Kind, ...] = ("nvlink", "xgmi", "roce-mesh", "torus", "shared-memory")
HOST: tuple[Kind, ...] = ("pcie-p2p", "pcie-host")

SHARED_MEDIA: tuple[Kind, ...] = ("shared-memory", "pcie-host")
"""Everything on these links passes the host's memory: groups that talk at once take from each other, whatever their size."""

LEVELS = ("scale-up", "host", "network")
NETWORK = LEVELS.index("network")


def level_of(kind: str) -> int:
    """0 for links that scale up, 1 for links through the host, 2 for links between nodes.

    A ring uses the lowest level that joins its members, and leaves a domain of a lower level only to reach members
    outside it.
    """
    if kind in SCALE_UP:
        return 0
    return 1 if kind in HOST else 2


@dataclass(frozen=True, slots=True)
class Share:
    """Achieved over nominal bandwidth for large messages among `gpus` members of one domain (0: any number).

    `ring` holds for all-gather, reduce-scatter and send/receive; `all_reduce` includes reduction in the switch where
    `in_switch` is set and then only for groups inside one domain; `all_to_all` is its own. A message that fills the links
    takes `fill_s` longer than start-up and bytes, between nodes for each step to the next: small ones go by protocols that start sooner.
    """

    gpus: int
    ring: float
    all_reduce: float
    all_to_all: float
    in_switch: bool = False
    fill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cut:
    """What a group gets inside a domain whose pairs are unequal: `members` of it at `stride`, the worst placement.

    `Bps` is the narrowest cut between the members; `kind` and `shares` belong to the links it cuts.
    """

    members: int
    stride: int
    Bps: float
    kind: Kind
    share: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One level of a cluster's network. Tiers are listed innermost first; the last one spans the world.

    `span` is how many ranks one domain joins. `device_Bps` is what one device can send, one direction, to devices
    outside its domain of the tier below: its share of the uplink. `cuts`, when given, replace that product inside the
    domain. `port_Bps` is what one message between two devices gets at most: a ring
    of devices leaves a node through one of them, however many of the node's devices are in it; None where that is not
    known and it may get as much as a ring. `base_s` is paid once per collective, `hop_s` per step along a ring that crosses this tier, and
    between nodes `tree_s` per step up or down a tree.
    """

    name: str
    kind: Kind
    span: int
    device_Bps: float
    hop_s: float
    base_s: float = 0.0
    tree_s: float = 0.0
    shares: tuple[Share, ...] = (Share(0, 1.0, 1.0, 1.0),)
    cuts: tuple[Cut, ...] = ()
    port_Bps: float | None = None
    basis: Basis = "datasheet"
    source: str = ""
