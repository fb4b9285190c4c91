"""Unlike nodes in one cluster: the blocks of ranks that fit into every one of them, at the rate of the worst."""

from __future__ import annotations

from math import gcd

from strategist.facts.domains import inner_tiers
from strategist.facts.groups import group_bandwidth
from strategist.facts.hardware import NodeGroup, weakest
from strategist.facts.tier import Cut, Share, Tier
from strategist.records import replace


def joined(groups: tuple[NodeGroup, ...]) -> tuple[NodeGroup, ...]:
    """Neighbouring groups of equal nodes as one group: how a list is written must not change what it means."""
    merged: list[NodeGroup] = []
    for group in groups:
        if merged and merged[-1].node == group.node:
            merged[-1] = replace(merged[-1], count=merged[-1].count + group.count)
        else:
            merged.append(group)
    return tuple(merged)


def mixed_tiers(groups: tuple[NodeGroup, ...]) -> tuple[Tier, ...]:
    """One tier for unlike nodes: the largest block that fits every node, each layout at the rate of the worst node."""
    return block_tiers(groups, [inner_tiers(group) for group in groups])


def block_tiers(groups: tuple[NodeGroup, ...], own: list[tuple[Tier, ...]]) -> tuple[Tier, ...]:
    """The tier of blocks that fit into every node, or none; `own` are the tiers of one node of each group."""
    span = gcd(*(group.node.gpus for group in groups))
    if span == 1:
        return ()
    cuts = tuple(min((_cut(tiers, m, s) for tiers in own), key=lambda cut: cut.Bps) for m, s in tilings(span))
    every = [tier for part in own for tier in part]
    slowest = min(every, key=lambda tier: tier.device_Bps)
    return (
        Tier(
            name="node",
            kind=slowest.kind,
            span=span,
            device_Bps=max(cut.Bps for cut in cuts),
            hop_s=max(tier.hop_s for tier in every),
            base_s=max(tier.base_s for tier in every),
            cuts=cuts,
            basis=weakest(*(tier.basis for tier in every)),
            source=slowest.source,
        ),
    )


def tilings(span: int) -> list[tuple[int, int]]:
    """Every (members, stride) whose blocks tile `span` ranks."""
    return [(m, s) for m in range(2, span + 1) for s in range(1, span // m + 1) if span % (m * s) == 0]


def _cut(tiers: tuple[Tier, ...], members: int, stride: int) -> Cut:
    """What the tiers of a node give to a layout, as one cut."""
    link = group_bandwidth(tiers, members, stride)
    tier = link.tier or tiers[0]
    share = Share(
        gpus=members,
        ring=link.ring_Bps / link.Bps,
        all_reduce=link.all_reduce_Bps / link.Bps,
        all_to_all=link.all_to_all_Bps / link.Bps,
        in_switch=any(known.in_switch for known in tier.shares),
        fill_s=link.fill_s,
    )
    return Cut(members, stride, link.Bps, tier.kind, share)
