"""What lies whole on a rank, and what rests in the host's memory."""

from __future__ import annotations

import pytest

from tests.plans import make_plan, tiny_llama

pytestmark = pytest.mark.slow

ENDS = {"token_embedding.weight", "norm.weight", "head.weight"}


@pytest.mark.parametrize(
    ("zero", "tied", "whole"),
    [(3, False, {"norm.weight", "head.weight"}), (3, True, ENDS - {"head.weight"}), (2, False, None)],
)
def test_zero_3_holds_only_what_backward_begins_with(zero: int, tied: bool, whole: set[str] | None) -> None:
    """When the loss is computed, zero 3 holds last norm and head (with a tied weight also the embedding, which is the
    same), zero 2 everything; after the step all is sharded again."""
    from strategist.executor.models import model_from_shape
    from tests.executor.harness import run_ranks
    from tests.executor.workers import gathered

    plan = make_plan(tiny_llama(tied=tied), dp_shard=2, zero=zero, micro_batch=4)
    everything = {name for name, _ in model_from_shape(plan.model).named_parameters()}
    for at_loss, after in run_ranks(2, gathered, plan):
        assert at_loss == (everything if whole is None else whole)
        assert after == set()


def test_offloaded_parameters_are_pinned_only_for_a_device() -> None:
    """Every unit offloads when the plan says so, without pinned memory on CPU ranks, which have nothing to copy to."""
    from tests.executor.harness import run_ranks
    from tests.executor.workers import offload_policies

    for offload, policy in (("parameters", "CPUOffloadPolicy"), ("none", "OffloadPolicy")):
        plan = make_plan(dp_shard=2, zero=3, micro_batch=4, offload=offload)
        assert run_ranks(2, offload_policies, plan) == [{(policy, False)}] * 2
