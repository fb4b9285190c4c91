"""A cluster as a plain-text tree: its tiers, its nodes, what is inside them and how they reach others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from strategist.errors import shown
from strategist.facts.hardware import Cluster, Link, Node, NodeGroup
from strategist.facts.tier import Tier
from strategist.facts.tiers import tiers
from strategist.units import format_gib, format_rate

LINK_LIMIT = 40
GROUP_LIMIT = 24


class Branch(NamedTuple):
    """One line of a tree and the lines under it."""

    text: str
    under: tuple[Branch, ...] = ()


def text_tree(cluster: Cluster) -> str:
    """The cluster as lines of text, drawn with box characters and ending in a newline."""
    return "\n".join(_lines(cluster_tree(cluster), "", "")) + "\n"


def cluster_tree(cluster: Cluster) -> Branch:
    """The tree of a cluster: one branch for its tiers, one for each kind of node."""
    devices = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)}, {cluster.world} device{'s' * (cluster.world > 1)}"
    layers = Branch("tiers, innermost first", tuple(Branch(tier_line(tier)) for tier in tiers(cluster)))
    kinds = [_group(group) for group in cluster.groups[:GROUP_LIMIT]]
    if len(cluster.groups) > GROUP_LIMIT:
        kinds.append(Branch(f"and {len(cluster.groups) - GROUP_LIMIT} more kinds of node"))
    between = (Branch("links between nodes", tuple(_links(cluster.links))),) if cluster.links else ()
    return Branch(f"cluster: {devices} ({cluster.origin})", (*((layers,) if layers.under else ()), *kinds, *between))


def tier_line(tier: Tier) -> str:
    """One tier in a line; where pairs are unequal, the range over the layouts of groups."""
    via = "" if tier.name == tier.kind else f" over {tier.kind}"
    rates = [cut.Bps for cut in tier.cuts]
    rate = f"{format_rate(min(rates))} to {format_rate(max(rates))} per group, by its layout" if rates else f"{format_rate(tier.device_Bps)} per device"  # fmt: skip
    return f"{tier.name}{via}: joins {tier.span} devices, {rate} ({tier.basis})"


def node_title(group: NodeGroup) -> str:
    """The nodes of a group in a few words."""
    node, name = group.node, f" {group.name}" if group.name and group.name != group.node.name else ""
    return shown(f"{group.count} x {node.name}{name}: {node.gpus} x {node.gpu.title}")


def _group(group: NodeGroup) -> Branch:
    return Branch(node_title(group), tuple(_facts(group.node)))


def _facts(node: Node) -> Iterator[Branch]:
    yield Branch(f"memory: {format_gib(node.gpu.memory_bytes)} per device ({node.gpu.basis})")
    if node.links:
        yield Branch("inside: linked as follows", tuple(_links(node.links)))
    elif node.gpus > 1:
        domain = f", domains of {node.fast_domain}" if node.fast_domain != node.gpus else ""
        yield Branch(f"inside: {node.topology}, {format_rate(node.intra_Bps)} per device{domain} ({node.basis})")
    yield Branch(f"outside: {outside(node)}")
    if node.ram_bytes:
        yield Branch(f"host: {node.vcpus or '?'} CPUs, {format_gib(node.ram_bytes)}")


def outside(node: Node) -> str:
    """How a node reaches others, in a few words."""
    if not node.inter_Bps:
        return "no known rate"
    ports = f"{node.nics} port{'s' * (node.nics > 1)}, " if node.nics else ""
    return f"{ports}{format_rate(node.inter_Bps)} per node over {shown(node.fabric)}{', RDMA' if node.rdma else ''}"


def _links(links: tuple[Link, ...]) -> Iterator[Branch]:
    for link in links[:LINK_LIMIT]:
        yield Branch(f"{shown(link.a)} - {shown(link.b)}: {link.kind}, {format_rate(link.Bps)}")
    if len(links) > LINK_LIMIT:
        yield Branch(f"and {len(links) - LINK_LIMIT} more")


def _lines(branch: Branch, first: str, rest: str) -> Iterator[str]:
    yield first + branch.text
    for index, child in enumerate(branch.under):
        last = index == len(branch.under) - 1
        yield from _lines(child, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))
