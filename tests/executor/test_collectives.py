"""What a layout sends in one step: the counts that its papers promise, no message twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.plans import make_plan, tiny_llama

pytestmark = pytest.mark.slow

LAYERS = 3


def _count(*, tied: bool = False, **layout: Any) -> dict[str, int]:
    from tests.executor.harness import run_ranks
    from tests.executor.workers import collectives

    plan = make_plan(tiny_llama(layers=LAYERS, tied=tied), **layout)
    first, *others = run_ranks(plan.mesh.world, collectives, plan)
    assert all(other == first for other in others)
    return first


def test_zero_3_gathers_each_block_twice_and_zero_2_once() -> None:
    """Zero 2 gathers layers + 2 times and zero 3 2 x layers + 2 times; both reduce layers + 2 times.

    The 2 are the embedding, and last norm with head, which are units of their own. Under zero 3 blocks are gathered again
    for backward; norm and head are kept, because backward begins there, and an embedding's gradient needs no weights.
    """
    two, three = (_count(dp_shard=2, zero=zero, micro_batch=4) for zero in (2, 3))
    assert two["_allgather_base_"] == LAYERS + 2
    assert three["_allgather_base_"] == 2 * LAYERS + 2
    assert two["_reduce_scatter_base_"] == three["_reduce_scatter_base_"] == LAYERS + 2


def test_backward_gathers_each_unit_before_the_one_behind_it_is_reduced() -> None:
    """FSDP2 prefetches: under zero 3 the weights of layer i arrive while layer i + 1 still computes its gradients."""
    from tests.executor.harness import run_ranks
    from tests.executor.workers import unit_order

    plan = make_plan(tiny_llama(layers=LAYERS), dp_shard=2, zero=3, micro_batch=4)
    forward = ["token_embedding", "layers.0", "layers.1", "layers.2", "norm, head"]
    backward = ["gather layers.2", "reduce norm, head", "gather layers.1", "reduce layers.2", "gather layers.0"]
    last = ["reduce layers.1", "reduce layers.0", "reduce token_embedding"]
    for order in run_ranks(2, unit_order, plan):
        assert order == [f"gather {unit}" for unit in forward] + backward + last


@pytest.mark.parametrize(("zero", "block", "embedding", "head"), [(3, 2 * 4, 4, 4 + 1), (2, 1, 1, 1)])
def test_a_pipeline_gathers_as_its_plan_says(zero: int, block: int, embedding: int, head: int) -> None:
    """Of 4 micro-batches zero 3 gathers a block for each forward and backward, the embedding for each forward, and last
    norm with head for each micro-batch and once in vain (FSDP2 prefetches what came before); zero 2 gathers all once.

    Gradients are reduced once, after the last micro-batch.
    """
    from tests.executor.harness import run_ranks
    from tests.executor.workers import unit_order

    plan = make_plan(tiny_llama(layers=4), pp=2, dp_shard=2, zero=zero, accumulation=4)
    first, _, last, _ = run_ranks(4, unit_order, plan)
    for order, times in (
        (first, {"token_embedding": embedding, "layers.0": block, "layers.1": block}),
        (last, {"layers.2": block, "layers.3": block, "norm, head": head}),
    ):
        gathers = {f"gather {unit}": count for unit, count in times.items()}
        assert Counter(order) == gathers | {f"reduce {unit}": 1 for unit in times}


def test_tied_ends_are_one_unit() -> None:
    """Embedding and head that share a weight are gathered and reduced once, together: 2 x layers + 1 and layers + 1."""
    tied = _count(tied=True, dp_shard=2, zero=3, micro_batch=4)
    assert tied["_allgather_base_"] == 2 * LAYERS + 1
    assert tied["_reduce_scatter_base_"] == LAYERS + 1


def test_tensor_parallelism_sends_what_megatron_sends() -> None:
    """Two all-reduces a layer in forward and two in backward, one each for embedding and head, three for the loss.

    Selective recomputation repeats none of them (arXiv 1909.08053, section 3).
    """
    none, selective = (_count(tp=2, micro_batch=8, recompute=kind) for kind in ("none", "selective"))
    assert none["all_reduce"] == selective["all_reduce"] == 4 * LAYERS + 2 + 3


def test_sequence_parallelism_splits_each_all_reduce_in_two() -> None:
    """Every all-reduce between blocks becomes a gather and a scatter (arXiv 2205.05198, section 4.2.2).

    What stays are three for the loss and, after backward, one more than without for all norms, whose weights every rank holds whole.
    """
    whole, counts = (_count(tp=2, sequence_parallel=is_cut, micro_batch=8) for is_cut in (False, True))
    assert counts["all_gather_into_tensor"] == counts["reduce_scatter_tensor"] == 4 * LAYERS + 2
    assert counts["all_reduce"] == 3
    assert counts["allreduce_"] == whole["allreduce_"] + 1


def test_full_recomputation_repeats_the_collectives_of_forward() -> None:
    """A forgotten block talks again before its backward: at least its two gathers of the input."""
    none, full = (_count(tp=2, sequence_parallel=True, micro_batch=8, recompute=kind) for kind in ("none", "full"))
    assert full["all_gather_into_tensor"] == none["all_gather_into_tensor"] + 2 * LAYERS
