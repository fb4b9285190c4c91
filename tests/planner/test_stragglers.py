"""Waiting for the slowest device: how it grows, and what it rests on."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from strategist.facts.job import Job
from strategist.facts.models import load_model
from strategist.facts.profile import find_profile
from strategist.facts.workload import Workload
from strategist.timing.compute import COMPUTE_TERMS
from strategist.timing.estimate import step_times
from strategist.timing.rates import share
from strategist.timing.stragglers import slowest_of
from tests.planner.test_layout_properties import PLAIN
from tests.strategies import candidates, machine


def expected_largest(devices: int) -> float:
    """The mean of the largest of some normal numbers, by the trapezoidal rule over its density."""
    normal, at = NormalDist(), np.linspace(-6.0, 8.0, 4001)
    below, density = (np.array([rule(x) for x in at.tolist()]) for rule in (normal.cdf, normal.pdf))
    return float(np.trapezoid(at * devices * density * below ** (devices - 1), at))


@pytest.mark.parametrize("devices", [2, 8, 64, 512, 16384])
def test_the_slowest_lags_as_the_largest_of_normal_numbers(devices: int) -> None:
    """Blom's quantile is the mean of the largest of n normal numbers within three hundredths of a standard deviation."""
    assert slowest_of(devices) == pytest.approx(expected_largest(devices), abs=0.03)


def test_one_device_waits_for_nobody() -> None:
    """There is no slowest of one, and the more there are, the slower it is."""
    assert slowest_of(1) == 0
    lags = [slowest_of(2**n) for n in range(1, 20)]
    assert lags == sorted(set(lags))


def waited(nodes: int) -> tuple[float, float]:
    """Nanoseconds of the term, and of compute, for replicas of the same work on some nodes."""
    cluster = machine(f"dgx-h100:{nodes}")
    work = Workload(seq_len=2048, global_batch=8 * nodes)
    job = Job(cluster=cluster, model=load_model("llama-3.2-1b"), workload=work, profile=find_profile())
    times = step_times(job, candidates([PLAIN | {"dp_replicate": 8 * nodes}]))
    return float(times.exposed["straggler"][0]), float(sum(times.exposed[name][0] for name in (*COMPUTE_TERMS, "loss")))


def test_only_what_is_computed_beyond_one_node_waits() -> None:
    """On one node nobody waits; on more the term is the lag beyond that of a node, in spreads of the catalogue, of what is computed."""
    assert waited(1)[0] == 0
    for nodes in (2, 64):
        late, computing = waited(nodes)
        spread = share("device_spread", machine("dgx-h100").slowest.gpu)
        expected = computing * spread * (slowest_of(8 * nodes) - slowest_of(8))
        assert late == pytest.approx(expected, abs=1)  # whole nanoseconds
        assert 0.003 < late / computing < 0.05
