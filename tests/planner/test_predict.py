"""Predictions of layouts that somebody wrote by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist import Prediction, predict, recommend
from strategist.catalog import rows
from strategist.errors import ImpossibleError, InputError, NoPlanError, StrategistError
from strategist.facts.gpus import gpu_by_id
from strategist.facts.parameters import count
from strategist.facts.profile import frameworks
from strategist.facts.workload import METHODS, OPTIMIZERS, PRECISIONS
from strategist.planner.predict import predict_plan
from strategist.rulebook.rule import load_rules
from strategist.timing.rates import peak_FLOPs
from strategist.units import format_gib
from tests.cli.harness import call, plan_file
from tests.strategies import CI

MODEL, MACHINES = "llama-3.1-8b", "dgx-h100:2"


def judged(strategy: str, **fields: Any) -> Prediction:
    """A layout of a small question."""
    return predict(MODEL, MACHINES, strategy=strategy, **({"global_batch": 64} | fields))


@pytest.mark.slow
def test_a_step_of_years_is_refused_and_not_wrapped_around() -> None:
    """A step whose nanoseconds are more than 64 bits hold is refused as too long, and no memory whose bytes are more fits; over the
    slowest links that are taken times are positive and as their terms add up."""
    whole: dict[str, Any] = {"global_batch": 2**31, "seq_len": 2**24}
    with pytest.raises(ImpossibleError, match="two years") as refused:
        predict(MODEL, MACHINES, strategy="tp=8,dp=2", **whole)
    assert (refused.value.code, refused.value.flag) == ("TOO_LARGE", "--global-batch")
    with pytest.raises(NoPlanError, match=r"needs [1-9]"):
        recommend(MODEL, MACHINES, **whole)
    with pytest.raises(ImpossibleError, match="two years"):
        predict(MODEL, MACHINES, strategy="dp=16,mbs=134217728", **whole)
    slow = {"gpu": "h100-sxm", "gpus_per_node": 8, "nodes": 1, "intra_bw": "1MB/s"}
    found = predict(MODEL, slow, strategy="tp=8", global_batch=64, seq_len=4096)
    assert found.time.step_ns == sum(term.exposed_ns for term in found.time.terms) > 0
    sent = (
        4 * 32 * 64 * 4096 * 4096 * 2 * 7 / 8
    )  # a gather and a scatter for each half of a layer, in both directions, of 7/8 each
    assert found.time.step_ns / 1e9 > sent / 1e6


def test_the_winning_layout_is_predicted_as_it_was_planned() -> None:
    """The planner's own winner, judged alone, has the planner's ledgers: there is one model."""
    plan = recommend(MODEL, MACHINES, global_batch=64)
    again = predict_plan(plan)
    assert (again.mesh, again.strategy, again.time, again.memory) == (plan.mesh, plan.strategy, plan.time, plan.memory)
    assert again.legal and again.fits
    by_hand = judged(again.layout.replace(" ", ""))
    assert (by_hand.time, by_hand.memory) == (plan.time, plan.memory)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "card", ["v100-sxm2-32gb", "p40", "a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb", "mi250x", "cpu"]
)
def test_a_format_has_a_rate_or_a_code(card: str, precision: Any) -> None:
    """In every number format of every generation a step takes a while, or the device does not multiply in it: a prediction says so
    as a plan does."""
    machines: Any = "cpu:2" if card == "cpu" else {"format": "strategist-hardware/1", "gpu": card, "gpus_per_node": 2}
    fields: dict[str, Any] = {"global_batch": 4, "seq_len": 256, "precision": precision}
    ends: list[bool | str] = []
    for asked in (
        lambda: recommend("gpt2", machines, **fields),
        lambda: predict("gpt2", machines, strategy="dp=2,mbs=1", **fields),
    ):
        try:
            ends.append(asked().time.step_ns > 0)
        except ImpossibleError as refused:
            ends.append(refused.code)
    known = bool(peak_FLOPs(gpu_by_id(card), precision))
    assert ends == ([True, True] if known else ["HARDWARE_FEATURE"] * 2)


LAYOUTS: Mapping[str, tuple[object, ...]] = {
    "tp": (1, 2, 4, 8), "pp": (1, 2, 3, 4, 8), "cp": (1, 2, 4), "ep": (1, 2, 4, 8), "etp": (1, 2), "vp": (1, 2, 4), "mbs": (1, 2, 3, 4),
    "zero": (0, 1, 2, 3), "recompute": ("none", "selective", "full", "2", "every-2"), "sp": (0, 1), "tiling": (1, 2, 4), "cp_inner": (1, 2),
    "schedule": ("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zbv", "dualpipev"), "loss": ("chunked",),
    "offload": ("none", "optimizer", "parameters", "nvme"), "compression": ("bf16", "powersgd"),
}  # fmt: skip
"""Keys of a layout and values that may be written there, together or not."""
QUESTIONS: Mapping[str, tuple[object, ...]] = {
    "global_batch": (768, 3072, 7680), "seq_len": (128, 512, 1000, 4096, 32768), "precision": PRECISIONS, "optimizer": OPTIMIZERS,
    "framework": frameworks(), "method": METHODS,
}  # fmt: skip


@st.composite
def questions(draw: st.DrawFn) -> tuple[str, Any, str, dict[str, Any]]:
    """A model, machines, a layout and a workload: names of the catalogue, drawn apart from each other."""
    card = {"format": "strategist-hardware/1", "gpu": draw(st.sampled_from([row["name"] for row in rows("gpus")]))}
    counts = {"gpus_per_node": draw(st.sampled_from((1, 2, 3, 4, 8))), "nodes": draw(st.sampled_from((1, 2, 4, 16)))}
    node = f"{draw(st.sampled_from([row['name'] for row in rows('nodes')]))}:{draw(st.sampled_from((1, 2, 3, 8, 64)))}"
    words = draw(st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in LAYOUTS.items()}))
    asked = draw(
        st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in QUESTIONS.items()})
    )
    model = draw(st.sampled_from([row["name"] for row in rows("models")]))
    return (
        model,
        draw(st.sampled_from((card | counts, node))),
        ",".join(f"{k}={v}" for k, v in words.items()) or "mbs=1",
        asked,
    )


@pytest.mark.slow
@CI
@given(questions())
def test_any_layout_on_any_machine_has_a_length_or_a_code(question: tuple[str, Any, str, dict[str, Any]]) -> None:
    """Whatever is written for whatever machine, the answer is an error with a code or a step whose terms are never negative and add up
    to it, of devices that compute no faster than they can."""
    model, machines, layout, asked = question
    try:
        found = predict(model, machines, strategy=layout, **asked)
    except StrategistError:
        return
    terms = found.time.terms
    assert sum(term.exposed_ns for term in terms) == found.time.step_ns > 0
    assert min(min(term.exposed_ns, term.hidden_ns, term.recomputed_ns) for term in terms) >= 0
    assert 0 < found.time.mfu < 1
    assert found.time.step.low <= found.time.step.value <= found.time.step.high
    assert not found.legal or min(term.bytes for term in found.memory.worst.terms) >= 0


BARE = {"gpu": "gb10-dgx-spark"}


@pytest.mark.parametrize(
    "machines",
    [
        {"format": "strategist-hardware/1", **BARE, "gpus_per_node": 2},
        {
            "format": "strategist-hardware/1",
            "nodes": [{**BARE, "gpu_count": 4, "topology": "nvlink-pairs", "intra_bw": "20GB/s"}],
        },
    ],
    ids=["none", "pairs alone"],
)
def test_devices_of_a_node_that_nothing_joins_have_no_plan(machines: Any) -> None:
    """Where no rate inside a node, or between its pairs, is known it is asked for, instead of a division by it."""
    with pytest.raises(ImpossibleError) as refused:
        predict("gpt2", machines, strategy="mbs=1", global_batch=4)
    assert (refused.value.code, refused.value.flag) == ("NO_PATH", "--intra-bw")


def test_state_on_drives_needs_drives() -> None:
    """A node without a drive cannot keep state on one: it is said, and the step has no length."""
    with pytest.raises(ImpossibleError, match="drive") as refused:
        predict(
            "gpt2",
            {"format": "strategist-hardware/1", "gpu": "t4", "gpus_per_node": 2},
            precision="fp16",
            strategy="dp_shard=2,zero=3,offload=nvme,mbs=1",
            global_batch=4,
        )
    assert refused.value.code == "HARDWARE_FEATURE"


@pytest.mark.parametrize("model", ["dit-xl-2", "flux.1-dev", "sd3-medium", "clip-vit-l-14"])
def test_weights_that_few_tokens_meet_are_no_useful_work(model: str) -> None:
    """Modulation and second towers are weights of the model, and no products of a token: less useful than six times all weights."""
    found = predict(model, MACHINES, strategy="mbs=1", global_batch=64)
    inside = 4 * found.model.hidden**2 + 2 * found.model.hidden * found.model.ffn_hidden
    useful = found.time.model_FLOP / found.workload.tokens_per_step
    assert 6 * found.model.layers * inside < useful < 6 * count(found.model).total


def test_tf32_is_stored_like_fp32_and_multiplies_faster() -> None:
    """Every tensor in tf32 is one of fp32; products are faster than in fp32, and slower than in bf16."""
    found = {word: judged("dp_shard=16,zero=3", precision=word) for word in ("bf16", "tf32", "fp32")}
    assert found["tf32"].memory == found["fp32"].memory
    matmul = {word: next(t.exposed_ns for t in one.time.terms if t.name == "matmul") for word, one in found.items()}
    assert matmul["bf16"] < matmul["tf32"] < matmul["fp32"]


def test_what_is_left_open_is_plain_and_fills_the_machines() -> None:
    """Data parallelism takes the devices that are left, accumulation the batch that is left; zero decides the split."""
    found = judged("tp=2,mbs=2")
    assert (found.mesh.dp_replicate, found.mesh.dp_shard, found.strategy.accumulation) == (8, 1, 4)
    assert judged("tp=2,zero=1").mesh.dp_shard == 8
    assert judged("dp_shard=4").strategy.zero == 3
    assert judged("pp=4").strategy.schedule == "1f1b"
    assert judged("pp=4,vp=2").strategy.schedule == "interleaved"


@pytest.mark.parametrize("strategy", ["stage_split=weighted", "pp=4,vp=2,stage_split=weighted"])
def test_stages_that_are_not_single_chunks_are_not_weighted(strategy: str) -> None:
    """Without a pipeline there is nothing to spread, and interleaved stages have equal chunks."""
    with pytest.raises(ImpossibleError) as refused:
        judged(strategy)
    assert refused.value.code == "FRAMEWORK_LEGALITY"


def test_a_search_takes_the_faster_split_of_the_layers() -> None:
    """A wide vocabulary weighs as several layers: fewer of them on the last stage make a shorter step, so that is planned;
    where the head weighs less than one layer there is nothing to choose."""
    choices = {"global_batch": 256, "seq_len": 4096, "policy": "fastest"}
    free = recommend("gemma-2-9b", "dgx-h100", pin="pp=4,tp=2,virtual_stages=1", **choices)
    even = recommend("gemma-2-9b", "dgx-h100", pin="pp=4,tp=2,virtual_stages=1,stage_split=even", **choices)
    assert free.time.step_ns < even.time.step_ns
    *others, last = (stage.layer_count for stage in free.strategy.stages)
    assert free.strategy.stage_split == "weighted" and last < min(others)
    narrow = recommend("llama-2-7b", "dgx-h100", pin="pp=4,tp=2,virtual_stages=1", **choices)
    assert narrow.strategy.stage_split == "even"


@pytest.mark.parametrize(
    ("strategy", "rule"), [("tp=16", "LEG102"), ("pp=16,mbs=8,grad_accum=8,dp=1", "LEG203"), ("ep=2", "LEG107")]
)
def test_a_forbidden_layout_is_answered_with_the_rules_sentence(strategy: str, rule: str) -> None:
    """An illegal layout is an answer with the sentence of each broken rule, and it still has a price."""
    found = judged(strategy)
    assert not found.legal
    broken = next(fault for fault in found.violations if fault.rule == rule)
    assert broken.source == next(r.source for r in load_rules("legality") if r.id == rule)
    assert "{" not in broken.sentence
    assert found.time.step_ns > 0


def test_a_layout_that_does_not_fit_says_by_how_much() -> None:
    """Out of memory is an answer: the peak exceeds the usable bytes by what is said."""
    found = predict("llama-3.1-70b", MACHINES, strategy="dp=16", global_batch=16)
    assert found.legal and not found.fits
    assert found.over_bytes == found.memory.worst.device - found.memory.usable_bytes > 0
    assert found.shortfall == f"over by {format_gib(found.over_bytes)}"


def test_a_layout_that_does_not_fit_its_host_says_by_how_much() -> None:
    """What is offloaded and the room for it, where the device itself has room."""
    found = predict(
        "llama-3.1-405b",
        "dgx-a100-80gb",
        strategy="dp_shard=8,zero=3,offload=parameters,recompute=full",
        global_batch=8,
    )
    assert (found.fits, found.over_bytes) == (False, 0)
    assert re.fullmatch(
        r"offloading takes \d+ GiB of host memory per device, and \d+ GiB are free for it", found.shortfall
    )


@pytest.mark.parametrize(
    ("strategy", "code"),
    [
        ("tp=3", "DIVISIBILITY"),
        ("dp=8,tp=4", "DIVISIBILITY"),
        ("mbs=3", "BATCH_SPLIT"),
        ("vp=2", "FRAMEWORK_LEGALITY"),
        ("ep=5", "DIVISIBILITY"),
        ("context_parallel=ring", "FRAMEWORK_LEGALITY"),
        ("context_parallel=all-to-all", "FRAMEWORK_LEGALITY"),
        ("cp=2,context_parallel=none", "FRAMEWORK_LEGALITY"),
        ("pp=2,schedule=none", "FRAMEWORK_LEGALITY"),
        ("pp=2,schedule=interleaved", "FRAMEWORK_LEGALITY"),
        ("pp=2,schedule=looped_bfs,vp=1", "FRAMEWORK_LEGALITY"),
        ("pp=2,vp=2,schedule=1f1b", "FRAMEWORK_LEGALITY"),
        ("pp=2,vp=2,schedule=gpipe", "FRAMEWORK_LEGALITY"),
        ("pp=2,vp=2,schedule=zb_h1", "FRAMEWORK_LEGALITY"),
    ],
)
def test_degrees_that_mean_nothing_together_are_refused(strategy: str, code: str) -> None:
    """Degrees that do not multiply to the machines or the batch have no ledger, nor have words about sequences or stages that are not cut so."""
    with pytest.raises(ImpossibleError) as caught:
        judged(strategy)
    assert caught.value.code == code


def test_a_layout_of_the_grammar_that_is_priced_is_one_of_the_space() -> None:
    """Of every kind of context parallelism, schedule and number of chunks those pairs are priced that the search knows, and no others: a pair
    that means nothing would have the bytes and seconds of a layout that does not exist."""
    for kind in ("none", "ring", "all-to-all"):
        for cp in (1, 2):
            assert _is_priced(f"cp={cp},context_parallel={kind}") == ((cp > 1) == (kind != "none"))
    chunks = {"gpipe": (1,), "1f1b": (1,), "interleaved": (2,), "looped_bfs": (2,), "zb_h1": (1,), "zbv": (2,)}
    for schedule, own in chunks.items():
        assert [n for n in (1, 2, 4) if _is_priced(f"pp=2,schedule={schedule},vp={n}")] == [
            *own, *((4,) if 2 in own and schedule != "zbv" else ())
        ]  # fmt: skip


def _is_priced(strategy: str) -> bool:
    try:
        judged(strategy)
    except ImpossibleError:
        return False
    return True


def test_a_misspelt_choice_is_answered_with_the_flag() -> None:
    """The grammar's complaint names --strategy."""
    with pytest.raises(InputError) as caught:
        judged("tpp=2")
    assert (caught.value.code, caught.value.flag) == ("CHOICE", "--strategy")


@pytest.mark.slow
@pytest.mark.parametrize("framework", frameworks())
def test_every_framework_has_a_price(framework: str) -> None:
    """Every profile prices the same layout; terms add up and the interval holds the value."""
    found = judged("tp=2,pp=2,zero=1,recompute=selective", framework=framework)
    assert found.time.step_ns == sum(term.exposed_ns for term in found.time.terms) > 0
    assert found.time.step.low <= found.time.step.value <= found.time.step.high


def test_verdicts_decide_the_exit_code(tmp_path: Path) -> None:
    """0 for a layout that is legal and fits, 3 otherwise; the document is printed either way. A Plan file excludes flags."""
    question = ("--model", MODEL, "--hardware", MACHINES, "--json", "--strategy")
    good, bad = call("predict", *question, "tp=2,zero=1"), call("predict", *question, "tp=16")
    assert (good.code, good.document["legal"], good.document["fits"]) == (0, True, True)
    assert (bad.code, bad.document["legal"]) == (3, False)
    path = plan_file(tmp_path)
    assert (
        call("predict", path, "--json").document["time"] == json.loads(Path(path).read_text(encoding="utf-8"))["time"]
    )
    assert call("predict", path, "--strategy", "tp=2", "--json").error["code"] == "E_CONFLICT"
    assert call("predict", "--model", MODEL, "--json").error["code"] == "E_MISSING"
