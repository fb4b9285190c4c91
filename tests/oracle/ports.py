"""Which groups of ranks are on several nodes, and whose messages a port between nodes carries first while a stage computes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache

from strategist.facts.hardware import Cluster
from strategist.facts.tiers import tiers

BETWEEN_NODES = ("infiniband", "efa", "roce", "slingshot", "tcpx", "tcp")


@cache
def is_between_nodes(cluster: Cluster, size: int, stride: int) -> bool:
    """Whether some group of so many ranks, so far apart, has members that only a network joins: every group of the world is looked at."""
    inside = 1
    for tier in tiers(cluster):
        if tier.kind in BETWEEN_NODES:
            break
        inside = tier.span
    else:
        return False
    whole = size * stride
    firsts = (block + place for block in range(0, cluster.world, whole) for place in range(stride))
    return any(first // inside != (first + whole - stride) // inside for first in firsts)


@cache
def members_of_a_node(cluster: Cluster, size: int) -> int:
    """How many neighbours of a group of so many are on the node that has fewest of them: every group of the world is looked at."""
    inside = max((tier.span for tier in tiers(cluster) if tier.kind not in BETWEEN_NODES), default=1)
    firsts = range(0, cluster.world - size + 1, size)
    return min(min(Counter((first + i) // inside for i in range(size)).values()) for first in firsts)


@dataclass
class Port:
    """What one micro-batch's passes leave for messages, and what others sent beside them: (seconds a step, micro-batches, the
    part of them in forward)."""

    forward: float
    backward: float
    sent: list[tuple[float, float, float]] = field(default_factory=list)

    def late(self, seconds: float, rounds: float, ahead: float, passes: str) -> float:
        """Send `seconds` a step in `rounds` micro-batches, `ahead` of them in forward; of some passes only. Gives what has no time left."""
        time = 0.0
        if passes != "backward":
            time += self.forward * rounds - sum(self._in(rounds, own) * own[2] for own in self.sent)
        if passes != "forward":
            time += self.backward * rounds - sum(self._in(rounds, own) * (1 - own[2]) for own in self.sent)
        sends = min(seconds, max(0.0, time))
        self.sent.append((sends, rounds, ahead))
        return seconds - sends

    @staticmethod
    def _in(rounds: float, own: tuple[float, float, float]) -> float:
        """Seconds of other messages in so many micro-batches: those have as much in each of theirs."""
        seconds, micro_batches, _ = own
        return seconds / micro_batches * min(rounds, micro_batches) if seconds else 0.0
