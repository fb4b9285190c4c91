"""What a group of `size` ranks, `stride` apart, gets out of the tiers: one arithmetic, for columns and for one group."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from strategist.columns import Column, Mask, Reals, clamped
from strategist.facts.tier import NETWORK, SHARED_MEDIA, Share, Tier, level_of
from strategist.records import dataclass

_STRIDES = 2**31
"""More than any stride, so that members and stride make one key."""


@dataclass(frozen=True, slots=True)
class GroupLink:
    """What limits one group.

    `Bps` is the nominal rate of a ring through the group (bus bandwidth, one direction); `ring_Bps`, `all_reduce_Bps`
    and `all_to_all_Bps` are the bus bandwidths that large collectives reach, `send_Bps` the rate of messages that every member sends to the next. `latency_s` is one walk around the ring
    plus the fixed cost of a collective, `tree_s` one way up a tree of nodes plus that cost, `fill_s` what a message large enough to fill the links takes besides, and `walk_s` what one that walks
    through several nodes takes at most beyond that. `tier` limits `Bps`, and `domains` of the tier below it hold the group's
    members. A group of one has no limit: infinite rates, no latency, no tier.
    """

    Bps: float
    tier: Tier | None
    latency_s: float
    domains: int
    ring_Bps: float
    all_reduce_Bps: float
    all_to_all_Bps: float
    send_Bps: float
    fill_s: float
    walk_s: float
    tree_s: float


class GroupColumns(NamedTuple):
    """The fields of GroupLink, one row per group; `tier` is an index into the tiers, -1 for groups of one. Groups that `leave` have members
    on several nodes, whose ports they use: `inside` of them on each, and `between_Bps` is what an all-to-all gets of tiers between nodes alone."""

    Bps: Reals
    tier: Column
    latency_s: Reals
    domains: Column
    ring_Bps: Reals
    all_reduce_Bps: Reals
    all_to_all_Bps: Reals
    send_Bps: Reals
    fill_s: Reals
    walk_s: Reals
    tree_s: Reals
    leave: Mask
    between_Bps: Reals
    inside: Column


def members_within(size: Column, stride: Column, span: int) -> Column:
    """How many members of a group lie together inside one domain of `span` ranks, for the group that fares worst.

    Groups lie at r + i * stride in blocks of size * stride ranks. Where blocks and domains tile each other this is
    clip(span // stride, 1, size); otherwise some group straddles a border and the smallest piece decides, which the
    greatest common divisor of block and domain bounds from below.
    """
    inside: Column = clamped(np.gcd(size * stride, span) // stride, 1, size)
    return inside


def group_bandwidth(tiers: tuple[Tier, ...], size: int, stride: int = 1) -> GroupLink:
    """What one axis of `size` ranks at `stride` gets: see GroupLink."""
    row = group_columns(tiers, np.array([size]), np.array([stride]))
    index = int(row.tier[0])
    return GroupLink(
        Bps=float(row.Bps[0]),
        tier=tiers[index] if index >= 0 else None,
        latency_s=float(row.latency_s[0]),
        domains=int(row.domains[0]),
        ring_Bps=float(row.ring_Bps[0]),
        all_reduce_Bps=float(row.all_reduce_Bps[0]),
        all_to_all_Bps=float(row.all_to_all_Bps[0]),
        send_Bps=float(row.send_Bps[0]),
        fill_s=float(row.fill_s[0]),
        walk_s=float(row.walk_s[0]),
        tree_s=float(row.tree_s[0]),
    )


def group_columns(tiers: tuple[Tier, ...], size: Column, stride: Column) -> GroupColumns:
    """What many axes get at once: `size` and `stride` are integer columns of one length."""
    size, stride = np.asarray(size, np.int64), np.asarray(stride, np.int64)
    found = _nothing(len(size))
    below = inside = np.ones_like(size)
    for index, tier in enumerate(tiers):
        within = members_within(size, stride, tier.span)
        crossed = within > below
        found = _narrowed(found, index, crossed, _at_tier(tier, _Place(size, stride, below, within)))
        below = within
        inside = inside if level_of(tier.kind) == NETWORK else within
    fixed = _fixed_cost(tiers, size, stride)
    latency_s, tree_s = (np.where(size > 1, steps + fixed, 0.0) for steps in (found.latency_s, found.tree_s))
    return found._replace(latency_s=latency_s, tree_s=tree_s, inside=inside)


class _Place(NamedTuple):
    """Where groups lie relative to one tier: members inside a domain of the tier below and inside one of this tier."""

    size: Column
    stride: Column
    below: Column
    within: Column


def _nothing(rows: int) -> GroupColumns:
    free = np.full(rows, np.inf)
    return GroupColumns(
        free,
        np.full(rows, -1),
        np.zeros(rows),
        np.ones(rows, np.int64),
        free,
        free,
        free,
        free,
        np.zeros(rows),
        np.zeros(rows),
        np.zeros(rows),
        np.zeros(rows, np.bool_),
        free,
        np.ones(rows, np.int64),
    )


def _narrowed(found: GroupColumns, index: int, crossed: Mask, here: GroupColumns) -> GroupColumns:
    """The tighter of two limits, row by row; latencies and what fills the links add up."""
    tighter = crossed & (here.Bps < found.Bps)
    return GroupColumns(
        Bps=np.where(tighter, here.Bps, found.Bps),
        tier=np.where(tighter, index, found.tier),
        latency_s=found.latency_s + np.where(crossed, here.latency_s, 0.0),
        domains=np.where(tighter, here.domains, found.domains),
        ring_Bps=np.where(crossed, np.minimum(here.ring_Bps, found.ring_Bps), found.ring_Bps),
        all_reduce_Bps=np.where(crossed, np.minimum(here.all_reduce_Bps, found.all_reduce_Bps), found.all_reduce_Bps),
        all_to_all_Bps=np.where(crossed, np.minimum(here.all_to_all_Bps, found.all_to_all_Bps), found.all_to_all_Bps),
        send_Bps=np.where(crossed, np.minimum(here.send_Bps, found.send_Bps), found.send_Bps),
        fill_s=found.fill_s + np.where(crossed, here.fill_s, 0.0),
        walk_s=found.walk_s + np.where(crossed, here.walk_s, 0.0),
        tree_s=found.tree_s + np.where(crossed, here.tree_s, 0.0),
        leave=found.leave | (crossed & here.leave),
        between_Bps=np.where(crossed, np.minimum(here.between_Bps, found.between_Bps), found.between_Bps),
        inside=found.inside,
    )


def worse(one: GroupColumns, other: GroupColumns) -> GroupColumns:
    """What groups get that the worse of two sets of links limits, row by row."""
    tighter = other.Bps < one.Bps
    return GroupColumns(
        Bps=np.minimum(one.Bps, other.Bps),
        tier=np.where(tighter, other.tier, one.tier),
        latency_s=np.maximum(one.latency_s, other.latency_s),
        domains=np.where(tighter, other.domains, one.domains),
        ring_Bps=np.minimum(one.ring_Bps, other.ring_Bps),
        all_reduce_Bps=np.minimum(one.all_reduce_Bps, other.all_reduce_Bps),
        all_to_all_Bps=np.minimum(one.all_to_all_Bps, other.all_to_all_Bps),
        send_Bps=np.minimum(one.send_Bps, other.send_Bps),
        fill_s=np.maximum(one.fill_s, other.fill_s),
        walk_s=np.maximum(one.walk_s, other.walk_s),
        tree_s=np.maximum(one.tree_s, other.tree_s),
        leave=one.leave | other.leave,
        between_Bps=np.minimum(one.between_Bps, other.between_Bps),
        inside=np.minimum(one.inside, other.inside),
    )


def _at_tier(tier: Tier, place: _Place) -> GroupColumns:
    """What one tier allows, whether or not it is crossed."""
    size, _, below, within = place
    rate, shares = _looked_up(tier, place)
    ring, reduce, exchange, in_switch, fill = shares.T
    nominal = rate if tier.cuts else below * tier.device_Bps
    reduced = np.where((within == size) | (in_switch == 0), reduce, ring)
    exchanged, leaves = _exchange_rate(tier, place, nominal) * exchange, level_of(tier.kind) == NETWORK
    steps = size / below - size / within
    return GroupColumns(
        Bps=nominal,
        tier=np.zeros_like(size),
        latency_s=steps * tier.hop_s,
        domains=-(-size // below),
        ring_Bps=nominal * ring,
        all_reduce_Bps=nominal * reduced,
        all_to_all_Bps=exchanged,
        send_Bps=(nominal if tier.port_Bps is None else np.minimum(nominal, tier.port_Bps)) * ring,
        fill_s=np.zeros_like(fill) if leaves else fill,
        walk_s=(steps if leaves else size / within - 1.0) * fill,
        tree_s=np.log2(within / below) * tier.tree_s if leaves else (within / below - 1.0) * tier.hop_s,
        leave=np.full(len(size), leaves),
        between_Bps=exchanged if leaves else np.full(len(size), np.inf),
        inside=below,
    )


def _exchange_rate(tier: Tier, place: _Place, nominal: Reals) -> Reals:
    """Bus bandwidth of an all-to-all: every device sends (size - below) / size of its data out of the lower domain.

    Each device has its own share of the uplink and none of its neighbours' to borrow: device_Bps * (n - 1) / (n - b).
    """
    if tier.cuts:
        return nominal
    outside = np.maximum(place.size - place.below, 1)
    rate: Reals = tier.device_Bps * np.maximum(place.size - 1, 1) / outside
    return rate


def _fixed_cost(tiers: tuple[Tier, ...], size: Column, stride: Column) -> Reals:
    """The largest base cost among the tiers that a group crosses: it starts one kernel, not one per tier."""
    fixed, below = np.zeros(len(size)), np.ones_like(size)
    for tier in tiers:
        within = members_within(size, stride, tier.span)
        fixed = np.where(within > below, np.maximum(fixed, tier.base_s), fixed)
        below = within
    return fixed


def _looked_up(tier: Tier, place: _Place) -> tuple[Reals, Reals]:
    """Per group the rate of its cut (0 where the tier has none) and its shares as rows of _row."""
    keys, values = _sorted_rows(tier)
    talking = np.full_like(place.within, tier.span) if tier.kind in SHARED_MEDIA else place.within
    key = place.within * _STRIDES + place.stride if tier.cuts else talking
    at = np.maximum(np.searchsorted(keys, key, side="right") - 1, 0)
    exact = keys[at] == key
    found = values[np.where(exact, at, 0) if tier.cuts else at]
    return found[:, 0], found[:, 1:]


@cache
def _sorted_rows(tier: Tier) -> tuple[Column, Reals]:
    """The lookup of a tier: keys ascending, and for each the rate and the shares.

    Cuts are keyed by members and stride, behind the worst of them for layouts that none describes; shares are keyed
    by the members from which on they hold; where the medium is shared, by all devices of the domain.
    """
    if not tier.cuts:
        return np.array([s.gpus for s in tier.shares]), np.array([(0.0, *_row(s)) for s in tier.shares])
    worst = min(tier.cuts, key=lambda cut: cut.Bps)
    ordered = sorted(tier.cuts, key=lambda cut: (cut.members, cut.stride))
    keys = [-1, *(cut.members * _STRIDES + cut.stride for cut in ordered)]
    return np.array(keys), np.array([(cut.Bps, *_row(cut.share)) for cut in (worst, *ordered)])


def _row(share: Share) -> tuple[float, float, float, float, float]:
    return share.ring, share.all_reduce, share.all_to_all, float(share.in_switch), share.fill_s
