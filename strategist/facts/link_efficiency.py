"""How much of a link's nominal rate collectives get, and what a hop costs: rows of the catalogue by kind of link."""

from __future__ import annotations

from functools import cache

from strategist.catalog import Row, rows
from strategist.facts.hardware import Basis
from strategist.facts.tier import Kind, Share
from strategist.records import dataclass


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What is known about one kind of link. `shares` ascend in `gpus`; a count between two rows takes the smaller. A step up or down a tree
    takes `tree_s`, as long as one along a ring where nothing else is known."""

    kind: Kind
    shares: tuple[Share, ...]
    hop_s: float
    base_s: float
    tree_s: float
    basis: Basis
    source: str

    def share(self, members: int) -> Share:
        """The share for a group with this many members in the domain."""
        return next((s for s in reversed(self.shares) if s.gpus <= members), self.shares[0])


@cache
def efficiency(kind: Kind, variant: str = "", *, in_switch: bool = True) -> Efficiency:
    """The efficiency of a kind of link.

    `variant` is the architecture of the GPU or the name of the fabric; a kind without rows for it answers with its
    general rows. Without `in_switch` an all-reduce gets what a ring gets (meshes have no switch to reduce in).
    """
    of_kind = [row for row in rows("link_efficiency") if row["kind"] == kind]
    chosen = [row for row in of_kind if row["variant"] == variant] or [row for row in of_kind if row["variant"] == ""]
    first = chosen[0]
    return Efficiency(
        kind=kind,
        shares=tuple(_share(row, in_switch) for row in chosen),
        hop_s=first["hop_us"] * 1e-6,
        base_s=first["base_us"] * 1e-6,
        tree_s=first["tree_us" if "tree_us" in first else "hop_us"] * 1e-6,
        basis=first["basis"],
        source=first["source"],
    )


def _share(row: Row, in_switch: bool) -> Share:
    reduces = row["in_switch"]
    all_reduce = row["all_reduce_share"] if in_switch or not reduces else row["ring_share"]
    return Share(
        gpus=row["gpus"] or 0,
        ring=row["ring_share"],
        all_reduce=all_reduce,
        all_to_all=row["all_to_all_share"],
        in_switch=reduces and in_switch,
        fill_s=row["fill_us"] * 1e-6,
    )


@cache
def fabric_kind(fabric: str) -> Kind:
    """The kind of link that a fabric of the catalogue or of a hardware file is; unknown words are taken as TCP."""
    kind: Kind = next((row["kind"] for row in rows("fabrics") if row["fabric"].lower() == fabric.lower()), "tcp")
    return kind
