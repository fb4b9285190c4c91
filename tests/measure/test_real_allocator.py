"""What a trace says a rank holds is what the real allocator of a real CPU rank holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from strategist.document.plan import NumberFormats
from tests.examples import by_night
from tests.executor.harness import run_alone
from tests.measure.recordings import traced_rise
from tests.plans import BFLOAT16, FLOAT32, make_plan, tiny_llama, tiny_mixtral

pytestmark = pytest.mark.slow

SHAPE = tiny_llama(layers=2, hidden=256, vocab=4096, ffn_hidden=704, head_dim=32, max_seq=512)

MIXTURE = tiny_mixtral(
    layers=2, hidden=256, vocab=256, head_dim=32, max_seq=512, moe={"experts": 2, "top_k": 2, "ffn": 64}
)
"""Every expert gets every token, whatever the router says, and their inputs are most of what a step holds."""

TABLE = tiny_llama(layers=1, hidden=128, vocab=8192, ffn_hidden=128, head_dim=16, max_seq=32, tied=True)
"""One weight for both ends, and little else: its two gradients and their sum are most of what a step holds."""


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"formats": FLOAT32},
    "one-bf16": {"formats": BFLOAT16},
    "fsdp": {"formats": FLOAT32, "dp_shard": 2, "zero": 3},
    "fsdp-bf16-full": {"formats": BFLOAT16, "dp_shard": 2, "zero": 3, "recompute": "full"},
    "zero1-bf16": {"formats": BFLOAT16, "dp_shard": 2, "zero": 1},
    "ddp": {"formats": FLOAT32, "dp_replicate": 2, "accumulation": 2},
    "tp": {"formats": FLOAT32, "tp": 2, "sequence_parallel": True},
    "tp-full": {"formats": FLOAT32, "tp": 2, "sequence_parallel": True, "recompute": "full"},
    "tp-selective": {"formats": BFLOAT16, "tp": 2, "recompute": "selective"},
}


@pytest.mark.parametrize("name", by_night(LAYOUTS, ("one-bf16", "fsdp", "tp", "tp-full")))
def test_the_traced_peak_is_the_allocator_s(name: str) -> None:
    """The rise of a step from rest to its peak is the same to a thousandth, DDP's buckets included."""
    from tests.measure.real_ranks import measured_rises

    plan = make_plan(SHAPE, seq_len=256, **LAYOUTS[name])
    measured = measured_rises(plan)
    assert traced_rise(plan) == pytest.approx(min(measured), rel=1e-3), measured


@pytest.mark.parametrize("layout", [{}, {"dp_shard": 2, "zero": 3, "ep": 2}], ids=["one", "experts-apart"])
def test_the_traced_peak_of_a_mixture_is_the_allocator_s(layout: dict[str, Any]) -> None:
    """The same of experts, whose tokens are put in order and back: the gradients of that are made in place."""
    from tests.measure.real_ranks import measured_rises

    plan = make_plan(MIXTURE, seq_len=512, formats=FLOAT32, **layout)
    measured = measured_rises(plan)
    assert traced_rise(plan) == pytest.approx(min(measured), rel=1e-3), measured


@pytest.mark.parametrize("formats", [FLOAT32, BFLOAT16], ids=["fp32", "bf16"])
def test_two_gradients_of_one_weight_are_added_up_as_autograd_does(formats: NumberFormats) -> None:
    """In place where the first is a copy that autocast made, else into a third tensor."""
    from tests.measure.real_ranks import measured_rises

    plan = make_plan(TABLE, seq_len=16, formats=formats)
    measured = measured_rises(plan)
    table = 4 * TABLE.vocab * TABLE.hidden
    assert traced_rise(plan) == pytest.approx(min(measured), rel=1e-3), measured
    assert min(measured) // table == (3 if formats == FLOAT32 else 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_matrix_product_holds_its_result_whatever_its_kernel_needs(dtype: str) -> None:
    """Some kernels of oneDNN ask torch's allocator for room that they give back; which ones, the CPU decides."""
    held_before, held_at_peak = run_alone(_product, dtype)
    assert held_at_peak - held_before == 512 * 1024 * (4 if dtype == "float32" else 2)


def _product(dtype: str) -> tuple[int, int]:
    import torch

    from strategist.measure.allocator import profiled

    def prepare() -> Callable[[], object]:
        left, right = (torch.ones(shape, dtype=getattr(torch, dtype)) for shape in ((512, 256), (1024, 256)))
        return lambda: torch.nn.functional.linear(left, right)

    return profiled(prepare)
