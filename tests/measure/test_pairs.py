"""Encoders with decoders down the ladder: the formulas against the traced program of a model made of the executor's own parts, which is theirs
in every row, and a trace of transformers' own model, which a user gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strategist.document.observed import RankObservation
from strategist.document.plan import Plan
from strategist.facts.model import ModelShape
from strategist.facts.models import load_model
from strategist.measure.kinds import Kind, chosen_kinds
from tests.executor.harness import run_alone
from tests.measure.grid import PEAK, Scenario, differences, plan_of
from tests.measure.test_formulas import _assert_keeps_its_bar, mostly_nightly

pytestmark = pytest.mark.slow

SP = {"tp": 2, "sequence_parallel": True}


def small(model: str, encoder: int, decoder: int) -> ModelShape:
    """A real shape of few layers. Tables of relative positions are left out, as no term counts them."""
    shape = load_model(model)
    extra = tuple((name, 0 if name == "rel_buckets" else value) for name, value in shape.extra)
    return replace(shape, enc_layers=encoder, layers=decoder, extra=extra)


def _scenario(
    number: int, model: str, layers: tuple[int, int], lengths: tuple[int, int | None], **layout: Any
) -> Scenario:
    precision = layout.pop("precision", "bf16")
    name = f"{model}-{layers[0]}+{layers[1]}l-{number}"
    return Scenario(name, small(model, *layers), lengths[0], precision, {"micro_batch": 4} | layout, targets=lengths[1])


SCENARIOS = tuple(
    _scenario(number, model, layers, lengths, **layout)
    for number, (model, layers, lengths, layout) in enumerate((
        ("bart-large", (4, 4), (512, 128), {"dp_shard": 8, "zero": 3}),
        ("t5-large", (2, 6), (1024, 64), SP | {"dp_shard": 4, "zero": 1}),
        ("bart-large", (4, 4), (512, 128), {}),
        ("t5-base", (4, 4), (512, None), {"dp_shard": 8, "zero": 3}),
        ("t5-base", (4, 4), (512, 1024), SP | {"dp_shard": 4, "zero": 3}),
        ("bart-large", (4, 4), (512, 128), {"dp_replicate": 8}),
        ("bart-large", (3, 2), (512, 64), {"tp": 2, "dp_shard": 4, "zero": 3, "micro_batch": 2}),
        ("bart-large", (4, 4), (512, 1000), {"dp_replicate": 8, "recompute": "selective"}),
        ("t5-base", (4, 4), (512, 128), {"dp_shard": 8, "zero": 2, "recompute": "full"}),
        ("t5-base", (4, 4), (512, 128), {"tp": 2, "dp_replicate": 4, "accumulation": 2}),
        ("t5-large", (6, 2), (512, 64), {"dp_replicate": 8, "accumulation": 2, "precision": "fp32"}),
        ("t5-large", (2, 6), (1024, 64), {"dp_replicate": 8, "recompute": "selective"}),
        ("bart-large", (4, 4), (512, None), SP | {"dp_shard": 4, "zero": 1}),
        ("t5-base", (4, 4), (512, 1024), SP | {"recompute": "full"}),
        ("flan-t5-base", (4, 4), (512, 128), {"dp_replicate": 8}),
        ("t5-3b", (2, 2), (512, 114), {"dp_replicate": 2, "dp_shard": 4, "zero": 3, "accumulation": 2}),
    ))
)  # fmt: skip


def _seen(plan: Plan, rank: int) -> RankObservation:
    import torch

    from strategist.measure.trace_rank import trace_rank
    from tests.measure.pair_model import Pair

    def make() -> Pair:
        with torch.device("meta"):
            return Pair(plan.model)

    return trace_rank(plan, Kind(f"rank {rank}", rank, 0), make)


@mostly_nightly(SCENARIOS, 8)
def test_formulas_agree_with_the_program_of_an_encoder_and_a_decoder(scenario: Scenario) -> None:
    """Whatever the lengths of both: bytes at the peak, by term, and what ranks send, to a thousandth; between the decoder's backward and the
    encoder's stands the highest peak where targets are short."""
    plan = plan_of(scenario)
    (kind,) = chosen_kinds(plan, "first")
    found = list(differences(scenario, run_alone(_seen, plan, kind.rank, timeout_s=300.0)))
    assert any(each.place == PEAK and each.name == "allocated" and each.traced for each in found)
    for each in found:
        _assert_keeps_its_bar(each)


def _theirs(plan: Plan) -> RankObservation:
    from transformers import BartConfig, BartForConditionalGeneration

    from strategist.measure.models import made_model
    from strategist.measure.trace_rank import trace_rank

    layers = {"encoder_layers": plan.model.enc_layers, "decoder_layers": plan.model.layers}
    config = BartConfig(dropout=0.0, use_cache=False, **layers)
    return trace_rank(plan, Kind("rank 0", 0, 0), made_model(lambda: BartForConditionalGeneration(config)))


def test_a_trace_takes_a_model_of_transformers_with_two_lengths() -> None:
    """BART as it is: both its tokens and labels reach it, and its peak is the formulas' to a hundredth."""
    scenario = _scenario(0, "bart-large", (2, 2), (512, 128), dp_shard=8, zero=3)
    plan = plan_of(scenario)
    found = differences(scenario, run_alone(_theirs, plan, timeout_s=300.0))
    (peak,) = (each for each in found if each.place == PEAK and each.name == "allocated")
    assert peak.ratio == pytest.approx(1.0, abs=1e-2)
