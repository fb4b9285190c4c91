"""Which samples a rank reads depends on its data coordinate, and which a step reads not on the number of ranks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.errors import InputError
from tests.examples import examples

pytestmark = pytest.mark.slow


@examples(60)
@given(
    ranks=st.sampled_from([1, 2, 3, 4, 6]),
    per_rank=st.integers(1, 4),
    spare=st.integers(0, 30),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_ranks_share_each_global_batch_without_loss_or_repetition(
    ranks: int, per_rank: int, spare: int, seed: int, shuffle: bool
) -> None:
    """The ranks' parts of step s, one after the other, are the s-th global batch of the one global order."""
    from strategist.executor.data import DataShare, StepSampler, global_order

    batch = ranks * per_rank
    order = global_order(batch + spare, seed=seed, shuffle=shuffle, sampler=None)
    samplers = [
        StepSampler(order, DataShare(first=r * per_rank, size=per_rank, global_batch=ranks * per_rank))
        for r in range(ranks)
    ]
    steps = list(zip(*samplers, strict=True))
    assert len(steps) == len(order) // batch
    assert [number for step in steps for part in step for number in part] == order[: len(steps) * batch]
    assert sorted(order) == list(range(batch + spare))


@examples(60)
@given(
    before=st.sampled_from([1, 2, 4]), after=st.sampled_from([1, 2, 4]), stop=st.integers(0, 4), seed=st.integers(0, 5)
)
def test_another_number_of_ranks_goes_on_with_the_next_sample(before: int, after: int, stop: int, seed: int) -> None:
    """Ranks that stop after some steps and other ranks that go on read the one global order once, none lost, none twice."""
    from strategist.executor.data import DataShare, StepSampler, global_order

    order = global_order(5 * 8 + 3, seed=seed, shuffle=True, sampler=None)

    def read(ranks: int, first: int) -> list[list[int]]:
        samplers = [
            StepSampler(order, DataShare(first=r * (8 // ranks), size=8 // ranks, global_batch=8), first)
            for r in range(ranks)
        ]
        return [[number for part in step for number in part] for step in zip(*samplers, strict=True)]

    steps = read(before, 0)[:stop] + read(after, stop)
    assert [number for step in steps for number in step] == order[:40]


def test_a_pass_cannot_begin_behind_its_end() -> None:
    """A first step that the pass does not have is refused with the steps that it has."""
    from strategist.executor.data import DataShare, SyntheticTokens, data_loader

    with pytest.raises(InputError, match="has 2 steps") as caught:
        data_loader(SyntheticTokens(10, 4, 8), DataShare(first=0, size=2, global_batch=4), list(range(8)), 2)
    assert caught.value.code == "RANGE"


def test_shuffle_and_a_sampler_contradict_each_other() -> None:
    """Two orders for the same samples are refused, and a sampler alone is obeyed."""
    from strategist.executor.data import global_order

    with pytest.raises(InputError) as caught:
        global_order(4, seed=0, shuffle=True, sampler=[3, 1, 2, 0])
    assert caught.value.code == "CONFLICT"
    assert global_order(4, seed=0, shuffle=False, sampler=[3, 1, 2, 0]) == [3, 1, 2, 0]


def test_too_few_samples_are_refused_with_both_numbers() -> None:
    """A dataset that does not fill one global batch is an error, not an empty loop."""
    from strategist.executor.data import DataShare, SyntheticTokens, data_loader

    with pytest.raises(InputError, match=r"7 samples, but one step takes 8") as caught:
        data_loader(SyntheticTokens(10, 4, 7), DataShare(first=0, size=4, global_batch=8), list(range(7)))
    assert caught.value.code == "TOO_SMALL"


def test_synthetic_tokens_are_learnable_and_shifted() -> None:
    """Labels are the inputs one token later, and all but about 15 % of them follow the map."""
    from strategist.executor.data import MULTIPLIER, NOISE, OFFSET, SyntheticTokens

    data = SyntheticTokens(vocab=101, seq_len=200, size=50, seed=4)
    assert all((s["input_ids"][1:] == s["labels"][:-1]).all() for s in (data[0], data[49]))
    follows = [((s["input_ids"] * MULTIPLIER + OFFSET) % 101 == s["labels"]).double().mean() for s in map(data.__getitem__, range(50))]  # fmt: skip
    expected = 1 - NOISE * 100 / 101
    assert abs(float(sum(follows)) / 50 - expected) < 4 * math.sqrt(expected * (1 - expected) / (50 * 200))


def test_synthetic_samples_do_not_depend_on_who_reads_them() -> None:
    """A sample is a function of seed and number only; other seeds and numbers give other samples."""
    from strategist.executor.data import SyntheticTokens

    one, two = SyntheticTokens(64, 32, 10, seed=1), SyntheticTokens(64, 32, 1000, seed=1)
    assert one[3]["input_ids"].equal(two[3]["input_ids"])
    assert not one[3]["input_ids"].equal(one[4]["input_ids"])
    assert not one[3]["input_ids"].equal(SyntheticTokens(64, 32, 10, seed=2)[3]["input_ids"])


class Watched(list[int]):
    """Samples that say which of them were read; one of them may not be readable."""

    def __init__(self, size: int, broken: int | None = None) -> None:
        super().__init__(range(size))
        self.read: list[int] = []
        self.broken = broken

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)
        if index == self.broken:
            raise ValueError(f"sample {index} is gone")
        return {"input_ids": torch_tensor(index)}


def torch_tensor(number: int) -> Any:
    import torch

    return torch.tensor([number])


def read_by(samples: Watched, ahead: int) -> Any:
    """The batches of one rank, two samples each."""
    from strategist.executor.data import DataShare, data_loader

    return data_loader(samples, DataShare(first=0, size=2, global_batch=2), list(range(len(samples))), ahead=ahead)  # type: ignore[arg-type]


def until(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something comes to hold in some time."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


@pytest.mark.parametrize("ahead", [0, 1, 3, 50])
def test_batches_are_the_same_however_far_ahead_they_are_read(ahead: int) -> None:
    """In their order, each once, and a second pass over the same loader begins anew."""
    loader = read_by(Watched(12), ahead)
    for _ in range(2):
        assert [batch["input_ids"].flatten().tolist() for batch in loader] == [[n, n + 1] for n in range(0, 12, 2)]


def test_no_more_is_read_ahead_than_was_asked_for() -> None:
    """With two ahead: of the first batch that is taken two more lie ready and one waits to be handed over; nothing is read once the
    caller has left."""
    samples = Watched(40)
    batches = iter(read_by(samples, 2))
    next(batches)
    assert until(lambda: len(samples.read) == 8)
    time.sleep(0.3)
    assert len(samples.read) == 8
    batches.close()
    names = [thread.name for thread in threading.enumerate()]
    assert until(lambda: "read ahead" not in [thread.name for thread in threading.enumerate()]), names
    assert len(samples.read) <= 10


def test_what_cannot_be_read_fails_at_its_own_step() -> None:
    """A broken sample two steps ahead takes nothing from the steps before it."""
    batches = iter(read_by(Watched(12, broken=5), 3))
    assert [next(batches)["input_ids"].flatten().tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="sample 5 is gone"):
        next(batches)
