"""Nodes of several kinds wait for the kind that is last, whatever that is slow in."""

from __future__ import annotations

import numpy as np
import pytest

from strategist.document.estimate import TIME_TERMS
from strategist.facts.clusters import load_cluster
from strategist.facts.hardware import Cluster, NodeGroup
from strategist.facts.job import Job
from strategist.facts.models import load_model
from strategist.facts.profile import find_profile
from strategist.facts.workload import Workload
from strategist.records import replace
from strategist.space.candidates import Candidates
from strategist.timing.estimate import least_step_ns, stage_seconds_CS, step_times
from tests.oracle.test_search import ROUNDING_NS
from tests.strategies import legal_candidates

STAGES = 16


def nodes(name: str, slower: float = 1.0) -> NodeGroup:
    """One node of the catalogue, the links inside which may be slower."""
    group = load_cluster(name).groups[0]
    return replace(group, node=replace(group.node, intra_Bps=group.node.intra_Bps / slower))


def of(*groups: NodeGroup) -> Cluster:
    """A cluster of some nodes."""
    return replace(load_cluster("dgx-h100"), groups=groups)


NARROW, SLOW = nodes("dgx-h100", slower=10.0), nodes("aws-p4d.24xlarge")
"""Fast devices behind slow links, and slow devices behind fast links."""
BOTH = replace(SLOW, node=replace(SLOW.node, intra_Bps=NARROW.node.intra_Bps))
MIXED, MIRRORED = of(NARROW, SLOW), of(SLOW, NARROW)
EACH = of(replace(NARROW, count=2)), of(replace(SLOW, count=2))
WORST = of(replace(BOTH, count=2))


def job_on(cluster: Cluster, model: str) -> Job:
    """A job of a few hundred sequences."""
    work = Workload(seq_len=2048, global_batch=64)
    return Job(cluster=cluster, model=load_model(model), workload=work, profile=find_profile())


@pytest.fixture(params=("llama-2-7b", "mixtral-8x7b"), scope="module")
def asked(request: pytest.FixtureRequest) -> tuple[str, Candidates]:
    """A model, and layouts that a search looks at."""
    legal = legal_candidates(job_on(MIXED, request.param), forbids=("offload",))
    return request.param, legal.where(np.arange(0, len(legal), -(-len(legal) // 3000)))


def test_a_step_is_no_sooner_than_on_either_kind_and_no_later_than_on_nodes_with_the_faults_of_both(
    asked: tuple[str, Candidates],
) -> None:
    """And below the latter wherever groups inside a node send: the fast devices alone have the slow links."""
    model, columns = asked
    mixed, worst = (step_times(job_on(cluster, model), columns) for cluster in (MIXED, WORST))
    for alone in EACH:
        assert (step_times(job_on(alone, model), columns).step <= mixed.step + ROUNDING_NS).all()
    assert (mixed.step <= worst.step + ROUNDING_NS).all()
    inside = (columns["tp"] > 1) & (columns["tp"] <= 8)
    assert inside.any()
    assert (mixed.step < worst.step)[inside].all()


def test_the_order_of_kinds_changes_nothing(asked: tuple[str, Candidates]) -> None:
    """Every term of every layout is the same whichever kind is named first."""
    model, columns = asked
    one, other = (step_times(job_on(cluster, model), columns) for cluster in (MIXED, MIRRORED))
    assert np.array_equal(one.step, other.step)
    for kind in ("exposed", "hidden", "again"):
        for term in TIME_TERMS:
            assert np.array_equal(getattr(one, kind)[term], getattr(other, kind)[term])


def test_terms_are_those_of_the_kind_that_is_last(asked: tuple[str, Candidates]) -> None:
    """They add up to the step, and compute in matrices is that of one of the two kinds; of several stages, of which the links between
    nodes decide which is last, no more than on the kind that takes longer for it."""
    model, columns = asked
    mixed = step_times(job_on(MIXED, model), columns)
    assert np.array_equal(sum(mixed.exposed.values()), mixed.step)
    each = [step_times(job_on(alone, model), columns).exposed["matmul"] for alone in EACH]
    paced = [mixed.exposed["matmul"] == seconds for seconds in each]
    assert np.logical_or(*paced)[columns["pp"] == 1].all()
    assert (mixed.exposed["matmul"] <= np.maximum(*each)).all()
    assert all(some.any() for some in paced)


def test_bounds_and_stages_know_all_kinds(asked: tuple[str, Candidates]) -> None:
    """The bound is below each step and no lower than on either kind; a stage takes what it takes on the kind where that is most."""
    model, columns = asked
    job = job_on(MIXED, model)
    bound = least_step_ns(job, columns)
    assert (bound <= step_times(job, columns).step).all()
    for alone in EACH:
        assert (least_step_ns(job_on(alone, model), columns) <= bound + ROUNDING_NS).all()
        assert (
            stage_seconds_CS(job_on(alone, model), columns, STAGES)
            <= stage_seconds_CS(job, columns, STAGES) * (1.0 + 1e-12)
        ).all()


def test_one_kind_under_two_names_is_one_kind() -> None:
    """Equal nodes in two groups are priced as one group of them."""
    together, apart = of(replace(SLOW, count=2)), of(SLOW, replace(SLOW, name="other"))
    columns = legal_candidates(job_on(together, "llama-2-7b"), forbids=("offload", "pp", "cp"))
    one, other = (step_times(job_on(cluster, "llama-2-7b"), columns) for cluster in (together, apart))
    assert np.array_equal(one.step, other.step)
