"""What plain modules keep more under autocast than in half precision, beside what torch keeps of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, silu

from strategist.accuracy.judge import predictions
from strategist.memory.saved import habits_of, saved_tensors
from strategist.records import replace
from strategist.space.stages import kinds
from tests.accuracy.test_memory import judged

TOKENS, WIDTH = 32, 48


class RmsNorm(nn.Module):
    """As Transformers write it: in float32, and back to the format of what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """A layer whose three matrices of attention read one norm, and one or two of the feed-forward part the other."""

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        norm = RmsNorm if gated else nn.LayerNorm
        self.norms = nn.ModuleList([norm(WIDTH), norm(WIDTH)])
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.ups = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(1 + gated)])
        self.down, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](x)
        query, key, value = (matrix(normed) for matrix in self.qkv)
        x = x + self.out(query * key * value)  # in place of attention, which has the same in either
        normed = self.norms[1](x)
        inside = [matrix(normed) for matrix in self.ups]
        made = silu(inside[0]) * inside[1] if len(inside) == 2 else gelu(inside[0])
        return x + self.down(made)


def _kept(block: nn.Module, x: torch.Tensor, *, is_cast: bool) -> float:
    """Bytes per token and unit of width of all activations that torch keeps for backward."""
    held: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (TOKENS, WIDTH):
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        result = block(x)
    result.sum().backward()
    return sum(held.values()) / (TOKENS * WIDTH)


@pytest.mark.parametrize(("model", "gated"), [("llama-3-8b", True), ("bert-large-uncased", False)])
def test_autocast_keeps_a_wide_stream_and_a_copy_for_each_matrix(model: str, gated: bool, tmp_path: Path) -> None:
    """Rows that only autocast has are as many bytes as torch keeps more of a block in float32 under autocast than of the same in bf16."""
    block, x = Block(gated=gated), torch.randn(TOKENS, WIDTH, requires_grad=True)
    under_autocast = _kept(block, 1.0 * x, is_cast=True)
    pure = _kept(block.to(torch.bfloat16), 1.0 * x.detach().to(torch.bfloat16).requires_grad_(), is_cast=False)
    one = judged(
        tmp_path, framework="Hugging Face Transformers", model=model, precision="bf16-mixed", dp="8", pp="1", tp="1",
        zero_class="0", seq_len="512", step_time_s="1",
    )  # fmt: skip
    assert one.case is not None
    shape = one.case.job.model
    rows = [row for row in saved_tensors(shape, kinds(shape)[0], habits_of(one.case.job)) if row.cut == "autocast"]
    more = sum(row.width * (1 if row.is_float8 else 2) for row in rows) / shape.hidden
    assert more == under_autocast - pure


@pytest.mark.parametrize(("zero", "is_wide"), [("0", True), ("1", True), ("2", False), ("3", False)])
def test_only_plain_modules_keep_a_wide_stream(zero: str, is_wide: bool, tmp_path: Path) -> None:
    """Weights that are gathered in half precision make a narrow stream, whoever has autocast around it."""
    one = judged(
        tmp_path, framework="Hugging Face Transformers", precision="bf16-mixed", dp="8", pp="1", tp="1", zero_class=zero,
        zero_stage_or_fsdp="FSDP" if zero in "23" else "DDP", step_time_s="1",
    )  # fmt: skip
    assert one.case is not None
    job = one.case.job
    narrow = replace(job, profile=replace(job.profile, keeping=replace(job.profile.keeping, wide_softmax=False)))
    held, without = (predictions(each, [dict(one.case.layout)])[1].device[0] for each in (job, narrow))
    assert (held > without) == is_wide
    assert held >= without
