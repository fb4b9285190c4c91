"""The search finds what brute force finds: the same legal layouts, as many that fit, and the same best one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from strategist.facts.hardware import Cluster
from strategist.facts.job import Job
from strategist.facts.models import load_model
from strategist.facts.profile import find_profile
from strategist.facts.workload import Workload
from strategist.planner.search import Question, search
from strategist.planner.situation import largest_layer_bytes as columns_largest_layer_bytes
from strategist.records import replace
from strategist.rulebook.rule import load_rules
from tests.oracle.enumerate import as_key, enumerate_layouts, largest_layer_bytes
from tests.oracle.legality import VIOLATIONS
from tests.oracle.memory import fits, memory_of
from tests.oracle.scenarios import ADDED, NUMBERS, TECHNIQUES, scenario
from tests.oracle.stages import Layout, depths
from tests.oracle.time import time_of
from tests.strategies import machine, trimmed

pytestmark = pytest.mark.slow


def ask(model: str, cluster: Cluster, seq_len: int, global_batch: int, precision: str = "bf16") -> Job:
    """A question in one line."""
    work: Any = Workload(seq_len=seq_len, global_batch=global_batch, precision=precision)
    return Job(cluster=cluster, model=load_model(model), workload=work, profile=find_profile())


def question_of(words: str) -> Job:
    """`model machine gpus seq_len global_batch precision`; gpus 0 takes the machine as it is."""
    model, name, gpus, seq_len, batch, precision = words.split()
    cluster = trimmed(name, int(gpus)) if int(gpus) else machine(name)
    return ask(model, cluster, int(seq_len), int(batch), precision)


SMALL = (
    "gpt2 ws-1x-4090 0 1000 6 bf16",
    "llama-2-7b dgx-h100 1 4096 4 bf16",
    "llama-2-70b ws-1x-4090 0 4096 2 bf16",
    "deepseek-v2-lite dgx-h100 1 2048 2 bf16",
    "gpt2 ws-2x-4090 0 1024 2 fp16",
    "llama-2-7b dgx-h100 2 4096 2 bf16",
    "olmoe-1b-7b dgx-h100 2 2048 2 bf16",
    "t5-base ws-2x-4090 0 512 4 fp32",
    "t5-base ws-2x-4090 0 512 4 tf32",
    "llama-3.2-1b aws-p4d.24xlarge 3 1536 6 bf16",
    "llama-3.1-8b ws-4x-4090 0 1000 2 bf16",
    "mamba-130m ws-4x-4090 0 1000 2 bf16",
    "mixtral-8x7b dgx-h100 4 1024 2 bf16",
    "qwen2.5-7b oci-bm.gpu.l40s.4 0 2048 1 bf16",
    "distilgpt2 cpu:4 0 1024 2 fp32",
    "gpt2 dgx-h100 6 1000 6 bf16",
    "pythia-1b aws-p4d.24xlarge 6 2048 3 bf16",
    "t5-large dgx-h100 0 512 8 bf16",
    "vit-l-16 dgx-h100 0 197 2 bf16",
    "gpt2 ws-4x-4090:2 0 1024 4 bf16",
    "qwen2.5-7b dgx-h100 0 1000 2 bf16",
    "llama-2-7b dgx-gb200-nvl72-tray:2 0 1024 2 bf16",
)
"""Questions of 1, 2, 3, 4, 6 and 8 ranks: alone, on switches, on PCIe, on CPU, on racks, on two nodes."""

SIXTEEN = (
    "llama-2-7b dgx-h100:2 0 4096 16 bf16",
    "gpt2 aws-p4d.24xlarge:2 6 1008 12 bf16",
    "olmoe-1b-7b dgx-h100:2 0 1000 8 bf16",
    "llama-3.1-405b ws-4x-4090:4 0 4096 4 bf16",
)
"""Questions of 12 and 16 devices on several nodes."""

WIDER = (
    "mixtral-8x7b dgx-h100 0 4096 8 bf16",
    "deepseek-v2-lite dgx-h100 0 4096 16 bf16",
    "llama-2-7b dgx-h100:2 0 4096 16 bf16",
    "gpt2 ws-8x-4090:2 0 1024 16 bf16",
    "qwen2.5-7b dgx-gb200-nvl72-tray:4 0 8192 8 bf16",
    "olmoe-1b-7b aws-p4d.24xlarge 6 2048 12 bf16",
    "llama-2-13b dgx-h100 0 8192 8 fp8",
)
"""Questions whose space is too large for every day."""


ROUNDING_NS = 14
"""Fourteen terms, each rounded to a nanosecond, once here and once there."""


def complexity(a: Layout) -> int:
    """How much a layout asks of code and people, in the planner's published weights."""
    axes = sum(a[axis] > 1 for axis in ("tp", "pp", "cp", "ep"))
    hybrid = a["dp_replicate"] > 1 and a["dp_shard"] > 1
    offload = ("none", "optimizer", "parameters", "nvme").index(a["offload"])
    recompute = ("none", "selective", "full").index(a["recompute"])
    schedule = ("none", "gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zbv", "dualpipev").index(a["schedule"])
    return 100 * axes + 20 * offload + 10 * a["zero"] + 5 * hybrid + 2 * recompute + schedule + int(a["tiling"])


def _legal(found: Any) -> list[dict[str, Any]]:
    return [found.legal.row(i) for i in range(len(found.legal))]


def _fitting(job: Job, legal: Sequence[Layout]) -> list[tuple[Any, ...]]:
    """Of some layouts those that fit: (step, complexity, bytes, layout)."""
    weighed = [(layout, memory_of(job, layout)) for layout in legal]
    return [
        (time_of(job, layout).step_ns, complexity(layout), memory.device, as_key(layout))
        for layout, memory in weighed
        if fits(job, layout, memory)
    ]


def _assert_search_is_brute_force(job: Job, legal: Sequence[Layout], **asked: tuple[str, ...]) -> None:
    """Same legal set, same number that fits, and a winner that no fitting layout beats."""
    found, fitting = search(Question(job=job, **asked)), _fitting(job, legal)
    assert {as_key(found.legal.row(i)) for i in range(len(found.legal))} == {as_key(layout) for layout in legal}
    assert len(found.fitting) == len(fitting)
    row = found.best_of()
    assert (row is None) == (not fitting)
    if row is None:
        return
    fastest = min(entry[0] for entry in fitting)
    rivals = [entry for entry in fitting if entry[0] <= fastest + ROUNDING_NS]
    assert as_key(found.candidates.row(row)) in {entry[-1] for entry in rivals}
    assert abs(int(found.times.step[row]) - fastest) <= ROUNDING_NS
    if {entry[0] for entry in rivals} == {fastest}:
        simplest = min(entry[1:3] for entry in rivals)
        chosen = next(entry for entry in rivals if entry[-1] == as_key(found.candidates.row(row)))
        assert (chosen[1], abs(chosen[2] - simplest[1]) <= ROUNDING_NS) == (simplest[0], True)


@pytest.mark.parametrize("words", SMALL)
def test_search_equals_brute_force(words: str) -> None:
    """The legal layouts, the number that fits and the best step time are those of a search that tries everything."""
    job = question_of(words)
    _assert_search_is_brute_force(job, enumerate_layouts(job))


@pytest.mark.parametrize(
    "words", ["llama-3.2-1b aws-p4d.24xlarge:2 2 4096 1 bf16", "pythia-160m ws-4x-4090 0 4096 1 fp16"]
)
def test_search_for_hierarchical_context_parallelism_equals_brute_force(words: str) -> None:
    """Beside the other kinds, too, the legal layouts, the number that fits and the best step time are those of trying everything."""
    job, also = question_of(words), ("hierarchical",)
    layouts = enumerate_layouts(job, also)
    assert any(layout["context_parallel"] == "hierarchical" for layout in layouts)
    _assert_search_is_brute_force(job, layouts, also=also)


@pytest.mark.parametrize(
    ("words", "layers", "also"),
    [
        ("llama-2-7b ws-2x-4090 0 4096 4 bf16", 8, "recompute_by_stage"),
        ("llama-2-7b ws-2x-4090 0 4096 4 bf16", 8, "recompute_layers"),
        ("llama-2-7b ws-4x-4090 0 4096 8 bf16", 6, "recompute_layers"),
        ("llama-2-7b ws-4x-4090 0 4096 8 bf16", 7, "recompute_by_stage"),
        ("llama-2-7b ws-2x-4090 0 4096 4 bf16", 6, "balanced_stages"),
        pytest.param("llama-2-7b ws-4x-4090 0 4096 8 bf16", 7, "balanced_stages", marks=pytest.mark.nightly),
        pytest.param("olmoe-1b-7b ws-4x-4090 0 4096 16 bf16", 5, "balanced_stages", marks=pytest.mark.nightly),
        pytest.param("olmoe-1b-7b ws-4x-4090 0 4096 16 bf16", 5, "recompute_by_stage", marks=pytest.mark.nightly),
    ],
)
def test_layers_that_run_again_equal_brute_force(words: str, layers: int, also: str) -> None:
    """Numbers of layers, all of them or those that each stage needs, are found as one finds them one after the other."""
    asked = question_of(words)
    job = replace(asked, model=replace(asked.model, layers=layers, parameters_stated=None))
    forbids = ("tp", "cp", "ep")
    left = [a for a in enumerate_layouts(job, (also,)) if all(a[axis] == 1 for axis in forbids)]
    some = {tuple(depths(a)) for a in left} | {a.get("recompute_layers", 0) for a in left}
    assert some & set(range(1, layers)) or any(len(set(each)) > 1 for each in some if isinstance(each, tuple))
    _assert_search_is_brute_force(job, left, also=(also,), forbids=forbids)


@pytest.mark.parametrize("words", SIXTEEN)
def test_legal_layouts_of_sixteen_devices_equal_brute_force(words: str) -> None:
    """What a search on several nodes looks at is exactly what is legal and not collapsed."""
    job = question_of(words)
    found = search(Question(job=job))
    assert {as_key(found.legal.row(i)) for i in range(len(found.legal))} == set(map(as_key, enumerate_layouts(job)))


@pytest.mark.nightly
@pytest.mark.parametrize("words", WIDER)
def test_search_equals_brute_force_on_more_devices(words: str) -> None:
    """The same on up to sixteen devices and with every batch split."""
    job = question_of(words)
    _assert_search_is_brute_force(job, enumerate_layouts(job))


CI, LONG = {"devices": 16, "layouts": 80}, {"devices": 64, "layouts": 600}
"""The sizes of scenarios of which the ci suite asks half, and of those that are asked at night only."""
SMALL_SCENARIOS, LARGE_SCENARIOS, AT_ONCE = 200, 2000, 10
EVERY: dict[str, set[Any]] = {
    "zero": {0, 1, 2, 3},
    "schedule": {"none", "gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zbv", "dualpipev"},
    "context_parallel": {"none", "ring", "all-to-all", "hierarchical"},
    "recompute": {"none", "selective", "full"},
    "offload": {"none", "optimizer", "parameters", "nvme"},
    "sequence_parallel": {0, 1},
    "tiling": {1, 8},
    "stage_split": {"even", "weighted", "balanced"},
}
"""Every value of the choices that have a closed list of them."""
SIZES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "virtual_stages", "micro_batch", "accumulation")


@pytest.mark.parametrize("first", range(0, SMALL_SCENARIOS, AT_ONCE))
def test_scenarios_by_number_equal_brute_force(first: int) -> None:
    """Ten drawn questions of up to 16 devices, techniques left out: same layouts, as many that fit, same best."""
    for number in range(first, first + AT_ONCE):
        asked = scenario(number, **CI)
        _assert_search_is_brute_force(asked.job, asked.layouts, forbids=asked.forbids, also=asked.also)


@pytest.mark.nightly
def test_the_scenarios_are_of_every_kind() -> None:
    """Together the small questions have layouts with every value of every choice, and leave out and add every technique."""
    asked = [scenario(number, **CI) for number in range(SMALL_SCENARIOS)]
    seen = {name: {layout[name] for one in asked for layout in one.layouts} for name in (*EVERY, *SIZES)}
    assert {name: values - seen[name] for name, values in EVERY.items() if values - seen[name]} == {}
    assert [name for name in SIZES if not seen[name] - {1}] == []
    assert {word for one in asked for word in one.forbids} == set(TECHNIQUES)
    assert {word for one in asked for word in one.also} == {*ADDED, *NUMBERS}
    assert len({str(one) for one in asked}) > 0.9 * SMALL_SCENARIOS


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(SMALL_SCENARIOS, SMALL_SCENARIOS + LARGE_SCENARIOS, 5 * AT_ONCE))
def test_larger_scenarios_by_number_equal_brute_force(first: int) -> None:
    """Fifty drawn questions of up to 64 devices."""
    for number in range(first, first + 5 * AT_ONCE):
        asked = scenario(number, **LONG)
        _assert_search_is_brute_force(asked.job, asked.layouts, forbids=asked.forbids, also=asked.also)


def test_oracle_states_every_rule_of_the_book() -> None:
    """Each rule that forbids has its condition in the oracle, in the book's order."""
    assert list(VIOLATIONS) == [rule.id for rule in load_rules("legality")]


@pytest.mark.parametrize("words", SMALL)
def test_largest_layer_equals_the_oracle(words: str) -> None:
    """The bytes of the widest single layer, which decide about tiling, are the oracle's."""
    job = question_of(words)
    assert columns_largest_layer_bytes(job) == pytest.approx(largest_layer_bytes(job), abs=1)
