"""Optimizer state on a drive: the arithmetic of one that keeps it in memory, and nothing left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from strategist.errors import InternalError
from tests.plans import make_plan, tiny_llama

pytestmark = pytest.mark.slow

SIZES = (700, 256, 1, 129, 300)
"""Elements of some weights; blocks of 256 cut the first and the last and put others together."""


def _trained(on_drive: bool, kind: str) -> tuple[list[Any], Any]:
    """Weights after five updates of an optimizer of torch's, the third without gradients for one of them; and the optimizer."""
    import torch
    from torch import nn

    from strategist.executor.drive import Drive, StateOnDrive

    def make(groups: Any) -> Any:
        if kind == "sgd":
            return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)

    drawn = torch.Generator().manual_seed(1)
    weights = [nn.Parameter(torch.randn(size, generator=drawn, dtype=torch.float64)) for size in SIZES]
    optimizer: Any = StateOnDrive(weights, make, Drive(), 256) if on_drive else make(weights)
    for step in range(5):
        for number, weight in enumerate(weights):
            gradient = torch.randn(weight.shape, generator=drawn, dtype=torch.float64)
            weight.grad = None if (step, number) == (2, 1) else gradient
        optimizer.step()
    return [weight.detach() for weight in weights], optimizer


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_state_on_a_drive_changes_no_bit(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that cut weights and put weights together train as one optimizer in memory does, bit for bit."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (expected, _), (got, optimizer) = (_trained(on_drive, kind) for on_drive in (False, True))
    assert len(optimizer.blocks) > 4
    assert all(one.equal(other) for one, other in zip(expected, got, strict=True))


def test_the_host_holds_two_blocks_and_the_folder_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All states but single numbers lie in files, which have no name that a killed process could leave behind; in memory are
    two buffers of the largest block."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    _, optimizer = _trained(True, "adamw")
    assert sum(len(image) for image in optimizer.images) >= 2 * 8 * sum(SIZES)
    assert [len(buffer) for buffer in optimizer.buffers] == [2 * 8 * 256] * 2
    assert list(tmp_path.iterdir()) == []
    mapped = [
        line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines() if str(tmp_path) in line
    ]
    assert len(mapped) == len(optimizer.blocks)
    assert all(line.endswith("(deleted)") for line in mapped)


def test_a_folder_that_takes_nothing_is_a_sentence_before_training() -> None:
    """A session is not built where its state cannot be put: the error names the folder and the variable that names it."""
    from tests.executor.harness import run_ranks
    from tests.executor.workers import refused_drive

    plan = make_plan(tiny_llama(), dp_shard=2, zero=3, micro_batch=4, offload="nvme")
    for code, sentence, flag in run_ranks(2, refused_drive, plan, "/proc/no-such-folder"):
        assert (code, flag) == ("IO", "TMPDIR")
        assert "/proc/no-such-folder" in sentence


def test_a_full_drive_is_a_sentence_and_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More room than any drive has is refused when it is asked for, not when it is written to, and leaves no file."""
    from strategist.executor.drive import Drive

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    drive = Drive()
    with pytest.raises(InternalError) as refused:
        drive.room(1 << 60)
    assert refused.value.code == "IO"
    assert os.strerror(errno.ENOSPC) in str(refused.value) or os.strerror(errno.EFBIG) in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_states_leave_a_drive_whole_and_come_back_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a drive gives for a weight is what an optimizer in memory holds for it, and what it is given it trains on with, in blocks
    of any size; forgetting is as before the first step."""
    import torch

    from strategist.executor.drive import Drive, StateOnDrive

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (weights, memory), (_, drive) = (_trained(on_drive, "adamw") for on_drive in (False, True))
    states = list(drive.whole().values())
    for state, expected in zip(states, memory.state.values(), strict=True):
        assert state.keys() == expected.keys()
        assert all(state[name].equal(value) for name, value in expected.items())

    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    other: Any = StateOnDrive(parameters, lambda groups: torch.optim.AdamW(groups, lr=0.1), Drive(), 100)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    other.step()
    other.take(dict(zip(parameters, states, strict=True)))
    assert all(
        got[name].equal(value)
        for got, state in zip(other.whole().values(), states, strict=True)
        for name, value in state.items()
    )
    other.forget()
    assert (other.images, list(other.state)) == ([], [])
