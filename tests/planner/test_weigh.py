"""A bound that answers first changes no answer: what fits, what it weighs, and what misses by least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st

from strategist import recommend
from strategist.errors import NoPlanError
from strategist.facts.calibration import Factor
from strategist.facts.clusters import load_cluster
from strategist.facts.hardware import Cluster, Node, NodeGroup
from strategist.facts.job import Job
from strategist.facts.models import load_model
from strategist.facts.profile import find_profile
from strategist.facts.workload import Workload
from strategist.memory.estimate import least_memory, peak_memory
from strategist.planner.predict import filled
from strategist.planner.search import Question, search
from strategist.planner.situation import one
from strategist.planner.weigh import FEW, Weights, fits, host_bytes_per_device
from strategist.records import replace
from strategist.space.candidates import Candidates, joined, total_of
from strategist.timing.calibrated import PARTS
from strategist.timing.estimate import least_step_ns, step_times
from tests.planner.properties import Properties
from tests.strategies import legal_candidates, machine, questions

PROPERTIES = Properties()


@PROPERTIES.holds(8, questions())
def test_no_layout_peaks_below_its_bound(job: Job) -> None:
    """What a layout reserves for the loss is never more than for its peak, nor what tensors hold than what is reserved, and its
    host share is the same."""
    columns = legal_candidates(job)
    floors, peaks = least_memory(job, columns), peak_memory(job, columns)
    assert (floors.device <= peaks.device).all()
    assert (floors.host == peaks.host).all()
    assert (peaks.terms["slack"] >= 0).all()


@PROPERTIES.holds(8, questions())
def test_no_step_is_shorter_than_its_bound(job: Job) -> None:
    """What is computed and what activations travel, bubble and all, is never more than the step; and it is the step less the traffic
    of dp, the update and offloading wherever no weights that all ranks hold whole are summed within it and no host gathers any."""
    columns = legal_candidates(job)
    times, least = step_times(job, columns), least_step_ns(job, columns)
    assert (least <= times.step).all()
    rest = times.step - total_of(times.exposed[term] for term in ("dp", "optimizer", "offload"))
    assert (least <= rest).all()
    plain = (columns["tp"] == 1) & (columns["pp"] == 1) & (columns["zero"] < 2)
    assert (rest - least <= 2 * len(times.exposed))[plain].all()


def cluster_of(nodes: Sequence[Node]) -> Cluster:
    """One node of each kind, on one fabric."""
    return Cluster(groups=tuple(NodeGroup(node=node, count=1) for node in nodes), origin="flags")


@pytest.mark.parametrize(
    "names", [("aws-p3dn.24xlarge", "ws-4x-4090"), ("ws-4x-4090", "dgx-h100", "aws-p3dn.24xlarge")]
)
def test_the_smallest_device_decides_what_fits_and_the_slowest_how_long_it_takes(names: Sequence[str]) -> None:
    """A V100 of 32 GB multiplies slower than an RTX 4090 of 24 GB: they are two kinds of nodes."""
    cluster = cluster_of([machine(name).groups[0].node for name in names])
    job = Job(cluster=cluster, model=load_model("gpt2"), workload=Workload(), profile=find_profile(), headroom=0.0)
    assert (cluster.smallest.name, cluster.slowest.gpu.name) == ("rtx-4090", "v100-sxm2-32gb")
    assert job.usable_bytes == cluster.smallest.memory_bytes < cluster.slowest.gpu.memory_bytes


@pytest.mark.parametrize("order", [("dgx-h100", "aws-g5.48xlarge"), ("aws-g5.48xlarge", "dgx-h100")])
def test_what_fits_is_what_the_poorest_node_holds(order: tuple[str, str]) -> None:
    """To the byte: a device's peak within the smallest device less the headroom, and what is offloaded within a device's part of nine tenths
    of the memory of the node that has least for each; of a node whose memory nobody knows, nothing."""
    nodes = [machine(name).groups[0].node for name in order]
    job = Job(
        cluster=cluster_of(nodes), model=load_model("gpt2"), workload=Workload(), profile=find_profile(), headroom=0.25
    )
    room, host = int(0.75 * min(node.gpu.memory_bytes for node in nodes)), int(0.9 * 768e9 / 8)
    assert job.usable_bytes == room
    assert host_bytes_per_device(job) == host
    alike = joined([one(**filled(job, {}))] * 4)
    held = np.array([room, room + 1, 0, 0]), np.array([0, 0, host, host + 1])
    assert fits(job, alike, *held).tolist() == [True, False, True, False]
    unknown = replace(job, cluster=cluster_of((nodes[0], replace(nodes[1], ram_bytes=None))))
    assert host_bytes_per_device(unknown) == 0


@pytest.mark.parametrize(
    "name", ["cpu:4", "ws-dgx-spark-2", {"format": "strategist-hardware/1", "gpu": "mi300a", "gpus_per_node": 1}]
)
def test_what_leaves_a_device_for_its_own_memory_is_held_all_the_same(name: Any) -> None:
    """CPU ranks, and chips whose processor and accelerator have one memory, have no other to offload to: both parts together fit it, to the byte."""
    job = Job(cluster=load_cluster(name), model=load_model("gpt2"), workload=Workload(), profile=find_profile())
    alike = joined([one(**filled(job, {}))] * 3)
    usable = job.usable_bytes
    assert fits(job, alike, np.array([usable, usable - 7, usable - 7]), np.array([0, 7, 8])).tolist() == [
        True,
        True,
        False,
    ]


def test_a_spark_holds_no_more_with_its_state_on_the_host() -> None:
    """A model that one memory of 128 GB does not hold trains from the drive, if at all."""
    assert recommend("llama-3.1-8b", "ws-dgx-spark-2", policy="fastest").strategy.offload == "nvme"
    with pytest.raises(NoPlanError):
        recommend("llama-3.1-8b", "ws-dgx-spark-2", pin="offload=parameters")


FACTORS = st.builds(
    Factor,
    part=st.sampled_from(tuple(PARTS)),
    value=st.floats(0.5, 2.0),
    framework=st.sampled_from(("", "strategist", "nemo")),
)


@PROPERTIES.holds(8, questions(), st.lists(FACTORS, max_size=4))
def test_no_step_is_shorter_than_its_bound_under_factors(job: Job, factors: list[Factor]) -> None:
    """So it is under any calibration; factors of other frameworks change nothing, and terms that no factor moves stay as they are where as
    much runs beside compute."""
    columns = legal_candidates(job)
    moved = replace(job, factors=tuple(factors))
    before, after = step_times(replace(job, overlap=moved.overlaps), columns), step_times(moved, columns)
    assert (least_step_ns(moved, columns) <= after.step).all()
    assert (after.step == total_of(after.exposed.values())).all()
    terms = {term: moved.on_parts.get(part, 1.0) for part, own in PARTS.items() for term in own}
    for term, factor in terms.items():
        assert (abs(after.exposed[term] - factor * before.exposed[term]) <= 0.5).all()
    if not moved.on_parts:
        assert (before.step == after.step).all()


@PROPERTIES.holds(8, questions())
def test_a_search_for_a_shorter_step_finds_what_a_whole_search_finds(job: Job) -> None:
    """Told to look below some step, a search finds every layout that fits and takes less, and none that the whole one lacks."""
    whole = search(Question(job=job))
    assume(len(whole.fitting))
    limit = float(np.median(whole.times.step)) / 1e9
    part = search(Question(job=job), under_seconds=limit)
    steps = [sorted(found.times.step[found.times.step < 1e9 * limit].tolist()) for found in (whole, part)]
    assert steps[0] == steps[1]
    assert part.enumerated == whole.enumerated and len(part.fitting) <= len(whole.fitting)


def large(model: str, hardware: str) -> tuple[Job, Candidates]:
    """A question with more legal layouts than are weighed without a bound."""
    cluster = machine(hardware)
    work = Workload(seq_len=4096, global_batch=4 * cluster.world)
    job = Job(cluster=cluster, model=load_model(model), workload=work, profile=find_profile())
    columns = legal_candidates(job)
    assert len(columns) > FEW
    return job, columns


QUESTIONS = (
    ("llama-3.1-8b", "dgx-h100:2"),
    ("llama-3.1-8b", "aws-g5.12xlarge:4"),
    ("mixtral-8x7b", "aws-g5.12xlarge:2"),
)
"""One where half of all layouts fit, one where few do, one where none does."""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "hardware"), QUESTIONS)
def test_the_same_layouts_fit_and_the_same_one_is_leanest(model: str, hardware: str) -> None:
    """Weighed behind the bound, the layouts that fit are those of a full weighing, with the same bytes, and so is the
    first of the leanest among all and among the layouts of every size of tp."""
    job, columns = large(model, hardware)
    weights, peaks = Weights(job, columns), peak_memory(job, columns)
    assert (weights.fits == fits(job, columns, peaks.device, peaks.host)).all()
    assert (weights.device[weights.fits] == peaks.device[weights.fits]).all()
    for rows in (np.arange(len(columns)), *(np.flatnonzero(columns["tp"] == tp) for tp in np.unique(columns["tp"]))):
        (leanest,) = weights.leanest(rows)
        assert leanest == rows[peaks.device[rows].argmin()]
        assert weights.device[leanest] == peaks.device[leanest]


def test_a_device_alone_reserves_what_a_wide_layer_is_copied_into() -> None:
    """Where nobody is gathered from, a layer's copy lies where it computes: no stream of gathering holds it instead."""
    narrow = replace(load_model("llama-debug"), layers=2, hidden=128, heads=8, kv_heads=8, head_dim=16, vocab=257)
    shape = replace(narrow, ffn_hidden=32 * narrow.hidden)
    work = Workload(seq_len=128, global_batch=4)
    job = Job(cluster=machine("ws-1x-4090"), model=shape, workload=work, profile=find_profile())
    peaks = peak_memory(job, legal_candidates(job))
    assert (peaks.terms["slack"] >= 0).all()


@pytest.mark.nightly
@pytest.mark.parametrize("check", PROPERTIES.at_length, ids=lambda check: check.__name__)
def test_at_length(check: Any) -> None:
    """Every property above, over hundreds of new examples."""
    check()
