"""What the ranks of the parity matrix train, and the one process that they are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.distributed import get_rank
from torch.nn.functional import cross_entropy

from strategist.document.plan import Plan
from strategist.executor.build import build
from strategist.executor.data import Sample, SyntheticTokens
from strategist.executor.initialise import initialise
from strategist.executor.job import Instruments
from strategist.executor.loss import logits_of
from strategist.executor.models import model_from_shape
from strategist.executor.optimizers import BETAS, WEIGHT_DECAY, default_optimizer
from strategist.facts.model import ModelShape
from tests.executor.harness import run_ranks
from tests.executor.hugging_face import tiny
from tests.executor.matrix import SEQ_LEN, Cell
from tests.executor.ragged import RaggedTokens
from tests.executor.workers import beside, server_of
from tests.plans import FLOAT64

SEED, CLIP = 3, 0.5


@dataclass(frozen=True)
class Kind:
    """How one cell is looked at: its arithmetic, for how many steps, and how far losses and weights may be from one process'."""

    arithmetic: str
    steps: int
    rate: float
    loss_bound: float
    weight_bound: float | None = None

    @property
    def resting(self) -> torch.dtype:
        """The format of its weights."""
        return torch.float64 if self.arithmetic == "float64" else torch.float32


EXACT = Kind("float64", 5, 1e-2, 1e-12, 1e-9)
SINGLE = Kind("float32", 20, 1e-3, 5e-6)
HALF = Kind("bfloat16", 20, 1e-3, 5e-3)


def kinds_of(cell: Cell) -> tuple[Kind, ...]:
    """How a cell is looked at: in fp32 exactly, and on up to four ranks over many steps for tasks that those of bf16 complete, or of
    transformers' models, for which one cell stands where there are four of the built-in one's."""
    if cell.precision == "bf16":
        return (HALF,)
    goes_on = cell.layout.world <= 4 and (bool(cell.family) or (cell.accumulation == 4) == cell.tied)
    return (EXACT, SINGLE) if goes_on else (EXACT,)


Trained = tuple[list[float], dict[str, Tensor]]
"""Losses and final weights."""


class HalfRagged(RaggedTokens):
    """Samples of equal length, from the middle on of unequal lengths."""

    def __getitem__(self, index: int) -> Sample:
        """One sample; from the middle on some labels do not count."""
        return super().__getitem__(index) if 2 * index >= len(self) else SyntheticTokens.__getitem__(self, index)


def samples(shape: ModelShape, kind: Kind, batch: int) -> HalfRagged:
    """The samples of all steps of `batch` sequences."""
    return HalfRagged(shape.vocab, SEQ_LEN, kind.steps * batch)


@dataclass(frozen=True)
class Job:
    """A Plan, how its training is looked at, and whether a model of transformers is trained."""

    plan: Plan
    kind: Kind
    of_transformers: bool = False

    @property
    def alone(self) -> Trained:
        """What one process makes of it."""
        return trained_alone(self.plan.model, self.kind, self.plan.workload.global_batch, self.of_transformers)


def jobs_of(cell: Cell) -> list[Job]:
    """A cell, once for each kind."""
    return [Job(cell.plan, kind, bool(cell.family)) for kind in kinds_of(cell)]


def train_cells(jobs: Sequence[Job]) -> list[Trained]:
    """Losses and weights of some jobs under layouts of the same ranks, one after the other."""
    return [_trained(job) for job in jobs]


def _trained(job: Job) -> Trained:
    plan, kind = job.plan, job.kind
    if kind == EXACT:
        plan = replace(plan, strategy=replace(plan.strategy, formats=FLOAT64))
    optimizer = default_optimizer(plan, kind.rate)
    # one of transformers comes with other values on every rank, of which those of rank 0 count
    model = tiny(plan.model, kind.resting, SEED + get_rank()) if job.of_transformers else model_from_shape(plan.model)
    data = samples(plan.model, kind, plan.workload.global_batch)
    with beside(plan):
        server = server_of(plan, model, seed=SEED, learning_rate=kind.rate)
        session = build(plan, model, optimizer, clip_norm=CLIP, seed=SEED, instruments=Instruments(server=server))
        losses = [session.step(batch).loss for batch in session.loader(data, shuffle=False)]
        return losses, session.parameters_full() if kind.weight_bound else {}


def assert_trained_like_one_process(jobs: Sequence[Job]) -> None:
    """Losses, and in float64 weights, of some jobs under layouts of the same ranks are those of one process."""
    limit_s = 60.0 + 60.0 * len(jobs)
    for outcomes in run_ranks(jobs[0].plan.processes, train_cells, jobs, timeout_s=limit_s):
        for job, (losses, weights) in zip(jobs, outcomes, strict=True):
            plan, kind, (expected_losses, expected) = job.plan, job.kind, job.alone
            about = f"{plan.model.name}, {kind.arithmetic}, accumulation {plan.strategy.accumulation}, tied {plan.model.tied}"
            furthest = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
            assert furthest <= kind.loss_bound, f"{about}: losses differ by {furthest}"
            if kind.weight_bound:
                assert weights.keys() == expected.keys(), about
                off = max(float((weights[name] - value).abs().max()) for name, value in expected.items())
                assert off <= kind.weight_bound, f"{about}: weights differ by {off}"


@cache
def trained_alone(shape: ModelShape, kind: Kind, batch: int, of_transformers: bool = False) -> Trained:
    """The same in one process with nothing but torch, each batch in one piece."""
    if of_transformers:
        model = tiny(shape, kind.resting, SEED)
    else:
        model = model_from_shape(shape, "cpu", kind.resting)
        initialise(model, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=kind.rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    lowered = torch.autocast("cpu", torch.bfloat16) if kind == HALF else nullcontext()
    losses = []
    for inputs, labels in _batches(shape, kind, batch):
        with lowered:
            logits = logits_of(model(inputs))
        loss = cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1), labels.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def _batches(shape: ModelShape, kind: Kind, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    data = samples(shape, kind, batch)
    for first in range(0, len(data), batch):
        chosen = [data[number] for number in range(first, first + batch)]
        inputs, labels = (torch.stack([sample[name] for sample in chosen]) for name in ("input_ids", "labels"))
        yield inputs, labels
