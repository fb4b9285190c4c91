"""What unfused attention keeps of its scores, beside what torch keeps of the same operations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import dropout, softmax

from strategist.memory.saved import score_bytes
from tests.accuracy.test_memory import judged

FORMATS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _kept(compute: torch.dtype, *, in_float32: bool, drops: bool) -> float:
    """Bytes per score of every tensor as large as the scores that torch keeps for backward: softmax, dropout, the product with values."""
    length, width = 64, 8
    query, key, value = (torch.randn(length, width, dtype=compute, requires_grad=True) for _ in range(3))
    held: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (length, length):
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        scores = query @ key.T
        shares = softmax(scores, dim=-1, dtype=torch.float32 if in_float32 else None).to(compute)
        if drops:
            shares = torch.native_dropout(shares, 0.1, train=True)[0]  # a mask of one byte, as on a GPU
        result = shares @ dropout(value, 0.0)
    result.sum().backward()
    return sum(held.values()) / length**2


@pytest.mark.parametrize(
    ("model", "precision", "in_float32", "drops"),
    [
        ("llama-3-8b", "bf16-pure", True, False),
        ("llama-3-8b", "bf16-mixed", True, False),
        ("llama-3-8b", "fp32", True, False),
        ("gpt2", "bf16-pure", False, True),
        ("gpt2", "bf16-mixed", True, True),
        ("gpt2", "fp32", False, True),
    ],
)
def test_scores_of_transformers_are_kept_as_torch_keeps_them(
    model: str, precision: str, in_float32: bool, drops: bool, tmp_path: Path
) -> None:
    """Gated models take their softmax in float32 whatever the format, and autocast does with any; plain ones drop scores too."""
    one = judged(
        tmp_path, framework="Hugging Face Transformers", model=model, precision=precision, attention_impl="eager", dp="8",
        pp="1", tp="1", zero_class="0", seq_len="1024", step_time_s="1",
    )  # fmt: skip
    assert one.case is not None and one.case.job.profile.attention == "unfused"
    compute = FORMATS[one.case.job.workload.precision]
    assert score_bytes(one.case.job) == _kept(compute, in_float32=in_float32, drops=drops)
