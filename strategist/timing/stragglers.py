"""How long all devices wait for the slowest of them: devices of one kind are not equally fast, and a step ends with the last."""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

from strategist.facts.job import Job
from strategist.timing.rates import share

OF_A_NODE = 8
"""Devices that the sustained shares of products were set with: how slow the slowest of so many is stands in those."""


@cache
def slowest_of(devices: int) -> float:
    """By how many standard deviations the slowest of some devices is expected to lag, for normal speeds. Source: Blom 1958, Statistical
    Estimates and Transformed Beta-Variables, chapter 6: the largest of n lies at the quantile (n - 3/8) / (n + 1/4)."""
    return NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25)) if devices > 1 else 0.0


def straggling(job: Job) -> float:
    """What the slowest device computes longer than the slowest of one node would, as a share of its compute."""
    spread, everybody = share("device_spread", job.cluster.slowest.gpu), job.all_machines or job.cluster
    return spread * max(0.0, slowest_of(everybody.world) - slowest_of(OF_A_NODE))
