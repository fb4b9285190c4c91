"""What is done tensor by tensor: the deal of torch's ZeRO-1, DDP's buckets, and the list of tensors that both go by."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.facts.model import ModelShape, QkNorm, layer_counts
from strategist.facts.model_config import shape_from_config
from strategist.facts.models import load_model
from strategist.facts.tensors import (
    BUCKET,
    FIRST_BUCKET,
    Part,
    Sizes,
    ddp_buckets,
    deal,
    fullest_of_both,
    fullest_rank,
    largest_deal,
    tensor_sizes,
)
from strategist.measure.kinds import chosen_kinds
from tests.executor.harness import run_alone
from tests.executor.pair_configs import config_of
from tests.plans import make_plan
from tests.strategies import CI, Draw

MODELS = (
    "llama-3.1-8b",
    "qwen2.5-7b",
    "qwen3-8b",
    "gpt2-medium",
    "opt-1.3b",
    "gemma-2b",
    "mixtral-8x7b",
    "qwen1.5-moe-a2.7b",
)


@st.composite
def sizes(draw: Draw) -> Sizes:
    """Some sizes of tensors, the largest first, and how often each occurs."""
    found = draw(st.dictionaries(st.sampled_from((1, 7, 100, 1000, 1024, 4096, 30000)), st.integers(1, 40), min_size=1))
    return tuple(sorted(found.items(), reverse=True))


def _loads(dealt: Sizes, ranks: int) -> list[int]:
    """Every tensor on its own, to the first of the ranks with least."""
    loads = [0] * ranks
    for size, count in dealt:
        for _ in range(count):
            loads[loads.index(min(loads))] += size
    return loads


@pytest.mark.slow
@CI
@given(sizes(), st.sampled_from((1, 2, 3, 8, 17, 64)))
def test_a_deal_of_equal_sizes_at_once_is_the_deal_of_each(dealt: Sizes, ranks: int) -> None:
    """The fullest rank has what it has when tensor after tensor goes to the rank with least."""
    loads = _loads(dealt, ranks)
    assert largest_deal(dealt, ranks) == max(loads)
    assert deal(dealt, ranks) == loads[: sum(count for _, count in dealt)]
    assert loads[fullest_rank(dealt, ranks)] == max(loads)


@pytest.mark.slow
@CI
@given(sizes(), sizes(), st.sampled_from(((8, 1, 2), (8, 2, 4), (6, 2, 1), (16, 1, 16), (17, 1, 1))))
def test_the_fullest_of_two_deals_is_the_one_with_most_of_both(
    dense: Sizes, experts: Sizes, mesh: tuple[int, int, int]
) -> None:
    """What one deal gives to a rank and what another does, when neighbours are alike in each, are added up rank by rank."""
    ranks, tp, apart = mesh
    own, spread = _loads(dense, ranks), _loads(experts, ranks * tp // apart)
    held = [own[rank // tp] + spread[rank // apart] for rank in range(ranks * tp)]
    most, place = fullest_of_both((deal(dense, ranks), tp), (deal(experts, len(spread)), apart))
    assert most == held[place] == max(held)


@CI
@given(sizes(), st.sampled_from((2, 8, 64)))
def test_no_rank_is_dealt_less_than_the_largest_tensor_short_of_the_fullest(dealt: Sizes, ranks: int) -> None:
    """The fullest has at least an equal share, and at most one tensor more than that."""
    total = sum(size * count for size, count in dealt)
    assert total / ranks <= largest_deal(dealt, ranks) <= total / ranks + dealt[0][0]


def _small(name: str) -> ModelShape:
    shape = load_model(name)
    return replace(shape, layers=3, pos_rows=512 if shape.pos == "learned" else shape.pos_rows)


def test_a_trace_of_zero_1_looks_at_the_rank_that_is_dealt_most() -> None:
    """The rank that stands for a stage holds more of the optimizer's state than its share."""
    shape = _small("mistral-7b-v0.1")
    plan = make_plan(shape, dp_shard=8, zero=1, backend="nccl")
    part = Part((shape.layers,), True, True, 1, 1, 1)
    loads = _loads(tensor_sizes(shape, part), 8)
    (kind,) = chosen_kinds(plan, "first,last")
    assert loads[kind.rank] == max(loads) > sum(loads) / 8


def _real_sizes(shape: ModelShape) -> Counter[int]:
    from strategist.executor.models import model_from_shape

    return Counter(parameter.numel() for parameter in model_from_shape(shape).parameters())


@pytest.mark.slow
@pytest.mark.parametrize("qk_norm", ("", "head", "full"))
@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_those_of_the_executors_model(name: str, qk_norm: QkNorm) -> None:
    """As many of each size as the built-in model has parameters of it, whatever its norms of queries and keys."""
    shape = replace(_small(name), qk_norm=qk_norm)
    assert dict(tensor_sizes(shape, Part((shape.layers,), True, True, 1, 1, 1))) == run_alone(_real_sizes, shape)


def _real_buckets(shape: ModelShape) -> int:
    import torch

    from strategist.executor.models import model_from_shape

    model = model_from_shape(shape, "meta")
    come = [torch.empty(p.shape, device="meta") for p in reversed(list(model.parameters()))]
    places, _ = torch._C._distributed_c10d._compute_bucket_assignment_by_size(come, [FIRST_BUCKET, BUCKET])
    return len(places)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("llama-3.1-8b", "qwen2.5-7b", "gemma-2b", "gpt2-medium", "mixtral-8x7b"))
def test_buckets_are_as_many_as_torch_fills(name: str) -> None:
    """torch's own rule, on the model's parameters from the last to the first, fills the same number of buckets."""
    shape = _small(name)
    assert ddp_buckets(shape, 4) == run_alone(_real_buckets, shape)


def _sizes_of_transformers(config: dict[str, Any]) -> Counter[int]:
    import torch
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    own = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(config["model_type"], **own))
    return Counter(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart", "mbart"])
def test_tensors_of_an_encoder_with_a_decoder_are_those_of_transformers(family: str) -> None:
    """Each half has tables of positions and norms of its own, each attention biases of its own."""
    config = config_of(family)
    shape = shape_from_config(config)
    kinds = tuple(layer_counts(shape).values())
    assert dict(tensor_sizes(shape, Part(kinds, True, True, 1, 1, 1))) == run_alone(_sizes_of_transformers, config)
