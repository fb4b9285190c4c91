"""Ports between nodes are taken once: what axes hide behind the same compute adds up, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strategist.document.estimate import TIME_TERMS
from strategist.facts.clusters import load_cluster
from strategist.facts.groups import group_columns
from strategist.facts.job import Job
from strategist.facts.models import load_model
from strategist.facts.profile import find_profile
from strategist.facts.tiers import tiers
from strategist.facts.workload import Workload
from strategist.space.candidates import Candidates, Reals
from strategist.timing.compute import COMPUTE_TERMS
from strategist.timing.estimate import StepTimes, least_step_ns, step_times
from strategist.timing.ports import Ports, Shares
from strategist.timing.rates import share
from tests.oracle.ports import is_between_nodes
from tests.strategies import legal_candidates, machine

ONE = np.ones((1, 1))
BOTH: Shares = {"forward": 0.25, "backward": 0.75}


def seconds(value: float) -> Reals:
    """A number as columns."""
    return value * ONE


def test_the_second_axis_has_what_the_first_left() -> None:
    """Of two seconds in which a pass sends, one who came before takes its part of that pass in as many micro-batches."""
    ports = Ports({"forward": seconds(0.5), "backward": seconds(1.0)})
    assert ports.too_much(seconds(4.0), seconds(4.0), BOTH) == 0.0
    assert ports.too_much(seconds(1.5), seconds(4.0), {"forward": 1.0}) == pytest.approx(0.5)  # 4 x 0.5 - 1 are left
    assert ports.too_much(seconds(0.5), seconds(2.0), {"backward": 1.0}) == 0.0  # 2 x 1 - 2/4 of 3 are left
    assert ports.too_much(seconds(0.2), seconds(2.0), {"backward": 1.0}) == pytest.approx(0.2)


def question(model: str, hardware: str, profile: str, seq_len: int, batch: int) -> tuple[Job, Candidates]:
    """A job under a framework, and every fifth layout that a search looks at."""
    work = Workload(seq_len=seq_len, global_batch=batch)
    job = Job(cluster=load_cluster(hardware), model=load_model(model), workload=work, profile=find_profile())
    legal = legal_candidates(job, forbids=("offload",))
    return replace(job, profile=find_profile(profile)), legal.where(np.arange(0, len(legal), 5))


LONG = ("llama-3.1-8b", "dgx-h100:2", "strategist", 32768, 8)
PIPED = ("llama-2-7b", "ws-4x-4090:2", "nemo", 4096, 32)


def alone(job: Job, columns: Candidates, patched: pytest.MonkeyPatch) -> StepTimes:
    """The times if every axis had ports of its own."""
    with patched.context() as inside:
        inside.setattr(Ports, "too_much", lambda self, wanted, rounds, shares: np.zeros_like(wanted))
        return step_times(job, columns)


@pytest.mark.parametrize("asked", [LONG, PIPED], ids=lambda asked: str(asked[2]))
def test_sharing_exposes_what_came_last(asked: tuple[str, str, str, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layouts take longer and none takes less. What is exposed was hidden: less what compute loses to collectives it is as much
    more as less is hidden; cp and tp keep what they had."""
    job, columns = question(*asked)
    shared, own = step_times(job, columns), alone(job, columns, monkeypatch)
    assert (shared.step >= own.step).all()
    assert (shared.step > own.step).any()
    for term in (*COMPUTE_TERMS, "tp", "cp", "ep", "optimizer"):
        assert (shared.exposed[term] == own.exposed[term]).all()
        assert (shared.hidden[term] == own.hidden[term]).all()
    single = columns["pp"] == 1
    more, less = shared.exposed["dp"] - own.exposed["dp"], own.hidden["dp"] - shared.hidden["dp"]
    assert (np.abs(more - less)[single] <= 1).all()
    assert (least_step_ns(job, columns) <= shared.step).all()


def test_no_more_is_hidden_between_nodes_than_there_is_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings and data parallelism of one stage that both leave their nodes hide no more, together, than compute that anything may run
    behind. With ports of their own they did."""
    job, columns = question(*LONG)
    leaves = (columns["pp"] == 1) & (columns["cp"] * columns["tp"] > 8) & columns.is_word("context_parallel", "ring")
    columns = columns.where(leaves)
    gpu = job.cluster.slowest.gpu
    most = share("overlap_share", gpu) * (1.0 - share("contention_share", gpu))
    together, apart = step_times(job, columns), alone(job, columns, monkeypatch)
    computing: Reals = np.sum([together.exposed[term] for term in (*COMPUTE_TERMS, "loss")], axis=0)
    hidden = [times.hidden["cp"] + times.hidden["dp"] for times in (together, apart)]
    assert (hidden[0] <= most * computing + len(TIME_TERMS)).all()
    assert (hidden[1] > hidden[0]).any()


@pytest.mark.parametrize(
    ("model", "hardware", "profile"), [("llama-3.1-8b", "dgx-h100", "strategist"), ("llama-2-7b", "ws-4x-4090", "nemo")]
)
def test_inside_a_node_nothing_is_shared(
    model: str, hardware: str, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one node no message takes a port, and every layout is what it was."""
    job, columns = question(model, hardware, profile, 4096, 8)
    shared, own = step_times(job, columns), alone(job, columns, monkeypatch)
    assert (shared.step == own.step).all()
    assert all((shared.hidden[term] == own.hidden[term]).all() for term in TIME_TERMS)


@pytest.mark.parametrize("hardware", ["dgx-h100:4", "aws-p4d.24xlarge:3", "ws-4x-4090:2", "dgx-gb200-nvl72-tray:36"])
def test_groups_that_leave_a_node_are_those_that_a_network_joins(hardware: str) -> None:
    """The columns say of every group what counting the ranks of all its likes says."""
    cluster = machine(hardware)
    world = cluster.world
    pairs = [(n, s) for n in range(1, world + 1) for s in range(1, world // n + 1) if world % (n * s) == 0]
    found = group_columns(tiers(cluster), *(np.array(column) for column in zip(*pairs, strict=True))).leave
    assert found.tolist() == [is_between_nodes(cluster, *pair) if pair[0] > 1 else False for pair in pairs]
