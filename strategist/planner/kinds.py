"""Nodes of several kinds, and those of each kind alone."""

from __future__ import annotations

from collections.abc import Iterator

from strategist.facts.hardware import Cluster
from strategist.records import replace

UNEVEN = "uneven_batch"
"""The word of --also, the column and the field of a Strategy for batches of which faster nodes take more."""


def is_mixed(cluster: Cluster) -> bool:
    """Several kinds of nodes on one fabric, so that any of them are a cluster of their own."""
    return len(cluster.groups) > 1 and not cluster.links


def kinds(cluster: Cluster) -> Iterator[Cluster]:
    """All nodes of each kind, alone."""
    for group in cluster.groups:
        yield replace(cluster, groups=(group,))
