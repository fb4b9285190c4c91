"""What must hold of finished plans: the same question gives the same bytes, however it is spelled, and every sentence that
carries a number is true."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, reject
from hypothesis import strategies as st

from strategist import recommend
from strategist.ask import Given, complete
from strategist.document.plan import Plan
from strategist.document.write import as_document
from strategist.errors import NoPlanError, StrategistError
from strategist.facts.job import Job
from strategist.facts.profile import find_profile
from strategist.facts.workload import Workload
from strategist.planner.write import price_of
from strategist.units import format_gib
from tests.oracle.legality import VIOLATIONS, violation
from tests.oracle.memory import memory_of, usable_bytes
from tests.planner.properties import Properties
from tests.planner.test_layout_properties import PLAIN
from tests.strategies import Draw, dense_shapes, machine, moe_shapes, trimmed

PROPERTIES = Properties()

SMALL = (("dgx-h100", 2), ("dgx-h100", 8), ("ws-4x-4090", 4), ("ws-2x-4090:2", 2), ("oci-bm.gpu.l40s.4", 4))
"""Machines whose plans take milliseconds."""


@st.composite
def plans(draw: Draw) -> Plan:
    """A plan for a random model on small machines."""
    cluster = trimmed(*draw(st.sampled_from(SMALL)))
    shape = draw(st.one_of(dense_shapes(), moe_shapes()))
    fields = {"seq_len": draw(st.sampled_from((128, 1024, 4096))), "global_batch": cluster.world * 2}
    policy: Any = draw(st.sampled_from(("hf", "fastest")))
    try:
        return recommend(shape, cluster, policy=policy, **fields)
    except NoPlanError:  # a random model may be too large for any layout
        reject()


def predicted(plan: Plan) -> dict[str, Any]:
    """What a plan decides and predicts, without the words that were typed."""
    document = as_document(plan)
    return {name: document[name] for name in ("mesh", "strategy", "memory", "time", "decision", "alternatives")}


def job_of(plan: Plan) -> Job:
    """The question that a plan answers, as the models see it."""
    return Job(
        cluster=plan.cluster,
        model=plan.model,
        workload=plan.workload,
        profile=find_profile(),
        headroom=plan.request.headroom,
    )


def as_layout(text: str) -> dict[str, Any]:
    """A layout from the grammar that plans print: `tp=4, micro_batch=1`; what is not said is plain."""
    said = {} if text == "single" else dict(part.split("=") for part in text.split(", "))
    return PLAIN | {name: int(value) if value.isdigit() else value for name, value in said.items()}


QUESTION = (
    "plan", "--model", "olmoe-1b-7b", "--hardware", "dgx-h100", "--seq-len", "1024", "--global-batch", "8", "--json",
)  # fmt: skip


@pytest.mark.slow
def test_p14_the_same_question_gives_the_same_bytes() -> None:
    """P14: the plan on stdout is byte for byte the same whatever seed Python hashes with and whatever the locale."""
    surroundings = ({"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "1", "LC_ALL": "C"}, {"PYTHONHASHSEED": "4242"})
    outputs = {
        subprocess.run(
            [sys.executable, "-m", "strategist", *QUESTION], env=os.environ | seed, capture_output=True, check=True
        ).stdout
        for seed in surroundings
    }
    assert len(outputs) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"gpu_memory": "80GB"}, {"gpu_memory": "80000000000B"}),
        ({"gpu_memory": "80GiB"}, {"gpu_memory": "81920MiB"}),
        ({"inter_bw": "400Gb/s"}, {"inter_bw": "50GB/s"}),
        ({"intra_bw": "450GB/s"}, {"intra_bw": "3600Gbps"}),
    ],
)
def test_p16_units_do_not_matter(one: dict[str, str], other: dict[str, str]) -> None:
    """P16: the same rate or size in another unit gives the same plan."""
    base = {"format": "strategist-hardware/1", "gpu": "h100-sxm-80gb", "gpus_per_node": 4, "nodes": 2}
    first, second = (recommend("7B", base | words, seq_len=2048, global_batch=16) for words in (one, other))
    assert predicted(first) == predicted(second)
    assert first.cluster.groups[0].node.gpu.memory_bytes == second.cluster.groups[0].node.gpu.memory_bytes


def test_p16_sizes_are_counts() -> None:
    """P16: 7B, 7e9, 7000M and 7000000000 name the same model."""
    known = [recommend(size, "dgx-h100", seq_len=2048, global_batch=8) for size in ("7B", "7e9", "7000M", "7000000000")]
    assert all(predicted(plan) == predicted(known[0]) for plan in known)


def test_p16_memory_units_are_not_confused() -> None:
    """P16: 80 GB is 80e9 bytes and 80 GiB is 80 x 2**30, which are not the same."""
    base = {"format": "strategist-hardware/1", "gpu": "h100-sxm-80gb", "gpus_per_node": 1}
    decimal, binary = (recommend("gpt2", base | {"gpu_memory": size}) for size in ("80GB", "80GiB"))
    assert decimal.memory.capacity_bytes == 80 * 10**9
    assert binary.memory.capacity_bytes == 80 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize("alias", ["DGX-H100:2", "dgx h100:2", "DGX_H100:2"])
def test_p43_aliases_do_not_matter(alias: str) -> None:
    """P43: a name in another spelling is the same machine."""
    fields = {"seq_len": 2048, "global_batch": 32}
    assert predicted(recommend("7B", alias, **fields)) == predicted(recommend("7B", "dgx-h100:2", **fields))


def test_p43_a_described_gpu_holds_what_the_catalogue_says() -> None:
    """P43: a GPU described with the catalogue's numbers under another name holds the same bytes in the same layout.

    Its times differ, because nobody measured matmuls on it and a description cannot say which GPU it is like
    (docs/decisions/0044).
    """
    known = machine("dgx-h100").groups[0].node.gpu
    described = {
        "format": "strategist-hardware/1",
        "gpus": [
            {
                "name": "mine", "vendor": "NVIDIA", "memory": f"{known.memory_bytes}B", "memory_bw": "3350GB/s",
                "bf16_TFLOPs": 989.4, "fp16_TFLOPs": 989.4, "fp32_TFLOPs": 66.9, "host_bw": "63GB/s",
                "scale_up_bw": "450GB/s",
            }
        ],
        "nodes": [{"gpu": "mine", "gpu_count": 8, "topology": "nvswitch", "intra_bw": "450GB/s", "ram": "2048GB"}],
    }  # fmt: skip
    fields = {"seq_len": 2048, "global_batch": 32, "pin": "dp_shard=8,zero=3,micro_batch=2,recompute=none"}
    mine, theirs = (recommend("7B", hardware, **fields) for hardware in (described, "dgx-h100"))
    assert mine.memory.stages == theirs.memory.stages
    assert mine.memory.usable_bytes == theirs.memory.usable_bytes


@pytest.mark.parametrize(
    ("card", "lacks", "has"), [("v100-sxm2-32gb", "bf16", "fp16"), ("a100-sxm-80gb", "fp8", "bf16")]
)
def test_p44_a_format_the_device_lacks_is_refused(card: str, lacks: Any, has: str) -> None:
    """P44: a number format that the device does not multiply in is an error with its own code, never emulated, and those are named that
    it has: bf16 on an A100, not on a V100."""
    with pytest.raises(StrategistError) as refused:
        machines = {"format": "strategist-hardware/1", "gpu": card, "gpus_per_node": 2}
        recommend("gpt2", machines, precision=lacks)
    assert refused.value.code == "HARDWARE_FEATURE"
    named = (refused.value.hint or "").split(" [")[0]
    assert has in named
    assert lacks not in named


@PROPERTIES.holds(6, plans())
def test_p38_p39_every_number_of_a_plan_is_true(plan: Plan) -> None:
    """P38, P39: the ledgers add up; what an alternative misses is its peak in the oracle less the usable bytes; the
    example of every refusal breaks the named rule, and no rule before it."""
    job = job_of(plan)
    assert sum(term.exposed_ns for term in plan.time.terms) == plan.time.step_ns
    assert plan.memory.worst.device == plan.memory.peak.value
    for other in plan.alternatives:
        over = memory_of(job, as_layout(other.layout)).device - usable_bytes(job)
        assert abs(other.peak_bytes - usable_bytes(job) - over) <= 11
        assert (
            other.fits or over <= 0 or f"over by {format_gib(other.peak_bytes - usable_bytes(job))}" in other.sentence
        )
    for refusal in plan.refusals:
        if refusal.rule in VIOLATIONS:
            assert violation(job, as_layout(refusal.example)) == refusal.rule


@PROPERTIES.holds(6, dense_shapes())
def test_p39_a_failure_names_the_true_miss(shape: Any) -> None:
    """P39: when nothing fits, the message carries the leanest layout's peak in the oracle and what is usable."""
    node = trimmed("ws-2x-4090", 2).groups[0].node
    tiny = replace(node, gpu=replace(node.gpu, memory_bytes=2 * 2**30), ram_bytes=None)
    cluster = replace(machine("ws-2x-4090"), groups=(replace(machine("ws-2x-4090").groups[0], node=tiny),))
    work = Workload(seq_len=8192, global_batch=2)
    job = Job(cluster=cluster, model=shape, workload=work, profile=find_profile())
    try:
        recommend(shape, cluster, workload=work)
    except NoPlanError as failure:
        layout = failure.message.split("legal layouts, ")[1].split(", needs")[0]
        needed = memory_of(job, as_layout(layout)).device
        assert f"needs {format_gib(needed)} of {format_gib(usable_bytes(job))} usable" in failure.message
    else:
        assume(False)


@pytest.mark.slow
@pytest.mark.parametrize("price", [0.5, 2.0, 98.32])
def test_p52_money_follows_time(price: float) -> None:
    """P52: a price changes no layout, and the cost is GPU-hours times price exactly."""
    fields = {"seq_len": 2048, "global_batch": 32, "tokens": 10**9}
    free, paid = (recommend("7B", "dgx-h100", **fields, **more) for more in ({}, {"price_per_gpu_hour": price}))
    assert predicted(free) == predicted(paid)
    hours = paid.economics.run_gpu_hours
    assert hours is not None and paid.economics.run_cost == hours * price
    seconds = 10**9 / (2048 * 32) * paid.time.step_ns / 1e9
    assert hours == pytest.approx(seconds * 8 / 3600, rel=1e-12)
    assert paid.economics.gpu_hours_per_step == pytest.approx(8 * paid.time.step_ns / 3600e9, rel=1e-12)


def test_a_node_s_list_price_is_that_of_all_its_devices() -> None:
    """A device costs its part of what its node costs, whatever the number of nodes; a price that is told counts instead, and of several kinds of
    nodes nobody knows one."""
    asked = complete(Given(model="gpt2", hardware="aws-g5.48xlarge:4"))
    (group,) = asked.question.job.cluster.groups
    assert group.node.price_per_hour is not None
    assert price_of(asked.question.job, asked.request)[0] == pytest.approx(group.node.price_per_hour / 8)
    told = replace(asked.request, price_per_gpu_hour=1.5)
    assert price_of(asked.question.job, told)[0] == 1.5
    mixed = replace(asked.question.job, cluster=replace(asked.question.job.cluster, groups=(group, group)))
    assert price_of(mixed, asked.request) == (None, "")


@pytest.mark.nightly
@pytest.mark.parametrize("check", PROPERTIES.at_length, ids=lambda check: check.__name__)
def test_at_length(check: Any) -> None:
    """Every property above, over hundreds of new examples."""
    check()
