"""Plans for adapters: what they hold, what they say, and what they refuse."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from strategist import StrategistError, recommend
from strategist.document.load import plan_from
from strategist.document.plan import Plan
from strategist.document.write import dump, seal_state
from strategist.errors import ImpossibleError
from strategist.facts.adapters import QUANTISED_BYTES

H, KV, F, LAYERS = 4096, 1024, 14336, 32
"""Widths of Llama-3.1-8B: hidden, keys, feed-forward; its layers."""
SHARDED = "dp_shard=8,zero=3,recompute=full,micro_batch=1"


@cache
def planned(method: str | None, pin: str = "dp_replicate=8,recompute=full,micro_batch=1", **more: Any) -> Plan:
    """The 8B on one node, beside 16 sequences."""
    job = {"seq_len": 2048, "global_batch": 16, "top": 1, "pin": pin} | more
    return recommend("llama-3.1-8b", "dgx-h100", method=method, **job)


def held(plan: Plan, term: str) -> int:
    """Bytes of a term on the fullest stage."""
    return next((each.bytes for each in plan.memory.worst.terms if each.name == term), 0)


def test_states_are_those_of_frozen_weights_and_of_two_factors_beside_each_matrix() -> None:
    """On every replica: two bytes per frozen weight, and beside each of seven matrices rank x (in + out) weights of four bytes, with a
    gradient of four and two moments."""
    plan = planned("lora", lora_rank=8)
    factors = 8 * LAYERS * (2 * (H + H) + 2 * (H + KV) + 2 * (H + F) + (F + H))
    frozen = 8_030_261_248
    assert held(plan, "parameters") == 2 * frozen + 4 * factors
    assert held(plan, "gradients") == 4 * factors
    assert held(plan, "optimizer") == 8 * factors


@pytest.mark.slow
def test_shards_of_a_frozen_model_divide_its_states() -> None:
    """Over eight ranks ZeRO-3 leaves each an eighth of frozen weights, adapters and moments: all of these sizes divide."""
    whole, shard = planned("lora"), planned("lora", SHARDED)
    for term in ("parameters", "optimizer"):
        assert held(shard, term) * 8 == held(whole, term)


def test_a_weight_in_four_bits_takes_an_eighth_of_one_more() -> None:
    """Of a scale of 32 bits per 64 weights double quantisation leaves 8 / 64 + 32 / (64 x 256) = 0.127 bits a weight (Dettmers et al. 2023, arXiv
    2305.14314, section 3)."""
    bits = QUANTISED_BYTES * 8
    assert bits - 4 == pytest.approx(0.127, abs=5e-4)


@pytest.mark.slow
def test_quantised_matrices_rest_in_four_bits_and_their_scales() -> None:
    """4.127 bits for each weight of the layers' matrices; embedding, head and norms stay as they were."""
    matrices = LAYERS * (2 * H * H + 2 * H * KV + 3 * H * F)
    spared = held(planned("lora"), "parameters") - held(planned("qlora"), "parameters")
    assert spared == pytest.approx(matrices * (16 - 4.126953125) / 8, abs=1)


@pytest.mark.slow
def test_frozen_weights_cost_neither_a_product_nor_a_message() -> None:
    """With the same layout a step of adapters is shorter than one of all weights, and its gradients are hardly sent."""
    full, lora = (planned(method, "dp_shard=8,zero=3,recompute=none,micro_batch=1") for method in (None, "lora"))
    products = [next(term.exposed_ns for term in plan.time.terms if term.name == "matmul") for plan in (full, lora)]
    assert 0.6 < products[1] / products[0] < 0.8
    assert lora.time.step_ns < full.time.step_ns
    assert lora.time.model_FLOP < 0.75 * full.time.model_FLOP


def test_a_plan_says_its_adapters_and_reads_back() -> None:
    """The document names method, rank, alpha and matrices; a plan of full training has no such field at all."""
    plan, full = planned("lora", lora_targets="v, q", lora_rank=4), planned(None, SHARDED)
    document = json.loads(dump(plan))
    assert document["model"]["adapters"] == {"method": "lora", "rank": 4, "alpha": 8, "targets": ["q", "v"]}
    assert plan_from(document, "PLAN") == plan
    assert seal_state(plan) == "sealed"
    assert "adapters" not in dump(full)
    assert planned("full", SHARDED).memory == full.memory


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"lora_rank": 8}, "CONFLICT"),
        ({"method": "full", "lora_targets": "q"}, "CONFLICT"),
        ({"method": "lora", "lora_targets": "q,head"}, "CHOICE"),
        ({"method": "lora", "lora_rank": 0}, "RANGE"),
        ({"method": "dora"}, "CHOICE"),
        ({"method": "lora", "pin": "tp=2"}, "UNSUPPORTED"),
        ({"method": "qlora", "pin": "pp=2"}, "UNSUPPORTED"),
        ({"method": "qlora", "frontend": "strategist", "precision": "fp16"}, "UNSUPPORTED"),
    ],
)
def test_what_has_no_meaning_is_refused(said: dict[str, Any], code: str) -> None:
    """Words about adapters that nobody trains, matrices that there are not, and layouts that nobody tried."""
    with pytest.raises(StrategistError) as refused:
        recommend("llama-3.1-8b", "dgx-h100", **{"seq_len": 512, "global_batch": 16} | said)
    assert refused.value.code == code


@pytest.mark.parametrize("model", ["deepseek-v3", "mamba-2.8b"])
def test_layers_of_other_parts_have_no_adapters_yet(model: str) -> None:
    """Latent attention and state spaces are refused by name."""
    with pytest.raises(ImpossibleError, match=model):
        recommend(model, "dgx-h100", method="lora")


@pytest.mark.parametrize(
    ("model", "targets", "words"),
    [
        ("olmoe-1b-7b", "q,up", "olmoe-1b-7b adapters stand beside the matrices of attention alone, and up is none"),
        ("olmoe-1b-7b", "gate,down", "gate, down are none"),
        ("gpt2", "q,gate", "has no matrix gate in its layers"),
    ],
)
def test_matrices_that_a_model_has_not_are_named(model: str, targets: str, words: str) -> None:
    """Experts lie stacked, and some models have no gate: what was asked for is not left out in silence."""
    with pytest.raises(ImpossibleError, match=words) as refused:
        recommend(model, "dgx-h100", method="lora", lora_targets=targets)
    assert refused.value.flag == "--lora-targets"


@pytest.mark.slow
def test_mixtures_have_adapters_beside_attention() -> None:
    """Unasked beside its four matrices, which is printed; in four bits lie those of all experts too, and none of them is trained."""
    lora, qlora = (
        recommend("olmoe-1b-7b", "dgx-h100", seq_len=512, global_batch=16, top=1, method=method, pin="dp_replicate=8")
        for method in ("lora", "qlora")
    )
    shape = lora.model
    assert shape.adapters is not None
    assert shape.moe is not None
    assert shape.adapters.targets == ("q", "k", "v", "o")
    assert any("stacked" in assumption.source for assumption in lora.assumptions)
    width, experts = shape.hidden, 3 * shape.moe.experts * shape.moe.ffn * shape.hidden
    assert held(lora, "optimizer") == 8 * shape.layers * 4 * 16 * 2 * width
    router = shape.moe.experts * width
    spared = held(lora, "parameters") - held(qlora, "parameters")
    weights = shape.layers * (4 * width * width + experts + router)
    assert spared == pytest.approx(weights * (16 - 4.126953125) / 8, abs=1)
