"""Samples for data-parallel ranks, and a synthetic task that any model can be seen to learn.

The order of samples is one global list; step s takes the next global batch of it, and data rank r the r-th part of that, which is
larger where it runs more micro-batches.
Which samples a step sees therefore does not depend on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from queue import Full, Queue
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from strategist.errors import InputError, StrategistError
from strategist.executor.seeds import generator
from strategist.records import dataclass

Sample = Mapping[str, Tensor]

MULTIPLIER, OFFSET, NOISE = 5, 17, 0.15


class Unreadable(Exception):
    """Samples that a rank could not get. The text names them."""


class SyntheticTokens(Dataset[Sample]):
    """Sequences in which the next token is (5 x token + 17) mod vocab, but for 15 % that are random.

    A model that learns the map reaches a loss near 0.15 ln(vocab) + 0.42 (the entropy of the noise).
    """

    def __init__(self, vocab: int, seq_len: int, size: int, seed: int = 0) -> None:
        self.vocab, self.seq_len, self.size, self.seed = vocab, seq_len, size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        """`input_ids` and `labels`, both T tokens; labels are the inputs one token later. The same for every caller."""
        if not 0 <= index < self.size:
            raise IndexError(index)
        source = generator("cpu", self.seed, index)
        random = torch.randint(self.vocab, (self.seq_len + 1,), generator=source).tolist()
        is_noise = (torch.rand(self.seq_len + 1, generator=source) < NOISE).tolist()
        tokens = [random[0]]
        for noise, value in zip(is_noise[1:], random[1:], strict=True):
            tokens.append(value if noise else (tokens[-1] * MULTIPLIER + OFFSET) % self.vocab)
        stream = torch.tensor(tokens)
        return {"input_ids": stream[:-1], "labels": stream[1:]}


class SyntheticPairs(Dataset[Sample]):
    """SyntheticTokens in two parts, for an encoder and the decoder behind it: the first `seq_len` tokens are read, and the `target_len`
    that follow them are learnt."""

    def __init__(self, vocab: int, seq_len: int, target_len: int, size: int, seed: int = 0) -> None:
        self.seq_len, self.whole = seq_len, SyntheticTokens(vocab, seq_len + target_len - 1, size, seed)

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> Sample:
        """`input_ids`, `decoder_input_ids` and `labels`, which are the latter one token later; names as transformers' models have them."""
        sample, last = self.whole[index], self.seq_len - 1
        tokens, labels = sample["input_ids"], sample["labels"]
        return {"input_ids": tokens[: self.seq_len], "decoder_input_ids": tokens[last:], "labels": labels[last:]}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShare:
    """Which part of each global batch of so many sequences a rank reads: `size` of them, from the `first` on."""

    first: int
    size: int
    global_batch: int

    def of_step(self, order: list[int], step: int) -> list[int]:
        """The sample numbers this rank reads in one step."""
        first = step * self.global_batch + self.first
        return order[first : first + self.size]


class StepSampler(Sampler[list[int]]):
    """Sample numbers of this rank, one list per step from `first_step` on; an incomplete last global batch is left out."""

    def __init__(self, order: list[int], share: DataShare, first_step: int = 0) -> None:
        self.order, self.share, self.first_step = order, share, first_step

    def words(self, step: int) -> str:
        """The sample numbers of a step, as people say them."""
        numbers = self.share.of_step(self.order, step)
        few = ", ".join(map(str, numbers[:4]))
        return few if len(numbers) <= 4 else f"{few} and {len(numbers) - 4} more"

    def __len__(self) -> int:
        return len(self.order) // self.share.global_batch - self.first_step

    def __iter__(self) -> Iterator[list[int]]:
        return (self.share.of_step(self.order, self.first_step + step) for step in range(len(self)))


def global_order(size: int, *, seed: int, shuffle: bool, sampler: Iterable[int] | None) -> list[int]:
    """Sample numbers in training order, the same on every rank.

    Raises InputError CONFLICT when both `shuffle` and a sampler of the user's ask for an order.
    """
    if sampler is not None and shuffle:
        raise InputError(
            "CONFLICT",
            "shuffle and a sampler both decide the order of samples.",
            flag="shuffle",
            hint="Give one of them: shuffle=False with your sampler.",
        )
    if sampler is not None:
        return list(sampler)
    if not shuffle:
        return list(range(size))
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()


class Loader(DataLoader[Any]):
    """torch's loader, whose batches may be read `ahead` of the step that takes them, so many at most, while a device works.

    One thread of this process reads them in order; what goes wrong goes wrong at its own step.
    """

    ahead: int = 0

    def __iter__(self) -> Any:  # torch names a class of its own
        """Batches in order."""
        batches = super().__iter__()
        return read_ahead(batches, self.ahead) if self.ahead else batches


def read_ahead(batches: Iterator[Any], ahead: int) -> Iterator[Any]:
    """The same batches, of which up to `ahead` are there before they are asked for; nothing is read once the caller has left."""
    ready: Queue[tuple[Any, Exception | None]] = Queue(ahead)
    left = Event()

    def read() -> None:
        try:
            for batch in batches:
                _hand_over(ready, (batch, None), left)
                if left.is_set():
                    return
            end: Exception = StopIteration()
        except Exception as problem:  # noqa: BLE001 - raised where its batch is asked for
            end = problem
        _hand_over(ready, (None, end), left)

    Thread(target=read, name="read ahead", daemon=True).start()
    try:
        while True:
            batch, end = ready.get()
            if isinstance(end, StopIteration):
                return
            if end is not None:
                raise end
            yield batch
    finally:
        left.set()


def _hand_over(ready: Queue[Any], item: Any, left: Event) -> None:
    """Put an item into a queue that may be full until somebody takes one or has left."""
    while not left.is_set():
        with suppress(Full):
            ready.put(item, timeout=0.1)
            return


def data_loader(
    dataset: Dataset[Any],
    share: DataShare,
    order: list[int],
    first_step: int = 0,
    *,
    ahead: int = 0,
    pinned: bool = False,
) -> Loader:
    """Batches of this rank, one per step from `first_step` on, stacked sample by sample, `ahead` of the step and in `pinned` memory as asked.

    Raises InputError TOO_SMALL when the samples do not make one global batch, RANGE when the pass ends before
    `first_step`.
    """
    if len(order) < share.global_batch:
        raise InputError(
            "TOO_SMALL",
            f"The data has {len(order)} samples, but one step takes {share.global_batch}.",
            flag="dataset",
            value=len(order),
            hint="Give more samples, or plan with a smaller global batch.",
        )
    per_pass = len(order) // share.global_batch
    if not 0 <= first_step < per_pass:
        raise InputError(
            "RANGE",
            f"first_step is {first_step}, and a pass over the data has {per_pass} steps.",
            flag="first_step",
            value=first_step,
            hint="Give session.steps modulo the steps of a pass, and the seed of that pass.",
        )
    loader = Loader(dataset, batch_sampler=StepSampler(order, share, first_step), pin_memory=pinned)
    loader.ahead = ahead
    return loader


def next_batch(batches: Iterator[Any], sampler: StepSampler, step: int) -> Any:
    """The batch of one step of a pass. Raises Unreadable, naming the samples, when the data end early or cannot be read."""
    try:
        return next(batches)
    except StopIteration:
        raise Unreadable(f"the data ended before samples {sampler.words(step)}") from None
    except StrategistError:
        raise
    except Exception as problem:
        raise Unreadable(
            f"samples {sampler.words(step)} cannot be read: {type(problem).__name__}: {problem}"
        ) from problem
