"""Experts that get more tokens than others: what grows with them, what does not, and how a question, a plan and its readers say it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from strategist import Plan, predict, recommend
from strategist.ask import Given, complete
from strategist.document.load import load_plan, plan_from
from strategist.document.write import as_document, dump
from strategist.errors import InputError
from strategist.facts.job import Job
from strategist.facts.model import layer_counts
from strategist.facts.workload import Workload
from strategist.memory.estimate import peak_memory
from strategist.planner.check import faults
from strategist.planner.predict import predict_plan
from strategist.planner.sensitivity import assumptions
from strategist.space.candidates import Candidates
from strategist.space.shares import elements, groups
from strategist.space.traffic import traffic
from strategist.timing.estimate import least_step_ns, step_times
from tests.cli.harness import call
from tests.oracle.test_search import ROUNDING_NS, question_of
from tests.planner.properties import Properties
from tests.planner.test_layout_properties import PLAIN
from tests.strategies import candidates, legal_candidates, questions

PROPERTIES = Properties()
MIXTURE = "olmoe-1b-7b dgx-h100 4 2048 8 bf16"
SMALL = {"model": "olmoe-1b-7b", "hardware": "dgx-h100", "global_batch": 16, "seq_len": 1024, "pin": "ep=4,pp=1"}
RATIOS = (1.0, 1.25, 2.0, 3.5)


def busy(job: Job, ratio: float) -> Job:
    """The job whose busiest experts get so many times the tokens of the mean rank."""
    return replace(job, workload=replace(job.workload, expert_imbalance=ratio))


def every_layout(words: str) -> tuple[Job, Candidates]:
    """A question and all that a search looks at."""
    job = question_of(words)
    return job, legal_candidates(job)


def _waits_for_nothing_else(columns: Candidates) -> np.ndarray:
    """Layouts of one stage whose launches are charged as they are made: the faults of docs/decisions/0042 left out."""
    return (columns["pp"] == 1) & (columns["recompute"] != 1)


@pytest.mark.slow
@PROPERTIES.holds(6, questions().filter(lambda job: job.model.moe is not None), st.sampled_from(RATIOS[1:]))
def test_less_balance_never_helps(job: Job, ratio: float) -> None:
    """No layout holds less or takes less time when experts get less even shares; one whose ranks share none is what it was to the
    byte and the nanosecond. Chunks of a stage with layers of two sorts are left out: each is counted with the mean of the
    stage's layers, and backward lets go of a whole one."""
    columns = legal_candidates(job)
    before, after = (step_times(busy(job, own), columns) for own in (1.0, ratio))
    held, more = (peak_memory(busy(job, own), columns) for own in (1.0, ratio))
    alone = columns["ep"] == 1
    whole = (columns["virtual_stages"] == 1) | (len(layer_counts(job.model)) == 1)
    assert (more.device >= held.device)[whole].all()
    assert (after.step + ROUNDING_NS >= before.step)[_waits_for_nothing_else(columns)].all()
    assert (more.device == held.device)[alone].all()
    assert (after.step == before.step)[alone].all()


def test_every_further_token_counts() -> None:
    """Of a mixture on four devices each step away from balance takes longer and holds more where ranks share experts."""
    job, columns = every_layout(MIXTURE)
    columns = columns.where((columns["ep"] == 4) & _waits_for_nothing_else(columns))
    steps = np.stack([step_times(busy(job, ratio), columns).step for ratio in RATIOS])
    held = np.stack([peak_memory(busy(job, ratio), columns).device for ratio in RATIOS])
    assert len(columns) > 10
    assert (np.diff(steps, axis=0) > 0).all()
    assert (np.diff(held, axis=0) > 0).any(axis=1).all()
    assert (np.diff(held, axis=0) >= 0).all()


def test_no_rank_gets_more_than_all_tokens() -> None:
    """Of two ranks that share experts none gets more than twice the mean, whatever is assumed."""
    job, columns = every_layout(MIXTURE)
    pairs = columns.where(columns["ep"] == 2)
    twice, more = (step_times(busy(job, ratio), pairs).step for ratio in (2.0, 3.0))
    assert (twice == more).all()
    assert (peak_memory(busy(job, 2.0), pairs).device == peak_memory(busy(job, 3.0), pairs).device).all()


def test_what_the_busiest_rank_gets_is_sent_and_the_rest_is_as_it_was() -> None:
    """Bytes of the all-to-alls of experts are as many times more, and as many of them; no other collective changes."""
    job = question_of(MIXTURE)
    group = next(iter(groups(job, candidates([PLAIN | {"dp_shard": 4, "ep": 4, "zero": 2, "accumulation": 2}]))))
    sent = [traffic(own, group, elements(own.model, group)) for own in (job, busy(job, 1.5))]
    for before, after in zip(*sent, strict=True):
        times = 1.5 if before.axis == "ep" else 1.0
        assert after.payload_CS == pytest.approx(times * before.payload_CS)
        assert (after.count_CS == before.count_CS).all()


def test_products_of_routed_experts_alone_take_longer() -> None:
    """Of a mixture with shared experts and a first dense layer what is added to the products at three times the mean is twice what
    is added at twice; attention, loss and the permutation of a rank's own tokens stay."""
    job = question_of("deepseek-v2-lite dgx-h100 4 2048 8 bf16")
    columns = candidates([PLAIN | {"dp_shard": 4, "ep": 4, "zero": 3, "accumulation": 2}])
    balanced, twice, thrice = (step_times(busy(job, ratio), columns).exposed for ratio in (1.0, 2.0, 3.0))
    for term in ("attention", "loss", "moe_dispatch"):
        assert twice[term] == balanced[term]
    for term in ("matmul", "elementwise"):
        more = twice[term][0] - balanced[term][0]
        assert 0 < more < balanced[term][0]
        assert thrice[term][0] - balanced[term][0] == pytest.approx(2 * more, abs=2)


@PROPERTIES.holds(3, questions().filter(lambda job: job.model.moe is not None), st.sampled_from(RATIOS[1:]))
def test_a_bound_of_the_step_stays_one(job: Job, ratio: float) -> None:
    """What the search takes for the least a step can be is never above the step."""
    columns = legal_candidates(job)
    assert (least_step_ns(busy(job, ratio), columns) <= step_times(busy(job, ratio), columns).step).all()


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_balanced_document_says_nothing(ratio: float) -> None:
    """A workload is written with its ratio only where experts are not balanced."""
    work = Workload(expert_imbalance=ratio)
    assert ("expert_imbalance" in as_document(work)) == (ratio > 1)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan whose ranks share experts, not evenly."""
    return recommend(**SMALL, expert_imbalance=1.5)


def test_a_plan_carries_what_it_was_asked(plan: Plan, tmp_path: Path) -> None:
    """The document has the ratio, is read back as it is, and is priced as it was; without its ratio it is priced as balanced."""
    path = tmp_path / "plan.json"
    path.write_text(dump(plan))
    again = load_plan(str(path))
    assert again == plan
    assert again.workload.expert_imbalance == 1.5
    assert predict_plan(again).time.step_ns == plan.time.step_ns
    assert predict_plan(again).memory.worst.device == plan.memory.worst.device
    balanced = replace(plan, workload=replace(plan.workload, expert_imbalance=1.0))
    assert predict_plan(balanced).time.step_ns < plan.time.step_ns
    assert call("predict", str(path)).code == 0
    assert "busiest experts 1.5 times the mean" in call("explain", str(path), "--verbose").out


def test_predict_prices_the_same_layout_the_same(plan: Plan) -> None:
    """From Python and on the command line the layout of the plan has the plan's step."""
    layout = predict_plan(plan).layout
    own = {name: value for name, value in SMALL.items() if name != "pin"}
    assert predict(**own, strategy=layout, expert_imbalance=1.5).time.step_ns == plan.time.step_ns
    ran = call(
        "predict", "--model", "olmoe-1b-7b", "--hardware", "dgx-h100", "--global-batch", "16", "--seq-len", "1024",
        "--strategy", layout, "--expert-imbalance", "1.5", "--json",
    )  # fmt: skip
    assert ran.code == 0
    document = json.loads(ran.out)
    assert document["workload"]["expert_imbalance"] == 1.5
    assert document["time"]["step_ns"] == plan.time.step_ns


def test_a_plan_below_balance_is_not_sound(plan: Plan) -> None:
    """A hand-written ratio below one is named; one that is no number is refused at the door."""
    wrong = replace(plan, workload=replace(plan.workload, expert_imbalance=0.5))
    assert faults(wrong) == ("workload.expert_imbalance is 0.5; it is at least 1.",)
    document = json.loads(dump(plan))
    document["workload"]["expert_imbalance"] = "many"
    with pytest.raises(InputError):
        plan_from(document, "PLAN")


@pytest.mark.parametrize(
    ("model", "hardware", "told", "said"),
    [
        ("olmoe-1b-7b", "dgx-h100", None, True),
        ("olmoe-1b-7b", "dgx-h100", 1.0, False),
        ("olmoe-1b-7b", "ws-1x-4090", None, False),
        ("llama-2-7b", "dgx-h100", None, False),
    ],
)
def test_balance_is_an_assumption_where_ranks_may_share_experts(
    model: str, hardware: str, told: float | None, said: bool
) -> None:
    """It is printed with its flag for mixtures on several devices, unless somebody said it."""
    found = complete(Given(model=model, hardware=hardware, expert_imbalance=told)).assumptions
    named = [own for own in found if own.flag == "--expert-imbalance"]
    assert [own.basis for own in named] == ["assumed"] * said


@pytest.mark.parametrize(
    ("model", "ratio", "code"),
    [("llama-2-7b", 1.5, "CONFLICT"), ("mixtral-8x7b", 4.5, "TOO_LARGE"), ("mixtral-8x7b", 0.9, "RANGE"),
     ("mixtral-8x7b", 2000.0, "RANGE"), ("mixtral-8x7b", "two", "TYPE")],
)  # fmt: skip
def test_ratios_that_cannot_be_are_refused(model: str, ratio: Any, code: str) -> None:
    """Models without experts, more than tokens can choose, less than balance, and what is no ratio."""
    with pytest.raises(InputError) as refused:
        recommend(model, "dgx-h100", expert_imbalance=ratio)
    assert refused.value.code == code


def test_a_workload_says_it_too() -> None:
    """A Workload's own ratio counts, and balance is no conflict with a model without experts."""
    given = {"model": "llama-2-7b", "hardware": "dgx-h100", "strategy": "dp_shard=8,zero=3"}
    assert predict(**given, workload=Workload(global_batch=8)).workload.expert_imbalance == 1.0
    mixed = given | {"model": "mixtral-8x7b"}
    found = predict(**mixed, workload=Workload(global_batch=8, expert_imbalance=2.0))
    assert found.workload.expert_imbalance == 2.0


def test_sensitivity_varies_it_within_what_tokens_can_choose() -> None:
    """The ratio is among the assumptions of a mixture on several devices; there is no job below balance or beyond all tokens."""
    job = question_of("mixtral-8x7b dgx-h100 4 1024 4 bf16")
    found = next(own for own in assumptions(job) if own.flag == "--expert-imbalance")
    more = found.changed(2.0)
    assert more is not None
    assert more.workload.expert_imbalance == 2.0
    assert found.changed(0.99) is None
    assert found.changed(4.1) is None
    dense = question_of("llama-2-7b dgx-h100 4 1024 4 bf16")
    assert all(own.flag != "--expert-imbalance" for own in assumptions(dense))


@pytest.mark.slow
def test_brute_force_agrees_with_a_plan_of_busy_experts(tmp_path: Path) -> None:
    """`check --exhaustive` counts every layout again under the plan's ratio."""
    path = str(tmp_path / "plan.json")
    words = ("--model", "olmoe-1b-7b", "--gpu", "h100-sxm-80gb", "--gpus-per-node", "4", "--nodes", "1")
    asked = (
        *words,
        "--global-batch",
        "4",
        "--seq-len",
        "1024",
        "--expert-imbalance",
        "2",
        "--forbid",
        "offload,recompute",
    )
    assert call("plan", *asked, "--certificate", "--out", path).code == 0
    ran = call("check", path, "--exhaustive")
    assert ran.code == 0, ran.out + ran.err


@pytest.mark.nightly
@pytest.mark.parametrize("check", PROPERTIES.at_length, ids=lambda check: check.__name__)
def test_at_length(check: Any) -> None:
    """Every property above over hundreds of new examples."""
    check()
