"""The columns of the package and the scalar oracle say the same of every layout, term by term."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strategist.document.estimate import MOMENTS
from strategist.errors import ImpossibleError
from strategist.facts.adapters import ATTENTION, TARGETS, as_trained, with_adapters
from strategist.facts.clusters import load_cluster
from strategist.facts.job import Job
from strategist.facts.model import ModelShape
from strategist.facts.model_parts import Moe
from strategist.facts.models import load_model
from strategist.facts.parameters import table_width
from strategist.facts.profile import find_profile, frameworks, with_dispatcher
from strategist.facts.workload import Workload
from strategist.memory.estimate import peak_memory
from strategist.memory.saved import REDONE
from strategist.planner.write import memory_ledger
from strategist.space.candidates import MESH_COLUMNS, OPTION_COLUMNS, WORDS
from strategist.space.enumerate import divisors
from strategist.timing import estimate as timing
from strategist.timing.ports import Ports
from tests.examples import cases_of
from tests.oracle.memory import MOMENTS as ORACLE_MOMENTS
from tests.oracle.memory import Memory, memory_of, stage_ties, uses_units
from tests.oracle.stages import Layout, stage_kinds
from tests.oracle.time import Time, mfu, model_FLOP, times_of
from tests.strategies import CI, NIGHTLY, Draw, candidates, dense_shapes, jobs, layouts, machine, moe_shapes, trimmed

pytestmark = pytest.mark.slow

Case = tuple[Job, list[dict[str, Any]]]

ONE = 1
"""Bytes or nanoseconds by which a rounded term may differ."""


@st.composite
def cases(draw: Draw) -> Case:
    """A job under any framework, whose launches may wait, with all or few weights trained, and two legal layouts for it."""
    habits = {name: draw(st.booleans()) for name in ("launches_wait", "holds_passed")}
    profile = replace(find_profile(draw(st.sampled_from(frameworks()))), **habits)
    trainable = draw(st.sampled_from((1.0, 0.002)))
    job = replace(draw(jobs()), profile=profile, trainable=trainable, adapters=trainable < 1)
    return job, [draw(layouts(job)) for _ in range(2)]


@st.composite
def cases_of_images(draw: Draw) -> Case:
    """A ResNet under any framework, and two layouts that cut nothing but data and state."""
    depths = {f"depths_{stage}": draw(st.integers(1, 5)) for stage in range(4)}
    extra = depths | {"classes": draw(st.integers(2, 1000)), "image": draw(st.sampled_from((32, 65, 224, 250)))}
    extra |= draw(st.sampled_from(({}, {"basic": 1})))
    width = 512 if "basic" in extra else 2048
    shape = replace(
        load_model("resnet50"), hidden=width, layers=sum(depths.values()), extra=tuple(sorted(extra.items()))
    )
    drawn = draw(jobs(models=st.just(shape)))
    wide = drawn.workload.precision in ("fp8", "fp4")  # of matrices alone
    work = replace(drawn.workload, seq_len=1, precision="bf16" if wide else drawn.workload.precision)
    job = replace(drawn, profile=find_profile(draw(st.sampled_from(frameworks()))), workload=work)
    return job, [draw(_of_data_alone(job)) for _ in range(2)]


@st.composite
def _of_data_alone(draw: Draw, job: Job) -> dict[str, Any]:
    """A layout of replicas, sharded or not."""
    world, batch = job.cluster.world, job.workload.global_batch
    shards = draw(st.sampled_from(divisors(world)))
    micro = draw(st.sampled_from(divisors(batch // world)))
    return PLAIN | {
        "dp_replicate": world // shards, "dp_shard": shards, "zero": draw(st.sampled_from((1, 2, 3) if shards > 1 else (0, 1, 2, 3))),
        "micro_batch": micro, "accumulation": batch // world // micro, "recompute": draw(st.sampled_from(("none", "selective", "full"))),
    }  # fmt: skip


@st.composite
def adapted_cases(draw: Draw) -> Case:
    """Adapters of any rank beside some matrices of a decoder, of attention in a mixture of experts, frozen weights quantised or not, replicated or
    sharded."""
    drawn = draw(jobs(models=st.one_of(dense_shapes(), moe_shapes())))
    can = TARGETS if drawn.model.moe is None else ATTENTION
    targets = draw(st.lists(st.sampled_from(can), min_size=1, unique=True))
    method, rank = draw(st.sampled_from(("lora", "qlora"))), draw(st.sampled_from((1, 7, 64)))
    try:
        shape = with_adapters(drawn.model, method, rank, targets)
    except ImpossibleError:  # a gate alone, and the model has none
        shape = with_adapters(drawn.model, method, rank, can)
    kernels = replace(drawn.profile.kernels, unpacks=draw(st.sampled_from(("nf4", "gptq"))))
    job = as_trained(replace(drawn, model=shape, profile=replace(drawn.profile, kernels=kernels)))
    world = job.cluster.world
    shards = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    zero = draw(st.sampled_from((2, 3))) if shards > 1 else 0
    micro = draw(st.sampled_from([n for n in (1, 2, 3) if job.workload.global_batch // world % n == 0]))
    row = dict.fromkeys((*MESH_COLUMNS, "virtual_stages", "tiling"), 1)
    words = {
        "schedule": "none",
        "sequence_parallel": 0,
        "context_parallel": "none",
        "offload": "none",
        "stage_split": "even",
    }
    chosen = {
        "dp_shard": shards,
        "dp_replicate": world // shards,
        "zero": zero,
        "micro_batch": micro,
        "accumulation": job.workload.global_batch // world // micro,
        "recompute": draw(st.sampled_from(("none", "selective", "full"))),
    }
    return job, [row | words | chosen]


@st.composite
def cases_of_threads(draw: Draw) -> Case:
    """A job of our own framework on one node of GPUs, and a layout of it whose replicas are threads."""
    job = draw(jobs(machines=st.sampled_from(NODES).map(lambda node: trimmed(*node))))
    world = job.cluster.world
    job = replace(job, workload=replace(job.workload, global_batch=world * draw(st.sampled_from((1, 2, 6)))))
    micro = draw(st.sampled_from(divisors(job.workload.global_batch // world)))
    layout = dict.fromkeys((*MESH_COLUMNS, *OPTION_COLUMNS), 1) | {
        "dp_replicate": world, "zero": 0, "micro_batch": micro, "sequence_parallel": 0, "schedule": "none",
        "accumulation": job.workload.global_batch // world // micro, "context_parallel": "none", "offload": "none",
        "recompute": draw(st.sampled_from(WORDS["recompute"])), "stage_split": "even", "replicas": "threads",
    }  # fmt: skip
    return job, [layout]


@st.composite
def cases_of_compression(draw: Draw) -> Case:
    """A job of our own framework and a layout of whole replicas that compress their gradients."""
    job, (layout,) = draw(cases_of_threads())
    plain = {name: value for name, value in layout.items() if name != "replicas"}
    return job, [plain | {"compression": draw(st.sampled_from(WORDS["compression"][1:]))}]


@st.composite
def cases_of_servers(draw: Draw) -> Case:
    """A job of our own framework and a layout of whole replicas whose tables a server holds: a decoder's, or several of a module's."""
    job, (layout,) = draw(cases_of_threads())
    shape = replace(job.model, kind="decoder", formula="stack", tied=False)
    if draw(st.booleans()):
        more = draw(st.lists(st.tuples(st.integers(1, 10_000), st.sampled_from((1, 16, 64))), max_size=3))
        extra = shape.extra_parameters + sum(rows * width for rows, width in more)
        shape = replace(shape, kind="module", extra_parameters=extra, tables=((shape.vocab, table_width(shape)), *more))
    loss = {"loss": "chunked"} if shape.vocab and draw(st.booleans()) else {}
    plain = {name: value for name, value in layout.items() if name != "replicas"}
    return replace(job, model=shape), [plain | {"tables": "server"} | loss]


@st.composite
def cases_in_chunks(draw: Draw) -> Case:
    """A job of our own framework, and a layout of it that leaves the head whole and looks at few tokens at a time."""
    job = draw(jobs().filter(lambda job: job.model.vocab > 0))
    row = draw(layouts(job).filter(lambda row: row["tp"] == row["pp"] == 1))
    return job, [row | {"loss": "chunked"}]


@st.composite
def cases_of_depth(draw: Draw) -> Case:
    """A job under any framework, and a layout of it that computes the first layers of every chunk again, or every so-many-th, or of every
    stage others, as the job states them or the layout does."""
    job = replace(draw(jobs()), profile=find_profile(draw(st.sampled_from(frameworks()))))
    layers = job.model.layers + job.model.enc_layers
    row = draw(layouts(job).filter(lambda row: row["tiling"] == 1)) | {"recompute": "full"}
    stages = stage_kinds(job, row)
    if row["virtual_stages"] == 1 and draw(st.booleans()):
        return replace(job, recompute_layers=tuple(draw(st.integers(0, len(own) + 1)) for own in stages)), [row]
    most = max(1, layers // (row["pp"] * row["virtual_stages"]))
    if row["pp"] > 1 and row["virtual_stages"] == 1 and draw(st.booleans()):
        cuts = draw(st.sets(st.integers(1, layers - 1), min_size=row["pp"] - 1, max_size=row["pp"] - 1))
        own = [end - first for first, end in pairwise((0, *sorted(cuts), layers))]
        numbers = {f"stage_layers_{stage}": number for stage, number in enumerate(own)}
        numbers |= {f"recompute_stage_{stage}": draw(st.integers(0, number)) for stage, number in enumerate(own)}
        return job, [row | {"recompute_depth": "by-stage", "stage_split": "balanced"} | numbers]
    if row["pp"] > 1 and draw(st.booleans()):
        numbers = {f"recompute_stage_{stage}": draw(st.integers(0, most)) for stage in range(row["pp"])}
        return job, [row | {"recompute_depth": "by-stage"} | numbers]
    if draw(st.booleans()):
        return job, [row | {"recompute_every": draw(st.integers(2, max(2, most)))}]
    return job, [row | {"recompute_layers": draw(st.integers(1, most))}]


@st.composite
def cases_of_muon(draw: Draw) -> Case:
    """A job of our own framework with a dense decoder that it builds, trained by Muon, and a layout that can be."""
    drawn = draw(jobs(models=dense_shapes()))
    job = replace(drawn, model=replace(drawn.model, kind="decoder"), workload=replace(drawn.workload, optimizer="muon"))
    row = draw(layouts(job).filter(lambda row: row["tp"] == 1 or row["zero"] != 1))
    return job, [row | {"offload": "none", "tiling": 1}]


@st.composite
def cases_in_groups(draw: Draw) -> Case:
    """A job under any framework, and a layout of it whose ranks exchange heads in groups that are a ring."""
    job = replace(draw(jobs()), profile=find_profile(draw(st.sampled_from(frameworks()))))
    row = draw(layouts(job).filter(lambda row: len(divisors(row["cp"])) > 2))
    inner = draw(st.sampled_from(divisors(row["cp"])[1:-1]))
    return job, [row | {"context_parallel": "hierarchical", "cp_inner": inner}]


@st.composite
def cases_of_busy_experts(draw: Draw) -> Case:
    """A job with a mixture under any framework, its dispatcher and its overlap, and a layout of it whose ranks share experts, some of which get more tokens. A single
    data rank of ours in fp32, which has no units, is left out: package and oracle differ there whatever experts get."""
    drawn = draw(jobs(models=st.one_of(moe_shapes(), st.sampled_from(MIXTURES).map(load_model))))
    ratio = draw(st.sampled_from((1.125, 1.7, 3.0, 100.0)))
    work = replace(drawn.workload, expert_imbalance=ratio)
    whose = draw(st.one_of(st.just("strategist"), st.sampled_from(frameworks())))
    habits = {name: draw(st.booleans()) for name in ("merges", "fp8", "overlaps")}
    profile = with_dispatcher(find_profile(whose), **habits)
    assert drawn.model.moe is not None
    grouped = draw(st.sampled_from(({}, {"groups": 4, "top_groups": 4}, {"groups": 2, "top_groups": 1})))
    of_model = replace(drawn.model.moe, **grouped)
    fits = of_model.top_k <= of_model.top_groups * (of_model.experts // of_model.groups)
    model = replace(drawn.model, moe=of_model) if fits else drawn.model
    job = replace(drawn, profile=profile, workload=work, model=model)
    ours = job.profile.has_units
    return job, [draw(layouts(job).filter(lambda row: row["ep"] > 1 and (uses_units(job, row) or not ours)))]


@st.composite
def cases_of_modules(draw: Draw) -> Case:
    """A job under a framework whose selective recompute runs named modules again, in half precision or fp8, and layouts with it."""
    models = st.one_of(dense_shapes(), moe_shapes(), st.sampled_from(MIXTURES).map(load_model))
    named = tuple(draw(st.lists(st.sampled_from(sorted(REDONE)), min_size=1, max_size=4, unique=True)))
    profile = replace(find_profile(draw(st.sampled_from(("nemo", "megatron-core", "megatron-2022")))), redoes=named)
    job = replace(draw(jobs(models=models)), profile=replace(profile, launches_wait=draw(st.booleans())))
    return job, [draw(layouts(job)) | {"recompute": "selective"}]


@st.composite
def cases_of_shared_ports(draw: Draw) -> Case:
    """A job on several nodes, under a framework that hides what two axes send there, and a layout with pipelines or long sequences."""
    job = draw(jobs(machines=st.sampled_from(NETWORKS).map(machine)))
    job = replace(job, profile=find_profile(draw(st.sampled_from(("strategist", "nemo", "megatron-core")))))
    return job, [draw(layouts(job).filter(lambda row: row["cp"] > 1 or row["pp"] > 1))]


@st.composite
def cases_of_targets(draw: Draw) -> Case:
    """An encoder and a decoder behind it with targets of another length than the inputs, or of none stated, under any framework; two layouts that
    leave sequences and layers together."""
    drawn = draw(jobs(models=st.sampled_from(("t5-base", "t5-3b", "flan-t5-large", "bart-large")).map(load_model)))
    lengths = st.sampled_from((None, 1, 114, 128, 512, 1000, drawn.workload.seq_len, 2 * drawn.workload.seq_len))
    work = replace(drawn.workload, target_len=draw(lengths))
    profile = replace(find_profile(draw(st.sampled_from(frameworks()))), launches_wait=draw(st.booleans()))
    shape = replace(drawn.model, layers=draw(st.integers(1, 5)), enc_layers=draw(st.integers(1, 4)))
    job = replace(drawn, model=shape, workload=work, profile=profile)
    plain = layouts(job).filter(lambda row: row["pp"] == row["cp"] == row["tiling"] == 1)
    return job, [draw(plain) for _ in range(2)]


NETWORKS = ("aws-p4d.24xlarge:2", "dgx-h100:4", "ws-4x-4090:2", "dgx-gb200-nvl72-tray:8")
MIXTURES = ("olmoe-1b-7b", "mixtral-8x7b", "deepseek-v2-lite", "qwen3-30b-a3b")


PLAIN: Layout = dict.fromkeys((*MESH_COLUMNS, "micro_batch", "accumulation", "virtual_stages", "tiling"), 1) | {
    "zero": 0, "schedule": "none", "sequence_parallel": 0, "context_parallel": "none", "recompute": "none",
    "offload": "none", "stage_split": "even",
}  # fmt: skip
"""One process, nothing split: what layouts of a few words are made from."""

NODES = (("dgx-h100", 2), ("dgx-h100", 8), ("ws-4x-4090", 4), ("oci-bm.gpu.l40s.4", 3))
"""Machines and devices per node, one node each."""


def _assert_same_memory(case: Case) -> None:
    job, rows = case
    peaks = peak_memory(job, candidates(rows))
    for i, layout in enumerate(rows):
        expected = memory_of(job, layout)
        at = int(peaks.stage[i]), MOMENTS[int(peaks.moment[i])]
        said = {name: int(column[i]) for name, column in peaks.terms.items()}
        ties = _oracle_terms(job, layout, expected, *at)
        assert any(_is_same_ledger(said, terms) for terms in ties), (said, ties, layout)
        assert abs(int(peaks.device[i]) - expected.device) <= ONE * len(peaks.terms), layout
        assert abs(int(peaks.host[i]) - expected.host) <= ONE, layout


def _oracle_terms(job: Job, layout: Layout, worst: Memory, stage: int, moment: str) -> list[dict[str, int]]:
    """The oracle's terms where the package sees the peak: its own worst place, or one that is as bad."""
    ties = stage_ties(job, layout, stage, stage_kinds(job, layout)[stage])[ORACLE_MOMENTS.index(moment)]
    assert abs(sum(ties[0].values()) - worst.device) <= ONE * len(ties[0]), (stage, moment, worst)
    return ties


def _is_same_ledger(said: dict[str, int], expected: dict[str, int]) -> bool:
    """Within a byte of every term; a term that one of them does not name is nothing."""
    return all(abs(said.get(name, 0) - expected.get(name, 0)) <= ONE for name in said.keys() | expected.keys())


def _assert_same_stages(case: Case) -> None:
    job, rows = case
    for layout in rows:
        table = memory_ledger(job, candidates([layout]))
        kinds = stage_kinds(job, layout)
        assert len(table.stages) == layout["pp"]
        for found in table.stages:
            moments = stage_ties(job, layout, found.stage, kinds[found.stage])
            expected = moments[ORACLE_MOMENTS.index(found.moment)]
            said = {term.name: term.bytes for term in found.terms}
            assert any(_is_same_ledger(said, terms) for terms in expected), (found, expected)
            assert found.device >= max(sum(ties[0].values()) for ties in moments) - ONE * len(said)


def _assert_same_time(case: Case) -> None:
    job, rows = case
    columns = timing.step_times(job, candidates(rows))
    for i, layout in enumerate(rows):
        shown = {name: int(column[i]) for name, column in columns.exposed.items()}
        behind = {name: int(column[i]) for name, column in columns.hidden.items()}
        again = {name: int(column[i]) for name, column in columns.again.items() if name in columns.again}
        assert int(columns.step[i]) == sum(shown.values())
        expected = [_but_empty_experts(job, layout, time, shown, behind) for time in times_of(job, layout)]
        assert any(_is_same(time, shown, behind, again) for time in expected), (layout, shown, behind, expected)


def _is_same(time: Time, shown: dict[str, int], behind: dict[str, int], again: dict[str, int]) -> bool:
    """Within a nanosecond or 1e-9 of every term: exposed, hidden, recomputed."""
    pairs = [pair for name, (a, b) in time.terms.items() for pair in ((a, shown[name]), (b, behind[name]))]
    pairs += [(value, again[name]) for name, value in time.again.items()]
    return all(abs(a - b) <= max(ONE, 1e-9 * abs(a)) for a, b in pairs)


def _but_empty_experts(job: Job, layout: Layout, time: Time, shown: dict[str, int], behind: dict[str, int]) -> Time:
    """The package charges the start-up of experts' collectives to stages without experts, which have none to send.

    Such layouts take dp from the package, which may only be too slow; every other term stays the oracle's.
    """
    if job.model.moe is None or all(any(k.ffn == "moe" for k in own) for own in stage_kinds(job, layout)):
        return time
    assert shown["dp"] + behind["dp"] >= sum(time.terms["dp"]) - ONE, layout
    return Time(time.terms | {"dp": (shown["dp"], behind["dp"])}, time.again, time.step_ns)


@CI
@given(cases())
def test_columns_equal_the_oracle(case: Case) -> None:
    """Every memory term at the worst moment of the worst stage, and every exposed, hidden and recomputed time term, is
    the oracle's; the terms add up to the device total and to the step."""
    _assert_same_memory(case)
    _assert_same_time(case)


@settings(CI, max_examples=cases_of(60))
@given(adapted_cases())
def test_columns_equal_the_oracle_beside_adapters(case: Case) -> None:
    """The same where adapters alone are trained; the oracle counts their elements from the widths of the model."""
    _assert_same_memory(case)
    _assert_same_time(case)
    assert model_FLOP(case[0]) == pytest.approx(timing.model_FLOP(case[0]), rel=1e-12)


@settings(CI, max_examples=cases_of(60), suppress_health_check=[HealthCheck.filter_too_much])
@given(cases_of_targets())
def test_decoders_with_targets_of_their_own_length_equal_the_oracle(case: Case) -> None:
    """The same of T5 and BART, whose decoders see other tokens than the encoders in front of them."""
    _assert_same_memory(case)
    _assert_same_time(case)
    assert model_FLOP(case[0]) == pytest.approx(timing.model_FLOP(case[0]), rel=1e-12)


@settings(CI, max_examples=cases_of(60))
@given(cases_of_modules())
def test_modules_that_run_again_take_what_the_oracle_says(case: Case) -> None:
    """Their products, casts, activations, norms and launches, and what whole mixtures send once more."""
    _assert_same_time(case)


@settings(CI, max_examples=cases_of(60))
@given(cases_in_chunks())
def test_a_loss_in_chunks_equals_the_oracle(case: Case) -> None:
    """Its few logits, the head's gradient that is there before backward, and the bytes that are added up for every chunk."""
    _assert_same_memory(case)
    _assert_same_time(case)


@settings(CI, max_examples=cases_of(60))
@given(cases_of_depth())
def test_recompute_of_some_layers_equals_the_oracle(case: Case) -> None:
    """What each layer keeps, which is gone when backward comes to those that run again, and what is run and sent again."""
    _assert_same_memory(case)
    _assert_same_time(case)


@settings(CI, max_examples=cases_of(30))
@given(cases_of_threads())
def test_replicas_as_threads_equal_the_oracle(case: Case) -> None:
    """nn.DataParallel's exchanges, its one launching interpreter and what device 0 holds beside its share are the oracle's."""
    _assert_same_memory(case)
    _assert_same_time(case)
    _assert_same_stages(case)


@settings(CI, max_examples=cases_of(60))
@given(cases_of_servers())
def test_tables_on_a_server_equal_the_oracle(case: Case) -> None:
    """What leaves the ranks, what rows and their gradients take, and what is waited for are the oracle's."""
    _assert_same_memory(case)
    _assert_same_time(case)
    _assert_same_stages(case)


@settings(CI, max_examples=cases_of(60))
@given(cases_of_muon())
def test_muon_equals_the_oracle(case: Case) -> None:
    """What Muon keeps, gathers, holds while it turns a matrix and computes is what the oracle counts matrix by matrix."""
    _assert_same_memory(case)
    _assert_same_time(case)
    _assert_same_stages(case)


@settings(CI, max_examples=cases_of(20), suppress_health_check=[HealthCheck.filter_too_much])
@given(cases_in_groups())
def test_hierarchical_context_parallelism_equals_the_oracle(case: Case) -> None:
    """What travels around the ring and inside the groups, and what attention and a layer hold beside it, are the oracle's."""
    _assert_same_memory(case)
    _assert_same_time(case)


@pytest.mark.parametrize("inner", [2, 4, 8])
def test_groups_inside_a_node_and_rings_across_equal_the_oracle(inner: int) -> None:
    """On two nodes the neighbours exchange over the fast links and the rings send over the slow ones."""
    work = Workload(seq_len=65536, global_batch=1, precision="bf16")
    machines, model = load_cluster("aws-p4d.24xlarge:2"), load_model("llama-2-7b")
    job = Job(cluster=machines, model=model, workload=work, profile=find_profile())
    row = PLAIN | {"cp": 16, "zero": 3, "context_parallel": "hierarchical", "cp_inner": inner}
    _assert_same_memory((job, [row]))
    _assert_same_time((job, [row]))


@settings(CI, max_examples=cases_of(60), suppress_health_check=[HealthCheck.filter_too_much])
@given(cases_of_busy_experts())
def test_experts_that_get_more_tokens_equal_the_oracle(case: Case) -> None:
    """What the busiest rank of those that share experts computes, is sent, keeps and holds is what the oracle counts of it."""
    _assert_same_memory(case)
    _assert_same_time(case)


@settings(CI, max_examples=cases_of(60), suppress_health_check=[HealthCheck.filter_too_much])
@given(cases_of_shared_ports())
def test_what_two_axes_send_through_one_port_equals_the_oracle(case: Case) -> None:
    """What is hidden of each axis, and what finds the port taken, is what the oracle counts message after message."""
    _assert_same_time(case)


@pytest.mark.parametrize(
    ("model", "nodes", "profile", "seq_len", "batch", "layout"),
    [
        ("llama-2-7b", "aws-p4d.24xlarge:2", "strategist", 65536, 1, {"cp": 8, "tp": 2, "context_parallel": "ring"}),
        ("llama-3.1-8b", "dgx-h100:4", "strategist", 32768, 16,
         {"cp": 16, "tp": 2, "zero": 3, "accumulation": 16, "context_parallel": "ring", "recompute": "selective"}),
        ("llama-2-13b", "ws-4x-4090:4", "nemo", 8192, 64,
         {"pp": 2, "dp_replicate": 2, "dp_shard": 4, "zero": 3, "virtual_stages": 5, "schedule": "interleaved",
          "micro_batch": 4, "accumulation": 2, "recompute": "full"}),
    ],
)  # fmt: skip
def test_a_port_that_is_taken_exposes_dp(
    model: str, nodes: str, profile: str, seq_len: int, batch: int, layout: dict[str, Any]
) -> None:
    """Where rings or stages send behind the compute that dp would hide behind, the oracle finds as much of it exposed."""
    work = Workload(seq_len=seq_len, global_batch=batch)
    job = Job(cluster=machine(nodes), model=load_model(model), workload=work, profile=find_profile(profile))
    times, alone = (step_times_with(job, layout, shared) for shared in (True, False))
    assert times > 1.03 * alone
    _assert_same_time((job, [PLAIN | layout]))


def step_times_with(job: Job, layout: dict[str, Any], shared: bool) -> int:
    """The step, with ports that axes share or with ports of their own."""
    with pytest.MonkeyPatch.context() as patched:
        if not shared:
            patched.setattr(Ports, "too_much", lambda self, wanted, rounds, shares: 0.0 * wanted)
        return int(timing.step_times(job, candidates([PLAIN | layout])).step[0])


@settings(CI, max_examples=cases_of(20))
@given(cases_of_compression())
def test_compressed_gradients_equal_the_oracle(case: Case) -> None:
    """What a hook of DDP sends, computes and holds is what the oracle counts tensor by tensor."""
    _assert_same_memory(case)
    _assert_same_time(case)
    _assert_same_stages(case)


def test_experts_without_a_token_still_launch() -> None:
    """With fewer tokens than experts every expert's product still has one row, in the oracle as in the columns."""
    moe = Moe(experts=128, top_k=1, ffn=96, layers=2)
    shape = ModelShape(
        name="sparse", family="random", kind="decoder", layers=2, hidden=256, vocab=257, ffn_hidden=96, heads=4,
        kv_heads=4, head_dim=64, moe=moe,
    )  # fmt: skip
    work = Workload(seq_len=32, global_batch=2)
    job = Job(cluster=trimmed("dgx-h100", 2), model=shape, workload=work, profile=find_profile())
    _assert_same_time((job, [PLAIN | {"dp_replicate": 2}]))


@pytest.mark.parametrize("every", [1, 6])
@pytest.mark.parametrize("ep", [1, 2])
def test_a_chunks_last_layer_is_gathered_in_vain_with_its_own_experts(every: int, ep: int) -> None:
    """Of interleaved chunks under ZeRO-3 it is the chunk's last layer that counts, not a stage's mean one, with experts that no
    other rank holds."""
    shape = load_model("mixtral-8x7b")
    shape = replace(shape, layers=24, moe=replace(shape.moe, layers=24 // every), pattern="")
    job = Job(cluster=trimmed("dgx-h100", 8), model=shape, workload=Workload(seq_len=1024), profile=find_profile())
    layout = PLAIN | {
        "pp": 2,
        "virtual_stages": 2,
        "schedule": "interleaved",
        "dp_shard": 4,
        "zero": 3,
        "ep": ep,
        "accumulation": 4,
    }
    _assert_same_time((job, [layout]))


def test_a_pipelines_unsharded_gradients_decide_which_instant_of_a_layer_counts() -> None:
    """In float32 a pipeline under ZeRO-3 adds whole gradients to what stands: with a feed-forward part much narrower than
    attention, the instant with most gradients is a layer's worst, not the one with most activations."""
    shape = ModelShape(
        name="narrow", family="random", kind="decoder", layers=3, hidden=4096, vocab=257, ffn_hidden=96, heads=32,
        kv_heads=8, head_dim=128,
    )  # fmt: skip
    work = Workload(seq_len=128, global_batch=16, precision="fp32")
    job = Job(cluster=trimmed("dgx-h100", 8), model=shape, workload=work, profile=find_profile())
    _assert_same_memory((job, [PLAIN | {"zero": 3, "schedule": "1f1b", "pp": 2, "dp_shard": 4, "micro_batch": 4}]))


TWO_PARTS: tuple[Layout, ...] = tuple(
    PLAIN | {"schedule": "zb_h1"} | more
    for more in (
        {"pp": 2, "dp_replicate": 4, "accumulation": 2},
        {"pp": 2, "dp_shard": 4, "zero": 2, "accumulation": 6},
        {"pp": 4, "tp": 2, "sequence_parallel": 1, "accumulation": 4},
        {"pp": 4, "tp": 2, "accumulation": 12, "stage_split": "weighted"},
        {"pp": 8, "accumulation": 8},
        {"pp": 8, "accumulation": 16, "micro_batch": 3},
    )
)


IN_A_V: tuple[Layout, ...] = tuple(
    PLAIN | {"schedule": "zbv", "virtual_stages": 2} | more
    for more in (
        {"pp": 2, "dp_replicate": 4, "accumulation": 3},
        {"pp": 2, "dp_shard": 4, "zero": 2, "accumulation": 6},
        {"pp": 2, "dp_shard": 4, "zero": 1, "accumulation": 4, "micro_batch": 2},
        {"pp": 4, "tp": 2, "sequence_parallel": 1, "accumulation": 7},
        {"pp": 4, "tp": 2, "accumulation": 12},
        {"pp": 8, "accumulation": 16},
    )
)


IN_PAIRS: tuple[Layout, ...] = tuple(
    PLAIN | {"schedule": "dualpipev", "virtual_stages": 2} | more
    for more in (
        {"pp": 2, "dp_replicate": 4, "accumulation": 4},
        {"pp": 2, "dp_shard": 4, "zero": 2, "accumulation": 4, "micro_batch": 2},
        {"pp": 2, "dp_shard": 4, "zero": 1, "accumulation": 7},
        {"pp": 4, "tp": 2, "sequence_parallel": 1, "accumulation": 9},
        {"pp": 4, "tp": 2, "accumulation": 12},
        {"pp": 8, "accumulation": 17},
    )
)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("model", "vocab"), [("gpt2-medium", 50257), ("llama-3.1-8b", 128256), ("qwen3-8b", 3072)])
def test_a_v_equals_the_oracle(model: str, vocab: int, precision: str) -> None:
    """Memory and time of pipelines in a V on every stage, where the head holds most and where layers do: what a walk through all
    passes finds."""
    shape = replace(load_model(model), layers=16, vocab=vocab, tied=False)
    for layout in (*IN_A_V, *IN_PAIRS):
        batch = layout["accumulation"] * layout["micro_batch"] * layout["dp_replicate"] * layout["dp_shard"]
        work = Workload(seq_len=1024, global_batch=batch, precision=precision)
        job = Job(cluster=trimmed("dgx-h100", 8), model=shape, workload=work, profile=find_profile())
        _assert_same_memory((job, [layout]))
        _assert_same_stages((job, [layout]))
        _assert_same_time((job, [layout]))


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("model", ["gpt2-medium", "llama-3.2-1b", "qwen3-8b", "olmo-1b"])
def test_backward_in_two_parts_equals_the_oracle(model: str, precision: str) -> None:
    """Memory and time of pipelines whose gradients of weights wait, on every stage: what a walk through all passes finds."""
    for layout in TWO_PARTS:
        batch = layout["accumulation"] * layout["micro_batch"] * layout["dp_replicate"] * layout["dp_shard"]
        work = Workload(seq_len=1024, global_batch=batch, precision=precision)
        job = Job(cluster=trimmed("dgx-h100", 8), model=load_model(model), workload=work, profile=find_profile())
        _assert_same_memory((job, [layout]))
        _assert_same_stages((job, [layout]))
        _assert_same_time((job, [layout]))


@settings(CI, max_examples=cases_of(30))
@given(cases())
def test_every_stage_of_a_ledger_equals_the_oracle(case: Case) -> None:
    """The Plan's ledger shows every stage at its own worst moment with the oracle's terms."""
    _assert_same_stages(case)


@settings(CI, max_examples=cases_of(60))
@given(cases_of_images())
def test_convolutions_equal_the_oracle(case: Case) -> None:
    """The same of ResNets of any depth and side of images, which the oracle walks through convolution by convolution."""
    _assert_same_memory(case)
    _assert_same_time(case)
    _assert_same_stages(case)
    assert model_FLOP(case[0]) == pytest.approx(timing.model_FLOP(case[0]), rel=1e-12)


@settings(CI, max_examples=cases_of(30))
@given(jobs())
def test_useful_flop_and_mfu_equal_the_oracle(job: Job) -> None:
    """Useful FLOP of a step and the utilisation of a one-second step are the oracle's."""
    assert timing.model_FLOP(job) == pytest.approx(model_FLOP(job), rel=1e-12)
    assert timing.mfu(job, 1.0) == pytest.approx(mfu(job, 1.0), rel=1e-12)


CHECKS = (_assert_same_memory, _assert_same_time, _assert_same_stages)


def test_a_layout_weighs_the_same_beside_others() -> None:
    """Of a model of one layer, a layout whose ranks share no experts is the oracle's in a table with one whose ranks do."""
    moe = Moe(experts=4, top_k=1, ffn=96, layers=1)
    shape = ModelShape(
        name="single", family="random", kind="decoder", layers=1, hidden=512, vocab=257, ffn_hidden=96, heads=8,
        kv_heads=8, head_dim=64, moe=moe,
    )  # fmt: skip
    work = Workload(seq_len=128, global_batch=8)
    cluster, profile = trimmed("dgx-h100", 8), find_profile()
    job = Job(cluster=cluster, model=shape, workload=work, profile=profile, trainable=0.002, adapters=True)
    rows = [PLAIN | {"zero": 2, "dp_replicate": 8}, PLAIN | {"zero": 2, "dp_replicate": 4, "dp_shard": 2, "ep": 2}]
    _assert_same_memory((job, rows))


def test_a_gate_of_shared_experts_reads_what_ranks_that_cut_experts_share() -> None:
    """Where two of eight ranks of tensor parallelism cut each expert, the gate's tokens are those of four."""
    moe = Moe(experts=4, top_k=1, ffn=96, layers=1, shared_ffn=2816, shared_gate=True)
    shape = ModelShape(
        name="gated", family="random", kind="decoder", layers=1, hidden=128, vocab=257, ffn_hidden=96, heads=8,
        kv_heads=8, head_dim=16, moe=moe,
    )  # fmt: skip
    work = Workload(seq_len=1000, global_batch=8, precision="bf16")
    job = Job(cluster=trimmed("dgx-h100", 8), model=shape, workload=work, profile=find_profile())
    _assert_same_memory((job, [PLAIN | {"tp": 8, "etp": 2, "sequence_parallel": 1, "accumulation": 8}]))


def test_a_layer_behind_which_none_is_gathered_counts_where_it_holds_most() -> None:
    """Before its experts begin: of two layers in a stage under ZeRO-3, the first holds most then, the second does not."""
    shape = ModelShape(
        name="paired", family="random", kind="decoder", layers=7, hidden=384, vocab=257, ffn_hidden=96, heads=6,
        kv_heads=3, head_dim=64, norm="layernorm", mlp_gated=False, mlp_bias=True, qkv_bias=True, k_bias=True,
        o_bias=True, moe=Moe(experts=4, top_k=1, ffn=96, layers=7),
    )  # fmt: skip
    work = Workload(seq_len=128, global_batch=32, precision="bf16")
    job = Job(cluster=machine("dgx-h100:4"), model=shape, workload=work, profile=find_profile("ddp-apex"))
    axes = {"pp": 4, "cp": 8, "ep": 2, "zero": 3, "context_parallel": "ring", "tiling": 8}
    _assert_same_stages((job, [PLAIN | axes | {"schedule": "gpipe", "micro_batch": 2, "accumulation": 16}]))


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("schedule", ["interleaved", "looped_bfs"])
def test_no_pass_of_chunks_in_turn_holds_more_than_those_looked_at(schedule: str, chunks: int, zero: int) -> None:
    """Of small feed-forward parts, whose gradients weigh about as much as what a pass keeps: of as many passes as fill the
    pipeline once, when forward passes run out, and of more."""
    shape = ModelShape(
        name="narrow", family="random", kind="decoder", layers=16, hidden=512, vocab=1000, ffn_hidden=96, heads=8,
        kv_heads=4, head_dim=64, mlp_gated=False,
    )  # fmt: skip
    axes = {"pp": 4, "dp_replicate": 2, "virtual_stages": chunks, "schedule": schedule, "zero": zero}
    for micro, accumulation, recompute in ((4, 4, "full"), (1, 4, "selective"), (1, 8, "none"), (2, 16, "selective")):
        work = Workload(seq_len=256, global_batch=2 * micro * accumulation, precision="fp16")
        job = Job(cluster=trimmed("dgx-h100", 8), model=shape, workload=work, profile=find_profile("fsdp1"))
        rest = {"micro_batch": micro, "accumulation": accumulation, "recompute": recompute}
        _assert_same_stages((job, [PLAIN | axes | rest]))


@pytest.mark.parametrize("pp", [2, 4])
def test_the_first_pass_of_all_may_hold_most_when_its_gradients_are_cast(pp: int) -> None:
    """Of mixtures under ZeRO-2 where every chunk has one turn: nothing stands yet that a layer's gradients could join, so that they lie there
    beside their copy in the format of what stands, while as much is in flight as ever."""
    shape = ModelShape(
        name="late", family="random", kind="decoder", layers=2 * pp, hidden=512, vocab=1000, ffn_hidden=1024, heads=8,
        kv_heads=8, head_dim=64, moe=Moe(experts=32, top_k=1, ffn=512, layers=pp, first_dense=pp),
    )  # fmt: skip
    work = Workload(seq_len=512, global_batch=8, precision="bf16")
    job = Job(cluster=trimmed("dgx-h100", 8), model=shape, workload=work, profile=find_profile("fsdp2-compiled-loss"))
    axes = {
        "pp": pp,
        "dp_shard": 8 // pp,
        "zero": 2,
        "virtual_stages": 2,
        "schedule": "interleaved",
        "accumulation": pp,
    }
    _assert_same_stages((job, [PLAIN | axes | {"recompute": "selective"}]))


@pytest.mark.nightly
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@NIGHTLY
@given(case=cases())
def test_columns_equal_the_oracle_at_length(check: Callable[[Case], None], case: Case) -> None:
    """The same over thousands of new jobs every night, every stage of them included."""
    check(case)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_offloaded_gradients_do_not_decide_which_instant_of_a_layer_counts(recompute: str) -> None:
    """Where weights are offloaded their gradients leave as they are made: with a feed-forward part narrower than attention
    the instant with most activations is a layer's worst, not the one with most gradients."""
    shape = ModelShape(
        name="narrow", family="random", kind="decoder", layers=1, hidden=128, vocab=257, ffn_hidden=96, heads=8,
        kv_heads=8, head_dim=16,
    )  # fmt: skip
    work = Workload(seq_len=128, global_batch=1, precision="fp32")
    job = Job(cluster=trimmed("ws-1x-4090", 1), model=shape, workload=work, profile=find_profile())
    _assert_same_memory((job, [PLAIN | {"zero": 3, "offload": "parameters", "recompute": recompute}]))
